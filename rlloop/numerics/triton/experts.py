"""A layer's experts, and products by head, on CUDA; see `rlloop.numerics.ops`.

Rows are found through the sorted choices instead of being moved, and the activation is made where its two sums are. A
forward that will be differentiated keeps the gates and ups, and has the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.triton import grouped
from rlloop.numerics.triton.elementwise import silu_mul, silu_mul_backward


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor) -> Tensor:
        (tokens, top_k), rows = chosen.shape, chosen.numel()
        order, groups = grouped.sorted_by_group(chosen.flatten(), len(down), x.dtype)
        both = grouped.product(x, gate_up, groups, rows, order=order, gather=top_k)
        made = silu_mul(*both.chunk(2, dim=-1))
        ctx.save_for_backward(x, gate_up, down, order, groups.offsets, groups.table, both, made)
        ctx.tiles, ctx.top_k = groups.tiles, top_k
        return grouped.product(made, down, groups, rows, order=order, scatter=True).view(tokens, top_k, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, order, offsets, table, both, made = ctx.saved_tensors
        groups, top_k, grad = grouped.Groups(offsets, table, ctx.tiles), ctx.top_k, grads[0].flatten(0, 1)
        rows, needs = len(order), ctx.needs_input_grad
        grad_down = grad_gate_up = grad_x = None
        if needs[2]:
            grad_down = grouped.weight_gradient(grad, made, offsets, down.dtype, order=order, gather_left=True)
        grad_made = grouped.product(grad, down, groups, rows, by_row=False, order=order, gather=1)
        grad_both = torch.cat(silu_mul_backward(*both.chunk(2, dim=-1), grad_made), dim=-1)
        if needs[1]:
            grad_gate_up = grouped.weight_gradient(
                grad_both, x, offsets, gate_up.dtype, order=order, gather_right=top_k
            )
        if needs[0]:
            each = grouped.product(grad_both, gate_up, groups, rows, by_row=False, order=order, scatter=True)
            grad_x = each.view(-1, top_k, x.shape[1]).sum(1, dtype=torch.float32).to(x.dtype)
        return grad_x, grad_gate_up, grad_down, None


def experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or gate_up.requires_grad or down.requires_grad):
        return _Experts.apply(x, gate_up, down, chosen)
    (tokens, top_k), rows = chosen.shape, chosen.numel()
    if rows == 0:
        return x.new_empty(tokens, top_k, down.shape[1])
    order, groups = grouped.sorted_by_group(chosen.flatten(), len(down), x.dtype)
    made = grouped.product(x, gate_up, groups, rows, order=order, gather=top_k, activate=True)
    return grouped.product(made, down, groups, rows, order=order, scatter=True).view(tokens, top_k, -1)


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
    offsets = torch.arange(heads + 1, device=x.device) * tokens
    groups = grouped.groups_of(offsets, tokens * heads, x.dtype)
    rows = x.transpose(0, 1).flatten(0, 1)
    out = grouped.product(rows, weight, groups, len(rows), by_row=by_row)
    return out.view(heads, tokens, -1).transpose(0, 1).contiguous()


def head_linear(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    if len(x) == 0:
        return x.new_empty(0, x.shape[1], weight.shape[1 if by_row else 2])
    return _HeadLinear.apply(x, weight, by_row)
