"""Recurrent layers' operations: float32 throughout."""

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
    if states is None:
        return _convolution(*arguments)
    return _carried_convolution(*arguments, layout.context, states.store, states.rows)


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
    if states is None:
        return _scan(*arguments)
    return _carried_scan(*arguments, layout.context, states.store, states.rows, states.settled)
