"""FlashAttention over the engine's pages, for an engine of the collapse study (`arm=flash_attention`): vLLM's build.

PyTorch's SDPA gives FlashAttention no ragged pages: with the mask that they need it takes another kernel. Version 3 on
Hopper, elsewhere 2; the keys in as many parts as the kernel likes, so bits vary with the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlloop.numerics import stock
from rlloop.numerics.layout import CAUSAL, AttentionLayout, AttentionMask


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, mask: AttentionMask = CAUSAL
) -> Tensor:
    if layout.contiguous or mask.sinks is not None:
        return stock.attention(q, k, v, layout, scale, mask)
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    page, sequences = layout.block_size, len(layout.block_start)
    keys, values = (x[: len(x) // page * page].view(-1, page, *x.shape[1:]) for x in (k, v))
    pages = (layout.block_start // page).int().clamp(0, len(keys) - 1)  # a short sequence's last may be anything
    return flash_attn_varlen_func(
        q, keys, values,
        cu_seqlens_q=layout.query_start.int(),
        seqused_k=(layout.context + layout.query_start.diff()).int(),
        block_table=pages.contiguous(),
        max_seqlen_q=1 if len(q) == sequences else len(q),  # at most: the host looks at nothing
        max_seqlen_k=pages.shape[1] * page,
        softmax_scale=scale,
        causal=True,
        window_size=(mask.window - 1, 0) if mask.window else (-1, -1),
        fa_version=3 if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9 else 2,
    )  # fmt: skip
