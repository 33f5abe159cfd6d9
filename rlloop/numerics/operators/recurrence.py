"""Recurrent layers' operations: float32 throughout.

Over shared prefixes, what goes on begins with the state that its prefix left, as an engine resumes from a saved one.
Backward, what the sequences say of that state is added in their order, and then flows into the prefix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.layout import AttentionLayout, RecurrentState
from rlloop.numerics.operators.elementwise import sigmoid
from rlloop.numerics.operators.library import operator


def _sum_of_rows(x: Tensor) -> Tensor:
    return kernels_for(x.device).sum_of_rows(x)


# -------------------------------------------------------------------------------------------------------- convolution


def _convolution_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, query_start = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, query_start)


def _convolution_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight, grad_bias = _convolution_gradients(*ctx.saved_tensors, grad, ctx.has_bias)
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None, None


_convolution_gradients = operator(
    "causal_conv_backward(Tensor x, Tensor weight, Tensor query_start, Tensor grad, bool of_bias)"
    " -> (Tensor, Tensor, Tensor)",
    lambda x, weight, query_start, grad, of_bias: (
        torch.empty_like(x),
        torch.empty_like(weight),
        x.new_empty(x.shape[1] if of_bias else 0),
    ),
)
_convolution = operator(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor query_start) -> Tensor",
    lambda x, *rest: torch.empty_like(x),
    _convolution_backward,
    _convolution_setup,
)
_carried_convolution = operator(  # the same kernel; an operator that writes to an argument can have no gradient
    "carried_conv(Tensor x, Tensor weight, Tensor? bias, Tensor query_start, Tensor context, Tensor(a!) states,"
    " Tensor rows) -> Tensor",
    lambda x, *rest: torch.empty_like(x),
    kernel="causal_conv",
)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: AttentionLayout, states: RecurrentState | None
) -> Tensor:
    arguments = x.float(), weight.float(), None if bias is None else bias.float(), layout.query_start
    if states is not None:
        return _carried_convolution(*arguments, layout.context, states.store, states.rows)
    if layout.families is not None:
        return _FamiliesConvolution.apply(*arguments[:3], layout)
    return _convolution(*arguments)


class _FamiliesConvolution(torch.autograd.Function):
    """`_convolution` over a layout with families."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: AttentionLayout) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layout, ctx.has_bias = layout, bias is not None
        before = x[_last_inputs(layout, weight.shape[2] - 1)]
        rows = torch.arange(len(before), device=x.device)
        return _carried_convolution(x, weight, bias, layout.query_start, layout.context, before, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (grad,), layout = ctx.saved_tensors, grads, ctx.layout
        grad_x, grad_weight, grad_bias = _convolution_gradients(x, weight, layout.query_start, grad, ctx.has_bias)
        # What crosses the ends of prefixes: their last inputs, and as many zeros, whose readers have the gradients of
        # the first tokens that go on.
        branches, kept = layout.branches, weight.shape[2] - 1
        last, count = _last_inputs(layout, kept)[branches.sequences], len(branches.family)
        reader = layout.query_start[branches.sequences][:, None] + torch.arange(kept, device=x.device)
        there = reader < layout.query_start[branches.sequences + 1][:, None]
        inputs, slopes = x.new_zeros(2, count, 2 * kept, x.shape[1])
        inputs[:, :kept] = x[last]
        slopes[:, kept:] = torch.where(there[..., None], grad[reader.clamp(max=len(x) - 1)], 0)
        starts = torch.arange(0, 2 * kept * count + 1, 2 * kept, device=x.device)
        crossing = _convolution_gradients(inputs.flatten(0, 1), weight, starts, slopes.flatten(0, 1), False)
        by_last = crossing[0].unflatten(0, (count, -1))[:, :kept]
        for turn in branches.turns:
            grad_x[last[turn]] += by_last[turn]
        return grad_x, grad_weight + crossing[1], grad_bias if ctx.has_bias else None, None


def _last_inputs(layout: AttentionLayout, count: int) -> Tensor:
    """[S, count]: flat indices of the tokens before each sequence that goes on from another; of others any."""
    ends = layout.prefixes + layout.context
    return (ends[:, None] + torch.arange(-count, 0, device=ends.device)).clamp(min=0)


# -------------------------------------------------------------------------------------------------------------- gates


def _gates_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, rate, bias, ctx.floor = inputs
    ctx.save_for_backward(a, rate, bias, *output)


def _gates_backward(ctx: Any, grad_decay: Tensor, grad_step: Tensor) -> tuple[Tensor | None, ...]:
    a, rate, bias, decay, step = ctx.saved_tensors
    slope = -grad_decay * decay * rate.exp()  # of what decays: exp(rate) step
    grad_a = (grad_step + slope) * sigmoid(a + bias) * (step > ctx.floor)
    return grad_a, _sum_of_rows(slope * step), _sum_of_rows(grad_a), None


_gates = operator(
    "recurrent_gates(Tensor a, Tensor rate, Tensor bias, float floor) -> (Tensor, Tensor)",
    lambda a, rate, bias, floor: (torch.empty_like(a), torch.empty_like(a)),
    _gates_backward,
    _gates_setup,
)


def recurrent_gates(a: Tensor, rate: Tensor, bias: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    return _gates(a.float(), rate.float(), bias.float(), floor)


# --------------------------------------------------------------------------------------------------------- recurrence


def _scan_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.corrects, query_start = inputs
    ctx.save_for_backward(*tensors, query_start)


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, query_start = ctx.saved_tensors
    return *_scan_gradients(*tensors, ctx.corrects, query_start, grad), None, None


_scan_gradients = operator(
    "scan_backward(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, bool corrects, Tensor query_start,"
    " Tensor grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda q, k, v, decay, beta, corrects, query_start, grad: tuple(map(torch.empty_like, (q, k, v, decay, beta))),
)
_scan = operator(
    "scan(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, bool corrects, Tensor query_start) -> Tensor",
    lambda q, k, v, *rest: torch.empty_like(v),
    _scan_backward,
    _scan_setup,
)
_carried_scan = operator(
    "carried_scan(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, bool corrects, Tensor query_start,"
    " Tensor context, Tensor(a!) states, Tensor rows, bool settled) -> Tensor",
    lambda q, k, v, *rest: torch.empty_like(v),
    kernel="scan",
)


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, layout: AttentionLayout,
    states: RecurrentState | None,
) -> Tensor:  # fmt: skip
    arguments = (*(x.float() for x in (q, k, v, decay, beta)), corrects, layout.query_start)
    if states is not None:
        return _carried_scan(*arguments, layout.context, states.store, states.rows, states.settled)
    if layout.families is not None:
        return _FamiliesScan.apply(*arguments[:6], layout)
    return _scan(*arguments)


class _FamiliesScan(torch.autograd.Function):
    """`_scan` over a layout with families."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, corrects, layout = inputs
        (groups, key_width), (heads, width) = tensors[0].shape[1:], tensors[2].shape[1:]
        kernels, branches, context = kernels_for(tensors[2].device), layout.branches, layout.context
        shape = kernels.scan_state(groups, heads, key_width, width)
        states, out = tensors[2].new_zeros(len(branches.first_start) - 1, *shape), torch.empty_like(tensors[2])

        def made(tokens: slice | Tensor, start: Tensor, context: Tensor, store: Tensor) -> Tensor:
            rows = torch.arange(len(store), device=store.device)
            given: tuple[Any, ...] = (*(x[tokens] for x in tensors), corrects, start, context, store, rows)
            return kernels.scan(*given)

        out[branches.first] = made(branches.first, branches.first_start, context.new_zeros(len(states)), states)
        out[branches.later] = made(
            branches.later, branches.later_start, context[branches.sequences], states[branches.family]
        )
        ctx.save_for_backward(*tensors, states)
        ctx.corrects, ctx.layout = corrects, layout
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, states = ctx.saved_tensors
        (grad,), branches, gradients = grads, ctx.layout.branches, tuple(map(torch.empty_like, tensors))
        backward, shape = kernels_for(grad.device).scan_backward, (*tensors[2].shape[1:2], tensors[0].shape[2])

        def put(tokens: slice | Tensor, start: Tensor, begun: Tensor | None, of_states: Tensor) -> None:
            parts = [x[tokens] for x in tensors]
            given: tuple[Any, ...] = (*parts, ctx.corrects, start, grad[tokens], begun, of_states)
            for whole, part in zip(gradients, backward(*given), strict=True):
                whole[tokens] = part

        of_begun = grad.new_zeros(len(branches.family), *shape, grad.shape[2])
        put(branches.later, branches.later_start, states[branches.family], of_begun)
        of_ends = grad.new_zeros(len(states), *shape, grad.shape[2])
        for turn in branches.turns:
            of_ends[branches.family[turn]] += of_begun[turn]
        put(branches.first, branches.first_start, None, of_ends)
        return *gradients, None, None
