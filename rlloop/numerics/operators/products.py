"""Matrix products: of one weight, of one a group of rows, and of one a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.operators.library import operator, without_result

product = operator(
    "product(Tensor rows, bool by_row, Tensor lanes, bool lanes_by_row, ScalarType dtype) -> Tensor",
    lambda rows, by_row, lanes, lanes_by_row, dtype: rows.new_empty(
        rows.shape[0 if by_row else 1], lanes.shape[0 if lanes_by_row else 1], dtype=dtype
    ),
)


def gradient_type(weight: Tensor) -> torch.dtype:
    """The type of a weight's gradient: its own, unless a leaf asks for another, as for a part of a sum."""
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
    grad_x = product(grad, True, weight, False, x.dtype) if needs[0] else None
    grad_weight = product(grad, False, x, False, gradient_type(weight)) if needs[1] else None
    if len(needs) == 2:
        return grad_x, grad_weight
    if not needs[2]:
        return grad_x, grad_weight, None
    ones = torch.ones(1, len(grad), device=grad.device)
    return grad_x, grad_weight, product(ones, True, grad, False, gradient_type(weight))[0]


linear = operator(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, bias: x.new_empty(len(x), len(weight)),
    _linear_backward,
    _linear_setup,
)
unread_linear = without_result(linear)
linear_float32 = operator(  # the float32 sums themselves, not rounded to the type of x
    "linear_float32(Tensor x, Tensor weight) -> Tensor",
    lambda x, weight: x.new_empty(len(x), len(weight), dtype=torch.float32),
    _linear_backward,
    _linear_setup,
)

# ------------------------------------------------------------------------------------------------ one matrix a group


def _grouped_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weight, ctx.by_row, offsets = inputs
    ctx.save_for_backward(rows, weight, offsets)


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (rows, weight, offsets), needs = ctx.saved_tensors, ctx.needs_input_grad
    grad_rows = grouped_rows_gradient(grad, weight, not ctx.by_row, offsets) if needs[0] else None
    left, right = (grad, rows) if ctx.by_row else (rows, grad)
    grad_weight = grouped_weight_gradient(left, right, offsets, weight.dtype) if needs[1] else None
    return grad_rows, grad_weight, None, None


def _rows_shape(rows: Tensor, weight: Tensor, by_row: bool, offsets: Tensor) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[1 if by_row else 2])


grouped_weight_gradient = operator(
    "grouped_weight_gradient(Tensor left, Tensor right, Tensor offsets, ScalarType dtype) -> Tensor",
    lambda left, right, offsets, dtype: left.new_empty(len(offsets) - 1, left.shape[1], right.shape[1], dtype=dtype),
)
grouped_rows_gradient = operator(
    "grouped_rows_gradient(Tensor rows, Tensor weight, bool by_row, Tensor offsets) -> Tensor", _rows_shape
)
grouped_linear = operator(
    "grouped_linear(Tensor rows, Tensor weight, bool by_row, Tensor offsets) -> Tensor",
    _rows_shape,
    _grouped_backward,
    _grouped_setup,
)


def head_linear(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    whole = kernels_for(x.device).head_linear
    if whole is not None:
        return whole(x, weight, by_row)
    tokens, heads, _ = x.shape
    offsets = torch.arange(heads + 1, device=x.device) * tokens
    out = grouped_linear(x.transpose(0, 1).flatten(0, 1), weight, by_row, offsets)
    return out.unflatten(0, (heads, tokens)).transpose(0, 1).contiguous()
