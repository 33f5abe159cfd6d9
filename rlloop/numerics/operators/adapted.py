"""Products with low-rank adapters (LoRA, arXiv:2106.09685), computed as longer sums.

z = A x is rounded to the compute type; then each output's sum is continued by the terms of B' z, where B' is the
rounded scale * B, and rounded once at the end. So a row has one definition everywhere, and a row without an adapter, or
with B = 0, has the bits of the plain product. Nothing is merged.

The weight's own gradient is computed only if it requires one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.kernels.terms import Products, terms_gradients
from rlloop.numerics.layout import AdapterSlots, Factors, offsets_of
from rlloop.numerics.operators.elementwise import silu_mul
from rlloop.numerics.operators.library import operator, without_result
from rlloop.numerics.operators.mixture import AddBias, Spread, clamped_glu
from rlloop.numerics.operators.products import (
    gradient_type,
    grouped_linear,
    grouped_rows_gradient,
    grouped_weight_gradient,
    linear,
    product,
)
from rlloop.numerics.packed import is_packed
from rlloop.numerics.routing import Clamped

PRODUCTS = Products(product, grouped_rows_gradient, grouped_weight_gradient)
TERMS = "Tensor z, Tensor up, bool up_by_row, Tensor slots, Tensor ranks"


def _terms_gradients(ctx: Any, grad: Tensor, z: Tensor, up: Tensor, by_row: bool, slots: Tensor) -> tuple[Any, Any]:
    if not (ctx.needs_input_grad[4] or ctx.needs_input_grad[5]):
        return None, None
    return terms_gradients(PRODUCTS, grad, z, up, by_row, slots, gradient_type(up))


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, _, z, up, ctx.by_row, slots, _ = inputs
    ctx.save_for_backward(x, weight, z, up, slots)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight, z, up, slots), needs = ctx.saved_tensors, ctx.needs_input_grad
    grad_x = product(grad, True, weight, False, x.dtype) if needs[0] else None
    grad_weight = product(grad, False, x, False, gradient_type(weight)) if needs[1] else None
    grad_bias = None
    if needs[2]:
        grad_bias = product(torch.ones(1, len(grad), device=grad.device), True, grad, False, gradient_type(weight))[0]
    of_terms = _terms_gradients(ctx, grad, z, up, ctx.by_row, slots)
    return grad_x, grad_weight, grad_bias, None, *of_terms, None, None, None


linear_with_terms = operator(
    f"adapted_linear(Tensor x, Tensor weight, Tensor? bias, ScalarType dtype, {TERMS}) -> Tensor",
    lambda x, weight, bias, dtype, *terms: x.new_empty(len(x), len(weight), dtype=dtype),
    _linear_backward,
    _linear_setup,
)
unread_with_terms = without_result(linear_with_terms)


def _grouped_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weight, ctx.by_row, offsets, z, up, ctx.up_by_row, slots, _ = inputs
    ctx.save_for_backward(rows, weight, offsets, z, up, slots)


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (rows, weight, offsets, z, up, slots), needs = ctx.saved_tensors, ctx.needs_input_grad
    grad_rows = grouped_rows_gradient(grad, weight, not ctx.by_row, offsets) if needs[0] else None
    left, right = (grad, rows) if ctx.by_row else (rows, grad)
    grad_weight = grouped_weight_gradient(left, right, offsets, weight.dtype) if needs[1] else None
    of_terms = _terms_gradients(ctx, grad, z, up, ctx.up_by_row, slots)
    return grad_rows, grad_weight, None, None, *of_terms, None, None, None


_grouped = operator(
    f"adapted_grouped_linear(Tensor rows, Tensor weight, bool by_row, Tensor offsets, {TERMS}) -> Tensor",
    lambda rows, weight, by_row, *others: rows.new_empty(len(rows), weight.shape[1 if by_row else 2]),
    _grouped_backward,
    _grouped_setup,
)


def reduced(x: Tensor, down: Tensor, which: AdapterSlots) -> Tensor:
    """z [T, r]: each row of x [T, K] times its slot's A, [S, r, K]. The bits of `linear`."""
    if which.uniform:
        return linear(x, down[0], None)
    order, inverse = which.order
    offsets = offsets_of(which.slots(x)[order], len(down))
    return Spread.apply(grouped_linear(Spread.apply(x, order, inverse, 1), down, True, offsets), inverse, order, 1)


def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors, which: AdapterSlots, dtype: torch.dtype,
    unread: bool = False,
) -> Tensor:  # fmt: skip
    """x [T, K], weight [N, K], bias [N] -> [T, N] in `dtype`, with each row's adapter. `unread`: `without_result`."""
    if not torch.is_grad_enabled():
        kernels = kernels_for(x.device)
        one = None if is_packed(weight) else kernels.adapted_products
        if one is not None and (outputs := one(x, (weight,), bias, dtype, (factors,), which, False)):
            return outputs[0]
        if kernels.adapted_rows is not None and not which.uniform:
            return kernels.adapted_rows(x, weight, bias, dtype, factors, which)
    z = reduced(x, factors.down, which)
    multiply = unread_with_terms if unread else linear_with_terms
    return multiply(x, weight, bias, dtype, z, factors.up, True, which.slots(x), factors.ranks)


def adapted_experts(
    x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool, clamped: Clamped | None,
    factors: tuple[Factors | None, Factors | None], which: AdapterSlots,
) -> Tensor:  # fmt: skip
    """`Ops.experts`, each expert's two matrices with the rows' adapters; `factors` of `up` and of `down`."""
    tokens, top_k = chosen.shape
    slots = next(len(each.ranks) for each in factors if each is not None)
    key = chosen.flatten() * slots + which.slots(x).repeat_interleave(top_k)  # by expert, then by adapter
    order = key.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    key = key[order]
    pairs = offsets_of(key, len(down) * slots)
    offsets = pairs[::slots].contiguous()
    which_pair = key.clamp(max=len(down) * slots - 1)  # a choice that stands for no expert has no further terms

    def multiplied(rows: Tensor, weight: Tensor, each: Factors | None, by_row: bool, dtype: torch.dtype) -> Tensor:
        if each is None:
            return grouped_linear(rows.to(dtype), weight, by_row, offsets)
        z = grouped_linear(rows, each.down.flatten(0, 1), True, pairs)
        terms = (z, each.up.flatten(0, 1), True, which_pair, each.ranks.repeat(len(down)))
        return _grouped(rows.to(dtype), weight, by_row, offsets, *terms)

    def biased(rows: Tensor, weight: Tensor, each: Factors | None, bias: Tensor) -> Tensor:
        sums = multiplied(rows, weight, each, False, torch.float32)
        return AddBias.apply(sums, bias.float(), offsets).to(rows.dtype)

    rows = Spread.apply(x, order, inverse, top_k)
    if clamped is not None:
        inner = clamped_glu(biased(rows, up, factors[0], clamped.up_bias), clamped)
        out = biased(inner, down, factors[1], clamped.down_bias)
    else:
        inner = multiplied(rows, up, factors[0], True, x.dtype)
        inner = silu_mul(*inner.chunk(2, dim=-1)) if gated else inner.relu().square()
        out = multiplied(inner, down, factors[1], True, x.dtype)
    return Spread.apply(out, inverse, order, 1).unflatten(0, (tokens, top_k))


def adapted_head_linear(x: Tensor, weight: Tensor, by_row: bool, factors: Factors, which: AdapterSlots) -> Tensor:
    """`Ops.head_linear` by a part of an adapted weight of all heads: its last rows, or not by_row its first ones.

    x [T, H, K], weight [H, N, K] -> [T, H, N]: a head's further terms are those of its rows of B. Not by_row, weight
    [H, K, N], the factors are exchanged: z = B'^T x, and the sums are continued by A.
    """
    (tokens, heads, width), slots = x.shape, len(factors.ranks)
    of_row = which.slots(x)
    if not which.uniform:
        x, of_row = Spread.apply(x.flatten(1), *which.order, 1).unflatten(1, (heads, width)), of_row[which.order[0]]
    head = torch.arange(heads, device=x.device)[:, None]
    begins = offsets_of(of_row, slots)
    rows, up = x.transpose(0, 1).flatten(0, 1), factors.up.flatten(0, 1)  # [H T, K]; [H S, n, r]
    if by_row:
        z = grouped_linear(x.flatten(0, 1), factors.down, True, begins * heads)
        z = z.unflatten(0, (tokens, heads)).transpose(0, 1).flatten(0, 1)
        of_pair = (head * slots + of_row).flatten()
        terms = (z, up[:, up.shape[1] - weight.shape[1] :], True, of_pair, factors.ranks.repeat(heads))
    else:
        pairs = torch.cat(((head * tokens + begins[:-1]).flatten(), begins.new_full((1,), heads * tokens)))
        z = grouped_linear(rows, up[:, :width], False, pairs)
        terms = (z, factors.down, False, of_row.repeat(heads), factors.ranks)
    out = _grouped(rows, weight, by_row, torch.arange(heads + 1, device=x.device) * tokens, *terms)
    out = out.unflatten(0, (heads, tokens)).transpose(0, 1).contiguous()
    return out if which.uniform else Spread.apply(out.flatten(1), *which.order[::-1], 1).view(out.shape)
