"""Recurrent layers' operations on CPU tensors, float32 throughout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu.compiled import recurrence as kernels
from rlloop.numerics.kernels.cpu.compiled.jit import flat, threads_for
from rlloop.numerics.kernels.cpu.products import sum_of_rows

NO_STATES, NO_IDS = np.empty(0, np.float32), np.empty(0, np.int64)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, query_start: Tensor, context: Tensor | None = None,
    states: Tensor | None = None, rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out, taps = torch.empty_like(x), flat(weight[:, 0].T.contiguous())
    kernels.convolution(
        threads_for(x.numel() * weight.shape[2]), flat(x.contiguous()), taps,
        taps if bias is None else flat(bias.contiguous()), bias is not None, flat(query_start),
        *_states(context, states, rows), x.shape[1], weight.shape[2], flat(out),
    )  # fmt: skip
    return out


def causal_conv_backward(
    x: Tensor, weight: Tensor, query_start: Tensor, grad: Tensor, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    counts, at = query_start.diff(), torch.arange(len(x))
    positions = at - torch.repeat_interleave(query_start[:-1], counts)
    grad_x, grad_weight, width = torch.zeros_like(x), torch.empty_like(weight), weight.shape[2]
    for j in range(width):
        reader = at[positions >= width - 1 - j]  # the tokens that read one so far back
        read = reader - (width - 1 - j)
        grad_x.index_add_(0, read, grad[reader] * weight[:, 0, j])  # each row once
        grad_weight[:, 0, j] = sum_of_rows(grad[reader] * x[read])
    return grad_x, grad_weight, sum_of_rows(grad) if of_bias else grad.new_empty(0)


def recurrent_gates(a: Tensor, rate: Tensor, bias: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    decay, step = torch.empty_like(a), torch.empty_like(a)
    kernels.gates(
        threads_for(256 * a.numel()), flat(a.contiguous()), flat(rate.contiguous()), flat(bias.contiguous()),
        np.float32(floor), a.shape[1], flat(decay), flat(step),
    )  # fmt: skip
    return decay, step


def scan_state(groups: int, heads: int, key_width: int, width: int) -> tuple[int, ...]:
    return heads, key_width, width


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, query_start: Tensor,
    context: Tensor | None = None, states: Tensor | None = None, rows: Tensor | None = None,
    settled: bool = False,
) -> Tensor:  # fmt: skip
    (_, groups, key_width), (_, heads, width) = q.shape, v.shape
    out = torch.empty(v.shape)
    kernels.scan(
        threads_for(3 * v.numel() * key_width), *(flat(x.contiguous()) for x in (q, k, v, decay, beta)), corrects,
        flat(query_start), *_states(context, states, rows), groups, heads, key_width, width, flat(out),
    )  # fmt: skip
    return out


def scan_backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, query_start: Tensor, grad: Tensor,
    begun: Tensor | None = None, of_states: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (_, groups, key_width), (_, heads, width) = q.shape, v.shape
    by_q, by_k, by_v, by_decay, by_beta = (torch.zeros(x.shape) for x in (q, k, v, decay, beta))
    kernels.scan_backward(
        threads_for(9 * v.numel() * key_width), *(flat(x.contiguous()) for x in (q, k, v, decay, beta)), corrects,
        flat(query_start), groups, heads, key_width, width, flat(grad.contiguous()),
        NO_STATES if begun is None else flat(begun), begun is not None,
        NO_STATES if of_states is None else flat(of_states), of_states is not None,
        flat(by_q), flat(by_k), flat(by_v), flat(by_decay), flat(by_beta),
    )  # fmt: skip
    return by_q, by_k, by_v, by_decay, by_beta


def _states(
    context: Tensor | None, states: Tensor | None, rows: Tensor | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """(context, rows, states, whether there are any), for a kernel."""
    if context is None or states is None or rows is None:
        return NO_IDS, NO_IDS, NO_STATES, False
    return flat(context), flat(rows), flat(states), len(states) > 0
