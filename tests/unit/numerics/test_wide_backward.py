"""Attention's gradients over one wide head of keys, made of as many scores at a time as there is memory for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlloop.numerics.kernels.triton import wide_backward as module
from rlloop.numerics.kernels.triton.wide_backward import causal_reads, selected_reads, wide_backward

HEADS, WIDTH, VALUES, SCALE = 3, 20, 16, 0.3
CPU = torch.device("cpu")


def inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and gradients of what is read."""
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, HEADS, WIDTH), (tokens, 1, WIDTH), (tokens, HEADS, VALUES)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def read(q: Tensor, k: Tensor, reads: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys that each query reads, [n, m], in float64: (what is read, log-sum-exp)."""
    scores = torch.einsum("ihd,jd->hij", q.double(), k[:, 0].double()) * SCALE
    scores = scores.masked_fill(~reads, -torch.inf)
    out = torch.einsum("hij,jd->ihd", scores.softmax(-1), k[:, 0, :VALUES].double())
    return out, scores.logsumexp(-1).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", [1 << 20, 70 * 70, 700, 1])  # all heads, one, some of its queries, one query
@pytest.mark.parametrize("kind", ["causal", "window", "selected", "prefix"])
def test_gradients_are_those_of_autograd(
    kind: str, scores: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCORES", scores)
    lengths, prefixes = [70, 1, 41], None
    if kind == "prefix":  # what the other two sequences go on from is the first
        prefixes = [range(0), range(70), range(70)]
    q, k, grad = inputs(sum(lengths), dtype)
    selected = torch.randint(-1, 70, (70, 9), generator=torch.Generator().manual_seed(1)).sort(1).values
    selected[:, -1] = torch.arange(70)  # none reads nothing
    leaves, masks, parts, begin = (q.clone().requires_grad_(), k.clone().requires_grad_()), [], [], 0
    for index, n in enumerate(lengths):
        own = list(range(begin, begin + n))
        keys = [*(prefixes[index] if prefixes else ()), *own]
        whole = causal_reads(n, len(keys), 7 if kind == "window" else 0, CPU)
        if kind == "selected" and n == 70:
            whole = selected_reads(selected)
            assert torch.equal(whole(slice(3, 5)), whole(slice(0, 70))[3:5])
        masks.append(whole)
        parts.append(read(leaves[0][own], leaves[1][keys], whole(slice(0, n))))
        begin += n
    out, lse = (torch.cat(each) for each in zip(*parts, strict=True))
    expected = torch.autograd.grad(out, leaves, grad.double())
    of_q, of_k, of_v = wide_backward(
        q, k, k[..., :VALUES], lengths, masks, out.detach().to(dtype), lse.detach().float(), grad, SCALE, prefixes
    )
    of_k = of_k.float()
    of_k[..., :VALUES] += of_v
    for mine, theirs in zip((of_q, of_k), expected, strict=True):
        assert (mine - theirs).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * theirs.norm()


def test_a_window_reads_the_last_keys() -> None:
    assert causal_reads(2, 5, 2, CPU)(slice(0, 2)).int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
