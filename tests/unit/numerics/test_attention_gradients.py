"""Attention's gradients by the kernels for GPUs, in Triton's interpreter (`test_interpreted_kernels`)."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="kernels are not interpreted")

CPU = torch.device("cpu")


def made(lengths: list[int], dtype: torch.dtype, heads: int, groups: int, width: int, window: int, causal: bool):
    """Arguments of `attention_backward`."""
    from rlloop.numerics.kernels.triton.attention import attention

    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)
    q, k, v, grad = (
        torch.randn(tokens, count, width, generator=generator).to(dtype) for count in (heads, groups, groups, heads)
    )
    layout = AttentionLayout.of_sequences(lengths, CPU)
    shape = (layout.query_start, layout.context, layout.block_start, layout.block_size)
    out, lse = attention(q, k, v, *shape, width**-0.5, window, None, causal)
    return q, k, v, layout.query_start, out, lse, grad, width**-0.5


def exact(arguments: tuple, window: int, causal: bool) -> tuple[Tensor, ...]:
    """Gradients by autograd, in float64."""
    q, k, v, starts, _, _, grad, scale = arguments
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    parts = []
    for begin, end in itertools.pairwise(starts.tolist()):
        one = inputs[0][begin:end]
        keys, values = (x[begin:end].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in inputs[1:])
        at = torch.arange(end - begin)
        reads = torch.ones(len(at), len(at), dtype=torch.bool)
        if causal:
            reads = reads.tril().triu(1 - (window or len(at)))
        scores = torch.einsum("ihd,jhd->hij", one, keys) * scale
        parts.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~reads, -torch.inf).softmax(-1), values))
    return torch.autograd.grad(torch.cat(parts), inputs, grad.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "causal"), [(0, True), (2, True), (70, True), (0, False)])
def test_gradients_are_those_of_autograd(dtype: torch.dtype, window: int, causal: bool) -> None:
    """Lengths of whole tiles and of parts; a number of heads that divides a tile's queries, and one that does not."""
    from rlloop.numerics.kernels.triton.attention_backward import attention_backward

    for lengths, heads, groups, width in (([128, 1, 133], 4, 2, 16), ([70], 3, 1, 16), ([70], 2, 1, 20)):
        arguments = made(lengths, dtype, heads, groups, width, window, causal)
        found = attention_backward(*arguments, window, causal)
        for mine, theirs in zip(found, exact(arguments, window, causal), strict=True):
            assert (mine - theirs).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * theirs.norm()
