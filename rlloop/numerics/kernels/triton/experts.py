"""A layer's experts, and products by head, on CUDA; see `rlloop.numerics.ops`.

Rows are found through the sorted choices instead of being moved, and the activation is made where its two sums are. A
forward that will be differentiated keeps the gates and ups, and has the same bits.

Products of no rows are differentiable, too: a rank without tokens takes part in the exchanges of its backward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.kernels.triton import fp8, grouped, packed, sorting
from rlloop.numerics.kernels.triton.launch import EXACT, cdiv

ROWS, COLUMNS = 4, 256  # of a program of the activation


@triton.jit(do_not_specialize=["rows"])
def _silu_halves(both, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = both + row[:, None] * (2 * width) + column[None, :]
    x, y = tl.load(at, inside, 0.0).to(tl.float32), tl.load(at + width, inside, 0.0).to(tl.float32)
    activated = x / (1.0 + tl.exp(-x)) * y
    tl.store(out + row[:, None] * width + column[None, :], activated.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def _silu_halves_backward(both, grad, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * (2 * width) + column[None, :]
    x, y = tl.load(both + at, inside, 0.0).to(tl.float32), tl.load(both + at + width, inside, 0.0).to(tl.float32)
    slope = tl.load(grad + row[:, None] * width + column[None, :], inside, 0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-x))
    by_gate = slope * y * sigmoid * (1.0 + x * (1.0 - sigmoid))
    tl.store(out + at, by_gate.to(out.dtype.element_ty), inside)
    tl.store(out + at + width, (slope * x * sigmoid).to(out.dtype.element_ty), inside)


def _activated(both: Tensor) -> Tensor:
    """silu(gate) * up of gates beside ups, [R, 2F] -> [R, F], by the bits of `silu_mul`."""
    rows, width = len(both), both.shape[1] // 2
    out = both.new_empty(rows, width)
    if rows:
        grid = (cdiv(rows, ROWS), cdiv(width, COLUMNS))
        _silu_halves[grid](both, out, rows, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4, **EXACT)
    return out


def _activated_backward(both: Tensor, grad: Tensor) -> Tensor:
    rows, width = grad.shape
    out = torch.empty_like(both)
    if rows:
        grid = (cdiv(rows, ROWS), cdiv(width, COLUMNS))
        _silu_halves_backward[grid](both, grad, out, rows, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor) -> Tensor:
        (tokens, top_k), rows = chosen.shape, chosen.numel()
        order, groups = sorting.sorted_by_group(chosen.flatten(), len(down), x.dtype)
        both = grouped.product(x, gate_up, groups, rows, order=order, gather=top_k)
        activated = _activated(both)
        ctx.save_for_backward(x, gate_up, down, order, groups.offsets, groups.table, both, activated)
        ctx.height, ctx.top_k = groups.height, top_k
        return grouped.product(activated, down, groups, rows, order=order, scatter=True).unflatten(0, (tokens, top_k))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, order, offsets, table, both, activated = ctx.saved_tensors
        groups, top_k, grad = sorting.Groups(offsets, table, ctx.height), ctx.top_k, grads[0].flatten(0, 1)
        rows, needs = len(order), ctx.needs_input_grad
        plain_up, plain_down = (each.dequantised() if isinstance(each, Fp8Weight) else each for each in (gate_up, down))
        grad_down = grad_gate_up = grad_x = None
        if needs[2]:
            grad_down = grouped.weight_gradient(grad, activated, offsets, down.dtype, order=order, gather_left=True)
        grad_activated = grouped.product(grad, plain_down, groups, rows, by_row=False, order=order, gather=1)
        grad_both = _activated_backward(both, grad_activated)
        if needs[1]:
            grad_gate_up = grouped.weight_gradient(
                grad_both, x, offsets, gate_up.dtype, order=order, gather_right=top_k
            )
        if needs[0]:
            each = grouped.product(grad_both, plain_up, groups, rows, by_row=False, order=order, scatter=True)
            grad_x = each.unflatten(0, (len(x), top_k)).sum(1, dtype=torch.float32).to(x.dtype)
        return grad_x, grad_gate_up, grad_down, None


def experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or gate_up.requires_grad or down.requires_grad):
        return _Experts.apply(x, gate_up, down, chosen)
    (tokens, top_k), rows = chosen.shape, chosen.numel()
    if rows == 0:
        return x.new_empty(tokens, top_k, down.shape[1])
    if tokens == 1:  # nothing to sort
        order, groups = None, sorting.each_its_own(chosen.flatten(), x.dtype)
    else:
        order, groups = sorting.sorted_by_group(chosen.flatten(), len(down), x.dtype)
    activated = packed.product(x, gate_up, groups, rows, order=order, gather=top_k, activate=True)
    return packed.product(activated, down, groups, rows, order=order, scatter=True).unflatten(0, (tokens, top_k))


class _Fp8Experts(_Experts):
    """Products of 8-bit floats; each token is quantised once, and gradients are those of the dequantised weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Fp8Weight, down: Fp8Weight, chosen: Tensor) -> Tensor:  # type: ignore[override]
        (tokens, top_k), rows = chosen.shape, chosen.numel()
        order, groups = sorting.sorted_by_group(chosen.flatten(), len(down), x.dtype)
        both = fp8.product(*fp8.fp8_rows(x), gate_up, rows, x.dtype, groups, order=order, gather=top_k)
        activated = _activated(both)
        ctx.save_for_backward(x, gate_up, down, order, groups.offsets, groups.table, both, activated)
        ctx.height, ctx.top_k = groups.height, top_k
        out = fp8.product(*fp8.fp8_rows(activated), down, rows, x.dtype, groups, order=order, scatter=True)
        return out.unflatten(0, (tokens, top_k))


def fp8_gated_experts(x: Tensor, gate_up: Fp8Weight, down: Fp8Weight, chosen: Tensor) -> Tensor:
    return _Fp8Experts.apply(x, gate_up, down, chosen)


class _HeadLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        return _by_head(x, weight, by_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """By cuBLAS."""
        (x, weight), grad = ctx.saved_tensors, grads[0].transpose(0, 1)  # [H, T, N]
        x = x.transpose(0, 1)
        if ctx.by_row:
            grad_x, grad_weight = torch.bmm(grad, weight), torch.bmm(grad.mT, x)
        else:
            grad_x, grad_weight = torch.bmm(grad, weight.mT), torch.bmm(x.mT, grad)
        return grad_x.transpose(0, 1), grad_weight, None


def _by_head(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    tokens, heads, _ = x.shape
    if tokens == 0:
        return x.new_empty(0, heads, weight.shape[1 if by_row else 2])
    offsets = torch.arange(heads + 1, device=x.device) * tokens
    groups = sorting.groups_of(offsets, tokens * heads, x.dtype)
    rows = x.transpose(0, 1).flatten(0, 1)
    out = grouped.product(rows, weight, groups, len(rows), by_row=by_row)
    return out.unflatten(0, (heads, tokens)).transpose(0, 1).contiguous()


def head_linear(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    return _HeadLinear.apply(x, weight, by_row)
