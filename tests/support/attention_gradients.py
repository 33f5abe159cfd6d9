"""Attention's gradients by autograd in float64, and arguments of the kernels for GPUs that make them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout

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
