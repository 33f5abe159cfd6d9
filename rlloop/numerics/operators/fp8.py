"""Products with trainable 8-bit weights (`numerics.fp8`), which quantise their inputs.

Gradients are straight-through: those of the plain product with the dequantised weight at the unquantised inputs, by the
operators that differentiate every other product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.layout import offsets_of
from rlloop.numerics.operators.elementwise import silu_mul
from rlloop.numerics.operators.mixture import Spread
from rlloop.numerics.operators.products import grouped_rows_gradient, grouped_weight_gradient, product


def _product(x: Tensor, weight: Fp8Weight, offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
    kernels = kernels_for(x.device)
    codes, scales = kernels.fp8_rows(x.contiguous())
    return kernels.fp8_product(codes, scales, weight, offsets, dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Fp8Weight, bias: Tensor | None, unread: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        if unread:
            return x.new_empty(len(x), len(weight))
        out = _product(x, weight, None, x.dtype if bias is None else torch.float32)
        return out if bias is None else (out + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), needs, grad = ctx.saved_tensors, ctx.needs_input_grad, grads[0].contiguous()
        grad_x = product(grad, True, weight.dequantised(), False, x.dtype) if needs[0] else None
        grad_weight = product(grad, False, x, False, weight.dtype) if needs[1] else None
        grad_bias = None
        if needs[2]:
            grad_bias = product(torch.ones(1, len(grad), device=grad.device), True, grad, False, weight.dtype)[0]
        return grad_x, grad_weight, grad_bias, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Fp8Weight, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        return _product(rows, weight, offsets, rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight, offsets), needs, grad = ctx.saved_tensors, ctx.needs_input_grad, grads[0].contiguous()
        grad_rows = grouped_rows_gradient(grad, weight.dequantised(), False, offsets) if needs[0] else None
        grad_weight = grouped_weight_gradient(grad, rows, offsets, weight.dtype) if needs[1] else None
        return grad_rows, grad_weight, None


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None, unread: bool = False) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in the type of x; the bias is added before the one rounding.

    `unread`: as `library.without_result`.
    """
    return _Linear.apply(x, weight, bias, unread)


def fp8_linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`fp8_linear` of one input by several weights, which is quantised once. Without gradients."""
    kernels = kernels_for(x.device)
    codes, scales = kernels.fp8_rows(x.contiguous())
    return tuple(
        kernels.fp8_product(codes, scales, each, None, x.dtype) for each in weights if isinstance(each, Fp8Weight)
    )


def fp8_experts(x: Tensor, up: Fp8Weight, down: Fp8Weight, chosen: Tensor, gated: bool) -> Tensor:
    """`Ops.experts`, each expert's row being what `fp8_linear` by its weights gives."""
    whole = kernels_for(x.device).fp8_gated_experts
    if whole is not None and gated:
        return whole(x, up, down, chosen)
    tokens, top_k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    offsets = offsets_of(chosen.flatten()[order], len(down))
    inner = _Grouped.apply(Spread.apply(x, order, inverse, top_k), up, offsets)
    inner = silu_mul(*inner.chunk(2, dim=-1)) if gated else inner.relu().square()
    return Spread.apply(_Grouped.apply(inner, down, offsets), inverse, order, 1).unflatten(0, (tokens, top_k))
