import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from rlloop.numerics import stock
from rlloop.numerics.layout import AttentionLayout, AttentionMask
from rlloop.recipes.countdown import flash_attention


def by_its_documentation(
    q, k, v, *, cu_seqlens_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
    fa_version,
):  # fmt: skip
    """vLLM's flash_attn_varlen_func over pages: causal from the last key on, `window_size` keys to each side."""
    assert (causal, fa_version) == (True, 2)
    assert all(each.dtype == torch.int32 for each in (cu_seqlens_q, seqused_k, block_table))
    assert int(seqused_k.max()) <= max_seqlen_k
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    outs = []
    for s, used in enumerate(seqused_k.tolist()):
        rows = slice(*cu_seqlens_q[s : s + 2].tolist())
        keys, values = (x[block_table[s].long()].flatten(0, 1)[:used] for x in (k, v))
        last = torch.arange(used - (rows.stop - rows.start), used)[:, None]
        at = torch.arange(used)
        seen = at <= last
        if window_size != (-1, -1):
            seen &= (at >= last - window_size[0]) & (at <= last + window_size[1])
        out = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=seen, scale=softmax_scale,
            enable_gqa=True,
        )  # fmt: skip
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 1, 6)])
def test_flash_attention_reads_the_keys_of_each_sequences_pages(monkeypatch, counts, window):
    module = ModuleType("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func = by_its_documentation  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
    generator, page = torch.Generator().manual_seed(0), 4
    contexts = torch.tensor([5, 0, 9])
    layout = AttentionLayout(
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]),
        context=contexts,
        block_start=page * torch.tensor([[7, 2, 5, 900], [1, 3, -2, 0], [6, 0, 4, 8]]),  # what is not used is anything
        block_size=page,
        contiguous=False,
    )
    slots = 9 * page + 3  # and spare ones, which fill no page
    q = torch.randn(sum(counts), 4, 8, generator=generator)
    k, v = (torch.randn(slots, 2, 8, generator=generator) for _ in range(2))
    mask = AttentionMask(window=window)
    made = flash_attention.attention(q, k, v, layout, 0.3, mask)
    torch.testing.assert_close(made, stock.attention(q, k, v, layout, 0.3, mask))
