"""Recurrent layers' operations as opaque torch operators with explicit gradients: float32 throughout, CPU tensors only.

Shapes, meaning and signatures are those of `rlloop.numerics.ops.Ops`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu import recurrence as kernels
from rlloop.numerics.kernels.cpu.contract import _operator, sigmoid, sum_of_rows
from rlloop.numerics.kernels.cpu.jit import flat, threads_for
from rlloop.numerics.layout import AttentionLayout, Carried

NO_STATES, NO_ROWS = torch.zeros(0), torch.zeros(0, dtype=torch.int64)


# -------------------------------------------------------------------------------------------------------- convolution


def _convolution_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, query_start: Tensor, context: Tensor = NO_ROWS,
    states: Tensor = NO_STATES, rows: Tensor = NO_ROWS,
) -> Tensor:  # fmt: skip
    out, by_place = torch.empty_like(x), flat(weight[:, 0].T.contiguous())
    kernels.convolution(
        threads_for(x.numel() * weight.shape[2]), flat(x.contiguous()), by_place,
        by_place if bias is None else flat(bias.contiguous()), bias is not None, flat(query_start), flat(context),
        flat(rows), flat(states), len(states) > 0, x.shape[1], weight.shape[2], flat(out),
    )  # fmt: skip
    return out


def _convolution_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, query_start = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, query_start)


def _convolution_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, query_start = ctx.saved_tensors
    counts, at = query_start.diff(), torch.arange(len(x), device=x.device)
    place = at - torch.repeat_interleave(query_start[:-1], counts)
    grad_x, grad_weight, width = torch.zeros_like(x), torch.empty_like(weight), weight.shape[2]
    for j in range(width):
        reader = at[place >= width - 1 - j]  # the tokens that read one so far back
        read = reader - (width - 1 - j)
        grad_x.index_add_(0, read, grad[reader] * weight[:, 0, j])  # each row once
        grad_weight[:, 0, j] = sum_of_rows(grad[reader] * x[read])
    return grad_x, grad_weight, sum_of_rows(grad) if ctx.has_bias else None, None


_convolution = _operator(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor query_start) -> Tensor",
    _convolution_cpu,
    lambda x, *rest: torch.empty_like(x),
    _convolution_backward,
    _convolution_setup,
)
_carried_convolution = _operator(  # the same kernel; an operator that writes to an argument can have no gradient
    "carried_conv(Tensor x, Tensor weight, Tensor? bias, Tensor query_start, Tensor context, Tensor(a!) states,"
    " Tensor rows) -> Tensor",
    _convolution_cpu,
    lambda x, *rest: torch.empty_like(x),
)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: AttentionLayout, states: Carried | None
) -> Tensor:
    given = x.float(), weight.float(), None if bias is None else bias.float(), layout.query_start
    if states is None:
        return _convolution(*given)
    return _carried_convolution(*given, layout.context, states.store, states.rows)


# -------------------------------------------------------------------------------------------------------------- gates


def _gates_cpu(a: Tensor, rate: Tensor, bias: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    decay, step = torch.empty_like(a), torch.empty_like(a)
    kernels.gates(
        threads_for(256 * a.numel()), flat(a.contiguous()), flat(rate.contiguous()), flat(bias.contiguous()),
        np.float32(floor), a.shape[1], flat(decay), flat(step),
    )  # fmt: skip
    return decay, step


def _gates_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, rate, bias, ctx.floor = inputs
    ctx.save_for_backward(a, rate, bias, *output)


def _gates_backward(ctx: Any, grad_decay: Tensor, grad_step: Tensor) -> tuple[Tensor | None, ...]:
    a, rate, bias, decay, step = ctx.saved_tensors
    slope = -grad_decay * decay * rate.exp()  # of what decays: exp(rate) step
    grad_a = (grad_step + slope) * sigmoid(a + bias) * (step > ctx.floor)
    return grad_a, sum_of_rows(slope * step), sum_of_rows(grad_a), None


_gates = _operator(
    "recurrent_gates(Tensor a, Tensor rate, Tensor bias, float floor) -> (Tensor, Tensor)",
    _gates_cpu,
    lambda a, rate, bias, floor: (torch.empty_like(a), torch.empty_like(a)),
    _gates_backward,
    _gates_setup,
)


def recurrent_gates(a: Tensor, rate: Tensor, bias: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    return _gates(a.float(), rate.float(), bias.float(), floor)


# --------------------------------------------------------------------------------------------------------- recurrence


def _scan_cpu(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, query_start: Tensor,
    context: Tensor = NO_ROWS, states: Tensor = NO_STATES, rows: Tensor = NO_ROWS,
) -> Tensor:  # fmt: skip
    (_, groups, key_width), (_, heads, width) = q.shape, v.shape
    out = torch.empty(v.shape)
    kernels.scan(
        threads_for(3 * v.numel() * key_width), *(flat(x.contiguous()) for x in (q, k, v, decay, beta)), corrects,
        flat(query_start), flat(context), flat(rows), flat(states), len(states) > 0, groups, heads, key_width, width,
        flat(out),
    )  # fmt: skip
    return out


def _scan_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.corrects, query_start = inputs
    ctx.save_for_backward(*tensors, query_start)


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, query_start = ctx.saved_tensors
    return *_scan_gradients(*tensors, ctx.corrects, query_start, grad), None, None


def _scan_gradients_cpu(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, query_start: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    (_, groups, key_width), (_, heads, width) = q.shape, v.shape
    gradients = tuple(torch.zeros(x.shape) for x in (q, k, v, decay, beta))
    kernels.scan_backward(
        threads_for(9 * v.numel() * key_width), *(flat(x.contiguous()) for x in (q, k, v, decay, beta)), corrects,
        flat(query_start), groups, heads, key_width, width, flat(grad.contiguous()), *map(flat, gradients),
    )  # fmt: skip
    return gradients


_scan_gradients = _operator(
    "scan_backward(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, bool corrects, Tensor query_start,"
    " Tensor grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _scan_gradients_cpu,
    lambda q, k, v, decay, beta, corrects, query_start, grad: tuple(map(torch.empty_like, (q, k, v, decay, beta))),
)
_scan = _operator(
    "scan(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, bool corrects, Tensor query_start) -> Tensor",
    _scan_cpu,
    lambda q, k, v, *rest: torch.empty_like(v),
    _scan_backward,
    _scan_setup,
)
_carried_scan = _operator(
    "carried_scan(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, bool corrects, Tensor query_start,"
    " Tensor context, Tensor(a!) states, Tensor rows) -> Tensor",
    _scan_cpu,
    lambda q, k, v, *rest: torch.empty_like(v),
)


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, layout: AttentionLayout,
    states: Carried | None,
) -> Tensor:  # fmt: skip
    given = (*(x.float() for x in (q, k, v, decay, beta)), corrects, layout.query_start)
    if states is None:
        return _scan(*given)
    return _carried_scan(*given, layout.context, states.store, states.rows)
