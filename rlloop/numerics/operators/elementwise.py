"""Norm, activations and rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.operators.library import operator


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, residual = inputs
    _, stream, scales = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(stream if ctx.has_residual else x, weight, scales)
    ctx.set_materialize_grads(False)


def _rms_norm_backward(ctx: Any, grad: Tensor | None, grad_stream: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    stream, weight, scales = ctx.saved_tensors
    if grad is None:
        return grad_stream, None, None, grad_stream
    grad_x, grad_weight = _rms_norm_gradients(stream, weight, scales, grad, grad_stream)
    return grad_x, grad_weight, None, grad_x if ctx.has_residual else None


_rms_norm_gradients = operator(
    "rms_norm_backward(Tensor stream, Tensor weight, Tensor scales, Tensor grad, Tensor? grad_stream)"
    " -> (Tensor, Tensor)",
    lambda stream, weight, scales, grad, grad_stream: (torch.empty_like(stream), torch.empty_like(weight)),
)
_rms_norm = operator(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual) -> (Tensor, Tensor, Tensor)",
    lambda x, weight, eps, residual: (
        torch.empty_like(x), x.new_empty(0 if residual is None else x.shape),
        x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32),
    ),
    _rms_norm_backward,
    _rms_norm_setup,
)  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    out, stream, _ = _rms_norm(x, weight, eps, residual)
    return out, x if residual is None else stream


class _NormOfSum(torch.autograd.Function):
    """`rms_norm` with a residual, whose sum has been made before. The sum comes out again, so that its gradient is
    added to that of the norm before both are rounded."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, _, scales = _rms_norm(total, weight, eps, None)
        ctx.save_for_backward(total, weight, scales)
        ctx.set_materialize_grads(False)
        return out, total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_total = grads
        if grad is None:
            return grad_total, None, None
        return *_rms_norm_gradients(*ctx.saved_tensors, grad, grad_total), None


def norm_of_sum(total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _NormOfSum.apply(total, weight, eps)


silu_mul_gradients = operator(
    "silu_mul_backward(Tensor gate, Tensor up, Tensor grad) -> (Tensor, Tensor)",
    lambda gate, up, grad: (torch.empty_like(gate), torch.empty_like(up)),
)
silu_mul = operator(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    lambda gate, up: torch.empty_like(gate),
    lambda ctx, grad: silu_mul_gradients(*ctx.saved_tensors, grad),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def sigmoid(x: Tensor) -> Tensor:
    """Sigmoid of float32 numbers. PyTorch's own, on a CPU, has other bits at the end of each thread's share."""
    return sigmoid_mul(x, torch.ones_like(x))


def _sigmoid_mul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    gates, wide = sigmoid(gate.float()), grad.float()
    return (wide * up.float() * gates * (1 - gates)).to(gate.dtype), (wide * gates).to(up.dtype)


sigmoid_mul = operator(
    "sigmoid_mul(Tensor gate, Tensor up) -> Tensor",
    lambda gate, up: torch.empty_like(up),
    _sigmoid_mul_backward,
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *tables, ctx.sign = inputs
    ctx.save_for_backward(*tables)


def _rope_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _rope(grad, *ctx.saved_tensors, -ctx.sign), None, None, None, None


_rope = operator(
    "rope(Tensor x, Tensor positions, Tensor cos, Tensor sin, float sign) -> Tensor",
    lambda x, positions, cos, sin, sign: torch.empty_like(x),
    _rope_backward,
    _rope_setup,
)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rope(x, positions, cos, sin, 1.0)
