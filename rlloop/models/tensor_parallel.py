"""Tensor parallelism by output rows: products and attention over divided operands, with the bits of one rank.

A rank holds some rows of each weight, so it computes whole outputs, each as one sum over all inputs. In the backward,
the input's gradient is such a product too, of the gathered output gradient and some *columns* of the weight, which the
ranks exchange: one sum over all outputs. A weight's gradient needs own rows only. Nothing is added across ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlloop.numerics import operators
from rlloop.numerics.kernels.terms import terms_gradients
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.operators.adapted import PRODUCTS
from rlloop.numerics.operators.products import gradient_type, product
from rlloop.numerics.ops import Ops
from rlloop.parallel.division import (
    Division,
    evenly,
    exchanged_parts,
    exchanged_rows,
    gathered,
    spans,
    taken,
)


class _CutLinear(torch.autograd.Function):
    """x [T, K], or the own columns of it where there is a division of them; own rows of weight and bias -> [T, n].

    With an adapter, z [T, r] and own rows of B' (`up`): z is whole on every rank, and so is its gradient, since B' is
    thin enough to be gathered.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Division, columns: Division | None,
        z: Tensor | None, up: Tensor | None, slots: Tensor | None, ranks: Tensor | None,
        unread: bool,
    ) -> Tensor:  # fmt: skip
        whole = x if columns is None else columns.gather(x, 1)
        ctx.save_for_backward(whole, weight, z, up, slots)
        ctx.rows, ctx.columns = rows, columns
        if unread:
            return x.new_empty(len(x), len(weight))
        if z is None or up is None or slots is None or ranks is None:
            return operators.linear(whole, weight, bias)
        return operators.linear_with_terms(whole, weight, bias, whole.dtype, z, up, True, slots, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, z, up, slots), (grad,), needs, rows = ctx.saved_tensors, grads, ctx.needs_input_grad, ctx.rows
        grad = grad.contiguous()
        every = rows.gather(grad, 1) if needs[0] or z is not None else grad  # [T, N]
        grad_x = _input_gradient(every, weight, x.dtype, rows, ctx.columns) if needs[0] else None
        grad_weight = product(grad, False, x, False, gradient_type(weight)) if needs[1] else None
        grad_bias = of_z = of_up = None
        if needs[2]:
            ones = torch.ones(1, len(grad), device=grad.device)
            grad_bias = product(ones, True, grad, False, gradient_type(weight))[0]
        if z is not None and (needs[5] or needs[6]):
            of_z, of_up = terms_gradients(PRODUCTS, every, z, rows.gather(up, 1), True, slots, gradient_type(up))
            of_up = rows.take(of_up, 1)
        return grad_x, grad_weight, grad_bias, None, None, of_z, of_up, None, None, None


def _input_gradient(
    grad: Tensor, weight: Tensor, dtype: torch.dtype, rows: Division, columns: Division | None
) -> Tensor:
    """grad [T, N], and own rows of weight [n, K] -> [T, K], or its own columns."""
    wanted = columns or evenly(weight.shape[1], rows.ranks)
    assert wanted is not None
    lanes = exchanged_parts(weight.T, wanted.sizes, rows)  # own columns of all rows, [k, N]
    grad_input = product(grad, True, lanes, True, dtype)
    return grad_input if columns is not None else wanted.gather(grad_input, 1)


def cut_linear(
    ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Division, across: bool, columns: Division | None,
    unread: bool = False,
) -> Tensor:  # fmt: skip
    """`Ops.linear` of this rank's rows of weight and bias: its outputs, differentiable. `columns`: of x, of which each
    rank has its own; None: x is whole on every rank. `unread`: see `Ops.unread_linear`."""
    if adapted := ops.adapted(weight):
        factors, which = adapted
        z = operators.reduced(gathered(x, columns), factors.down, which)
        return _CutLinear.apply(x, weight, bias, rows, columns, z, factors.up, which.slots(z), factors.ranks, unread)
    if ops.profile.linear == "rlloop" and not (across and ops.profile.tp_segments != "1"):
        return _CutLinear.apply(x, weight, bias, rows, columns, *[None] * 4, unread)
    # Other implementations: the whole product on every rank, since their gradients' sums are unknown.
    whole_bias = None if bias is None else gathered(bias, rows, 0)
    return taken(ops.linear(gathered(x, columns), gathered(weight, rows, 0), whole_bias, across), rows)


def cut_head_linear(
    ops: Ops, x: Tensor, weight: Tensor, by_row: bool, part_of: Tensor, heads: Division | None
) -> Tensor:
    """`Ops.head_linear` of the own heads. An adapter's gradients are sums over all heads: in training every rank then
    makes all of them."""
    adapted = ops.adapted(part_of)
    if heads is None or adapted is None or not torch.is_grad_enabled():
        return ops.head_linear(x, weight, by_row, part_of)
    factors, which = adapted
    every = replace(factors, up=gathered(factors.up, heads, 0))
    outputs = operators.adapted_head_linear(gathered(x, heads, 1), gathered(weight, heads, 0), by_row, every, which)
    return taken(outputs, heads, 1)


Attend = Callable[..., Tensor]  # (q, k, v, layout, selected) -> attention's output


class _SpreadAttention(torch.autograd.Function):
    """Attention by heads, whose backward is by sequences.

    Query heads of several ranks read one key-value head, so its gradient is a sum over ranks. In the backward each rank
    gets all heads of some families of sequences and computes their whole attention, so the sums are those of one rank.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, selected: Tensor | None, attend: Attend, layout: AttentionLayout,
        queries: Division, groups: Division | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q, k, v, selected)
        ctx.attend, ctx.layout, ctx.queries, ctx.groups = attend, layout, queries, groups
        return attend(q, k, v, layout, selected)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, selected = ctx.saved_tensors
        queries, groups, ranks = ctx.queries, ctx.groups, ctx.queries.ranks
        families = ctx.layout.family_lengths()
        tokens = [sum(family) for family in families]
        shares = spans([count**2 for count in tokens], ranks.size)
        rows = [sum(tokens[begin:end]) for begin, end in shares]
        first = sum(rows[: ranks.rank])
        own = slice(first, first + rows[ranks.rank])

        def of_own(x: Tensor, heads: Division | None) -> Tensor:
            return (x[own] if heads is None else exchanged_parts(x, rows, heads)).detach().requires_grad_()

        inputs, grad = (of_own(q, queries), of_own(k, groups), of_own(v, groups)), of_own(grads[0], queries)
        begin, end = shares[ranks.rank]
        if rows[ranks.rank]:
            with torch.enable_grad():
                layout = AttentionLayout.of_families(families[begin:end], q.device)
                out = ctx.attend(*inputs, layout, None if selected is None else selected[own])
                gradients: Sequence[Tensor] = torch.autograd.grad(out, inputs, grad)
        else:
            gradients = inputs
        grad_q = exchanged_rows(gradients[0].detach(), rows, queries)
        others = (
            ranks.gather(x.detach(), 0, rows) if groups is None else exchanged_rows(x.detach(), rows, groups)
            for x in gradients[1:]
        )
        return grad_q, *others, *[None] * 5


def cut_attention(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, selected: Tensor | None, layout: AttentionLayout,
    heads: tuple[Division, Division | None] | None,
) -> Tensor:  # fmt: skip
    """`attend(q, k, v, layout, selected)` over the own heads, differentiable.

    `heads`: of queries and of keys and values; None in place of the latter: every rank has k and v whole.
    """
    if heads is None or not torch.is_grad_enabled() or not (heads[1] is None or heads[1].repeats):
        return attend(q, k, v, layout, selected)
    return _SpreadAttention.apply(q, k, v, selected, attend, layout, *heads)
