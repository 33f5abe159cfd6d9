"""Sparse attention: the lightning indexer, and attention over what it selects, with their kernels for CPU tensors.

Shapes, meaning and signatures are those of `rlloop.numerics.ops.Ops`. CUDA tensors go to
`rlloop.numerics.kernels.triton`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu import sparse as kernels
from rlloop.numerics.kernels.cpu.contract import _operator, attention_shapes, linear_out_float32, value_rows
from rlloop.numerics.kernels.cpu.jit import flat, threads_for
from rlloop.numerics.layout import AttentionLayout


def index_weights(x: Tensor, weight: Tensor) -> Tensor:
    return linear_out_float32(x, weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    if x.is_cuda:
        from rlloop.numerics.kernels.triton import elementwise

        return elementwise.layer_norm(x, weight, bias, eps)
    out, width = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    wide = [flat(tensor.detach().float().contiguous()) for tensor in (weight, bias)]
    kernels.layer_norm(threads_for(8 * x.numel()), flat(x.contiguous()), *wide, np.float32(eps), flat(out), width)
    return out


def select(q: Tensor, k: Tensor, weights: Tensor, layout: AttentionLayout, scale: float, count: int) -> Tensor:
    if q.is_cuda:
        from rlloop.numerics.kernels.triton import sparse

        return sparse.select(q, k, weights, layout, scale, count)
    (tokens, heads, width), starts, contexts = q.shape, flat(layout.query_start), flat(layout.context)
    selected, counts = torch.empty(tokens, count, dtype=torch.int64), np.diff(starts)
    first_task = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(-(-counts // kernels.QUERIES), out=first_task[1:])
    pairs = int(counts @ (contexts + counts)) * heads
    kernels.select(
        threads_for(pairs * width), flat(q.contiguous()), flat(k.contiguous()), flat(weights.contiguous()), starts,
        contexts, flat(layout.block_start.contiguous()), layout.block_start.shape[1], layout.block_size, first_task,
        heads, width, np.float32(scale), count, flat(selected),
    )  # fmt: skip
    return selected


def _attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, query_start: Tensor, block_start: Tensor, block_size: int,
    scale: float, split: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (tokens, heads, width), v_width, count = q.shape, v.shape[2], selected.shape[1]
    out, lse = q.new_empty(tokens, heads, v_width), torch.empty(tokens, heads)
    kernels.forward(
        threads_for(tokens * count * heads * (width + v_width)), flat(q.contiguous()), flat(k.contiguous()),
        *value_rows(v), flat(selected.contiguous()), count, flat(query_start), flat(block_start.contiguous()),
        block_start.shape[1], block_size, heads, width, v_width, np.float32(scale), split,
        flat(out), flat(lse),
    )  # fmt: skip
    return out, lse


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, selected, query_start, _, _, ctx.scale, *split = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, selected, query_start, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.others = 5 + len(split)


def _gradients_cpu(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    (tokens, heads, width), v_width, count = q.shape, v.shape[2], selected.shape[1]
    kernels.backward(
        threads_for(tokens * count * heads * (width + v_width)), flat(q), flat(k), flat(v),
        flat(selected.contiguous()), count, flat(out), flat(lse), flat(grad.contiguous()), flat(query_start), heads,
        width, v_width, np.float32(scale), *map(flat, gradients),
    )  # fmt: skip
    return gradients


_gradients = _operator(
    "sparse_attention_backward(Tensor q, Tensor k, Tensor v, Tensor selected, Tensor query_start, Tensor out,"
    " Tensor lse, Tensor grad, float scale) -> (Tensor, Tensor, Tensor)",
    _gradients_cpu,
    lambda q, k, v, *others: tuple(map(torch.empty_like, (q, k, v))),
)


def _attention_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_gradients(*ctx.saved_tensors, grad, ctx.scale), *[None] * ctx.others


_attention = _operator(
    "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor selected, Tensor query_start, Tensor block_start,"
    " int block_size, float scale) -> (Tensor, Tensor)",
    _attention_cpu,
    attention_shapes,
    _attention_backward,
    _attention_setup,
)
_attention_in_parts = _operator(
    "sparse_attention_in_parts(Tensor q, Tensor k, Tensor v, Tensor selected, Tensor query_start, Tensor block_start,"
    " int block_size, float scale, int split) -> (Tensor, Tensor)",
    _attention_cpu,
    attention_shapes,
    _attention_backward,
    _attention_setup,
)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, layout: AttentionLayout, scale: float, split: int = 0
) -> Tensor:
    if not layout.contiguous and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("attention over a paged cache has no gradient; train with AttentionLayout.of_sequences")
    rest = (selected, layout.query_start, layout.block_start, layout.block_size, scale)
    return (_attention_in_parts(q, k, v, *rest, split) if split else _attention(q, k, v, *rest))[0]
