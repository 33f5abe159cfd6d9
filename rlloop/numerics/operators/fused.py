"""Several operations in one, for training: results have the bits of each alone, and fewer launches and less memory
traffic make them. Gradients may differ in their last bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.kernels import kernel_for, kernels_for
from rlloop.numerics.operators.elementwise import silu_mul, silu_mul_gradients
from rlloop.numerics.operators.library import operator
from rlloop.numerics.operators.products import gradient_type, linear, product


def _norm_rope_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, q_weight, k_weight, _, *tables = inputs
    ctx.save_for_backward(q, k, q_weight, k_weight, *output[2:], *tables)
    ctx.set_materialize_grads(False)


def _norm_rope_backward(ctx: Any, grad_q: Tensor | None, grad_k: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: recomputed layers give them one time
    q, k = saved[:2]
    grads = torch.zeros_like(q) if grad_q is None else grad_q, torch.zeros_like(k) if grad_k is None else grad_k
    return *_norm_rope_gradients(*saved, *grads), None, None, None, None


_norm_rope_gradients = operator(
    "norm_rope_backward(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor q_scales, Tensor k_scales,"
    " Tensor positions, Tensor cos, Tensor sin, Tensor grad_q, Tensor grad_k) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda *inputs: tuple(torch.empty_like(each) for each in inputs[:4]),
)
_norm_rope = operator(
    "norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor positions, Tensor cos,"
    " Tensor sin) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda q, k, *_: (
        torch.empty_like(q), torch.empty_like(k),
        *(x.new_empty(x.shape[0] * x.shape[1], dtype=torch.float32) for x in (q, k)),
    ),
    _norm_rope_backward,
    _norm_rope_setup,
)  # fmt: skip


def norm_rope(
    q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], eps: float, positions: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return _norm_rope(q, k, *weights, eps, positions, cos, sin)[:2]


class _Products(torch.autograd.Function):
    """Products of one x. Its gradient is one sum, to which those but the last are added as they are made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(linear(x, weight, None) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, *weights), (needs_x, *needs) = ctx.saved_tensors, ctx.needs_input_grad
        of_weights = (
            product(grad, False, x, False, gradient_type(weight)) if needed else None
            for weight, grad, needed in zip(weights, grads, needs, strict=True)
        )
        of_x = None  # from the last: the first weight of several is the largest, and what is added last is rounded once
        for grad, weight in reversed(list(zip(grads, weights, strict=True))) if needs_x else ():
            if of_x is None:
                of_x = product(grad, True, weight, False, x.dtype)
            else:
                kernel_for(x.device, "add_product")(of_x, grad, weight)
        return of_x, *of_weights


def products(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    made = getattr(kernels_for(x.device), "add_product", None)
    return None if made is None else _Products.apply(x, *weights)


class _GatedDown(torch.autograd.Function):
    """The product's other factor is made again in the backward, beside the gradients of gate and up, which read the
    same numbers."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return linear(silu_mul(gate, up), weight, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gate, up, weight), (grad,) = ctx.saved_tensors, grads
        by_inner = product(grad, True, weight, False, gate.dtype)
        if not ctx.needs_input_grad[2]:
            return *silu_mul_gradients(gate, up, by_inner), None
        of_gate, of_up, inner = _silu_mul_remade(gate, up, by_inner)
        del by_inner
        return of_gate, of_up, product(grad, False, inner, False, gradient_type(weight))


_silu_mul_remade = operator(
    "silu_mul_remade(Tensor gate, Tensor up, Tensor grad) -> (Tensor, Tensor, Tensor)",
    lambda gate, up, grad: (torch.empty_like(gate), torch.empty_like(up), torch.empty_like(gate)),
)


def gated_down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor | None:
    made = getattr(kernels_for(gate.device), "silu_mul_remade", None)
    return None if made is None else _GatedDown.apply(gate, up, weight)
