"""Attention over all keys or over selected ones, and what the indexer that selects them needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.layout import CAUSAL, AttentionLayout, AttentionMask
from rlloop.numerics.operators.library import operator
from rlloop.numerics.operators.products import linear_float32


def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(len(q), q.shape[1], v.shape[2]), q.new_empty(len(q), q.shape[1], dtype=torch.float32)


def _gradient_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, (q, k, v)))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, query_start, _, _, _, ctx.scale, _, ctx.window, sinks = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, query_start, out, lse, sinks)
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    gradients = _gradients(*saved, grad, ctx.scale, ctx.window)
    if sinks is None:
        return *gradients, *[None] * 8
    *_, out, lse = saved
    return *gradients, *[None] * 7, _of_sinks(sinks, out, lse, grad)


def _of_sinks(sinks: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    """A sink takes mass from every key, so its gradient is against `out`."""
    lost = torch.exp(sinks.float() - lse) * (grad.float() * out.float()).sum(-1)
    return -kernels_for(lost.device).sum_of_rows(lost).to(sinks.dtype)


_gradients = operator(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor query_start, Tensor out, Tensor lse, Tensor grad,"
    " float scale, int window) -> (Tensor, Tensor, Tensor)",
    _gradient_shapes,
)
_attention = operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor query_start, Tensor context, Tensor block_start, int block_size,"
    " float scale, int split, int window, Tensor? sinks) -> (Tensor, Tensor)",
    _shapes,
    _backward,
    _setup,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, mask: AttentionMask = CAUSAL
) -> Tensor:
    _check_gradient(q, k, v, layout)
    split = 0 if mask.window else mask.split
    if layout.decoding:
        parts = zip(q.tensor_split([layout.decoding]), layout.apart, strict=True)
        return torch.cat([attention(queries, k, v, part, scale, mask) for queries, part in parts])
    if layout.families is not None:
        return _FamiliesAttention.apply(q, k, v, mask.sinks, layout, scale, split, mask.window)
    return _attention(
        q, k, v, layout.query_start, layout.context, layout.block_start, layout.block_size, scale, split, mask.window,
        mask.sinks,
    )[0]  # fmt: skip


class _FamiliesAttention(torch.autograd.Function):
    """`_attention` over a layout with families, whose gradients are sums of another order."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: AttentionLayout, scale: float,
        split: int, window: int,
    ) -> Tensor:  # fmt: skip
        out, lse = _attention(
            q, k, v, layout.query_start, layout.context, layout.block_start, layout.block_size, scale, split, window,
            sinks,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        gradients = kernels_for(q.device).families_backward(
            q, k, v, ctx.layout, out, lse, grads[0], ctx.scale, ctx.window
        )
        return *gradients, None if sinks is None else _of_sinks(sinks, out, lse, grads[0]), *[None] * 4


def _check_gradient(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, families: bool = True) -> None:
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return
    if not layout.contiguous:
        raise ValueError("attention over a paged cache has no gradient; train with AttentionLayout.of_sequences")
    if layout.families is not None and not families:
        raise ValueError("sparse attention has no gradient over shared prefixes; train whole sequences")


# --------------------------------------------------------------------------------------------------- selected positions


def index_weights(x: Tensor, weight: Tensor) -> Tensor:
    return linear_float32(x, weight)


def select(q: Tensor, k: Tensor, weights: Tensor, layout: AttentionLayout, scale: float, count: int) -> Tensor:
    return kernels_for(q.device).select(q, k, weights, layout, scale, count)


def _sparse_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, selected, query_start, _, _, ctx.scale, _ = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, selected, query_start, out, lse)
    ctx.mark_non_differentiable(lse)


def _sparse_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_sparse_gradients(*ctx.saved_tensors, grad, ctx.scale), *[None] * 6


_sparse_gradients = operator(
    "sparse_attention_backward(Tensor q, Tensor k, Tensor v, Tensor selected, Tensor query_start, Tensor out,"
    " Tensor lse, Tensor grad, float scale) -> (Tensor, Tensor, Tensor)",
    _gradient_shapes,
)
_sparse_attention = operator(
    "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor selected, Tensor query_start, Tensor block_start,"
    " int block_size, float scale, int split) -> (Tensor, Tensor)",
    _shapes,
    _sparse_backward,
    _sparse_setup,
)


# Each makes (out, log-sum-exp); for what keeps these of a layer made again.
FORWARDS = torch.ops.rlloop.attention.default, torch.ops.rlloop.sparse_attention.default


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, layout: AttentionLayout, scale: float, split: int = 0
) -> Tensor:
    _check_gradient(q, k, v, layout, families=False)
    return _sparse_attention(
        q, k, v, selected, layout.query_start, layout.block_start, layout.block_size, scale, split
    )[0]  # fmt: skip
