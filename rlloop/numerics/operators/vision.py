"""Operations of vision towers beyond a decoder's: layer norm, GELU and bidirectional attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.operators.library import operator


def _layer_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _layer_norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return *_layer_norm_gradients(x, weight, ctx.eps, grad), None


_layer_norm_gradients = operator(
    "layer_norm_backward(Tensor x, Tensor weight, float eps, Tensor grad) -> (Tensor, Tensor, Tensor)",
    lambda x, weight, eps, grad: (torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)),
)
layer_norm = operator(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    lambda x, weight, bias, eps: torch.empty_like(x, memory_format=torch.contiguous_format),
    _layer_norm_backward,
    _layer_norm_setup,
)


def _gelu_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


def _gelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _gelu_gradient(*ctx.saved_tensors, ctx.tanh, grad), None


_gelu_gradient = operator(
    "gelu_backward(Tensor x, bool tanh, Tensor grad) -> Tensor", lambda x, tanh, grad: torch.empty_like(x)
)
gelu = operator("gelu(Tensor x, bool tanh) -> Tensor", lambda x, tanh: torch.empty_like(x), _gelu_backward, _gelu_setup)


def _full_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, query_start, _, ctx.scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, query_start, out, lse)
    ctx.mark_non_differentiable(lse)


def _full_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_full_gradients(*ctx.saved_tensors, grad, ctx.scale), None, None, None


_full_gradients = operator(
    "full_attention_backward(Tensor q, Tensor k, Tensor v, Tensor query_start, Tensor out, Tensor lse, Tensor grad,"
    " float scale) -> (Tensor, Tensor, Tensor)",
    lambda q, k, v, *_: tuple(map(torch.empty_like, (q, k, v))),
)
_full_attention = operator(
    "full_attention(Tensor q, Tensor k, Tensor v, Tensor query_start, int longest, float scale) -> (Tensor, Tensor)",
    lambda q, k, v, *_: (torch.empty_like(q), q.new_empty(len(q), q.shape[1], dtype=torch.float32)),
    _full_backward,
    _full_setup,
)


def full_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    assert layout.contiguous
    assert layout.families is None  # so a block is as long as the longest sequence
    return _full_attention(q, k, v, layout.query_start, layout.block_size, scale)[0]
