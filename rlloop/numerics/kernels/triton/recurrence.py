"""Recurrent layers on CUDA: a short convolution, and gates. Float32 throughout. The scan is in `scan`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, power_of_two

CHANNELS, ROWS = 256, 8  # of a program of the convolution
STEPS = 32  # of a program of its backward: as many times `ROWS` tokens
NUMBERS = 1024  # of a program of the gates


@triton.jit
def _owners(query_start, token, sequences):
    """The sequence of each token."""
    low, length = token * 0, sequences
    while length > 1:
        half = length // 2
        low = tl.where(tl.load(query_start + low + half) <= token, low + half, low)
        length -= half
    return low


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _convolution(
    x, weight, bias, query_start, context, rows, states, out, tokens, sequences, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATES: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """`SINGLE`: each sequence has one token, and its states are brought up to date here."""
    KEPT: tl.constexpr = TAPS - 1
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid, inside = token < tokens, (channel < CHANNELS)[None, :]
    token = tl.where(valid, token, 0)
    sequence = _owners(query_start, token, sequences)
    first = tl.load(query_start + sequence)
    if HAS_STATES:
        past, row = tl.load(context + sequence), tl.load(rows + sequence)
    total, inputs = tl.zeros((ROWS, BLOCK), tl.float32), ()
    for tap in tl.static_range(TAPS):
        source = token - (KEPT - tap)
        here = valid & (source >= first)
        read = tl.load(x + source[:, None] * CHANNELS + channel[None, :], here[:, None] & inside, 0.0)
        if HAS_STATES:
            before = first - source
            kept = valid & (before > 0) & (past >= before)
            at = states + ((row * KEPT + KEPT - before) * CHANNELS)[:, None] + channel[None, :]
            read = tl.where(here[:, None], read, tl.load(at, kept[:, None] & inside, 0.0))
        factor = tl.load(weight + tap * CHANNELS + channel, channel < CHANNELS, 0.0)
        total += factor[None, :] * read
        inputs = inputs + (read,)  # noqa: RUF005
    if HAS_BIAS:
        total += tl.load(bias + channel, channel < CHANNELS, 0.0)[None, :]
    tl.store(out + token[:, None] * CHANNELS + channel[None, :], total, valid[:, None] & inside)
    if SINGLE:
        tl.debug_barrier()
        for kept in tl.static_range(KEPT):
            at = states + ((row * KEPT + kept) * CHANNELS)[:, None] + channel[None, :]
            tl.store(at, inputs[kept + 1], valid[:, None] & inside)


@triton.jit
def _keep_inputs(
    x, query_start, rows, states, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """A sequence's last inputs, newest last."""
    sequence, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    at = states + tl.load(rows + sequence) * (KEPT * CHANNELS) + channel
    inside, inputs = channel < CHANNELS, ()
    for kept in tl.static_range(KEPT):
        source = last - KEPT + kept
        new = tl.load(x + source * CHANNELS + channel, inside & (source >= first), 0.0)
        old = tl.load(at + (kept + last - first) * CHANNELS, inside & (source < first), 0.0)
        inputs = inputs + (tl.where(source >= first, new, old),)  # noqa: RUF005
    tl.debug_barrier()
    for kept in tl.static_range(KEPT):
        tl.store(at + kept * CHANNELS, inputs[kept], inside)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, query_start: Tensor, context: Tensor | None = None,
    states: Tensor | None = None, rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    x, taps, out = aligned(x), aligned(weight[:, 0].T), torch.empty_like(x)
    (tokens, channels), width, sequences = x.shape, weight.shape[2], len(query_start) - 1
    if tokens == 0:
        return out
    has_states = states is not None and context is not None and rows is not None
    single, query_start = has_states and tokens == sequences, query_start.contiguous()
    blocks = cdiv(channels, CHANNELS)
    _convolution[(cdiv(tokens, ROWS), blocks)](
        x, taps, x if bias is None else aligned(bias), query_start, context if has_states else query_start,
        rows if has_states else query_start, states if has_states else x, out, tokens, sequences, CHANNELS=channels,
        BLOCK=CHANNELS, TAPS=width, ROWS=ROWS, HAS_BIAS=bias is not None, HAS_STATES=has_states, SINGLE=single,
        num_warps=4, **EXACT,
    )  # fmt: skip
    if has_states and not single:
        _keep_inputs[(sequences, blocks)](
            x, query_start, rows, states, CHANNELS=channels, BLOCK=CHANNELS, KEPT=width - 1, num_warps=4
        )
    return out


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _convolution_backward(
    x, weight, query_start, grad, grad_x, partials, tokens, sequences, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    TAPS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Partials [programs, PARTS, channels]: this program's tokens' share of each tap's gradient, then of the bias's."""
    KEPT: tl.constexpr = TAPS - 1
    channel, sum_row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)
    inside, sums = (channel < CHANNELS)[None, :], tl.zeros((PARTS, BLOCK), tl.float32)
    begin = tl.program_id(0).to(tl.int64) * (ROWS * STEPS)
    for step in range(STEPS):
        token = begin + step * ROWS + tl.arange(0, ROWS)
        valid = token < tokens
        token = tl.where(valid, token, 0)
        sequence = _owners(query_start, token, sequences)
        first, last = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
        at = token[:, None] * CHANNELS + channel[None, :]
        slope = tl.load(grad + at, valid[:, None] & inside, 0.0)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for tap in tl.static_range(TAPS):
            back = KEPT - tap
            later = tl.load(grad + at + back * CHANNELS, (valid & (token + back < last))[:, None] & inside, 0.0)
            total += tl.load(weight + tap * CHANNELS + channel, channel < CHANNELS, 0.0)[None, :] * later
            read = tl.load(x + at - back * CHANNELS, (valid & (token - back >= first))[:, None] & inside, 0.0)
            sums += tl.where((sum_row == tap)[:, None], tl.sum(slope * read, 0)[None, :], 0.0)
        sums += tl.where((sum_row == TAPS)[:, None], tl.sum(slope, 0)[None, :], 0.0)
        tl.store(grad_x + at, total, valid[:, None] & inside)
    to = partials + (tl.program_id(0) * PARTS + sum_row)[:, None] * CHANNELS + channel[None, :]
    tl.store(to, sums, inside & (sum_row >= 0)[:, None])


def causal_conv_backward(
    x: Tensor, weight: Tensor, query_start: Tensor, grad: Tensor, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x, grad, taps, (tokens, channels), width = aligned(x), aligned(grad), weight[:, 0].T, x.shape, weight.shape[2]
    grad_x, programs, count = torch.empty_like(x), cdiv(tokens, ROWS * STEPS), power_of_two(width + 1)
    partials = torch.empty(programs, count, channels, device=x.device)
    if tokens:
        _convolution_backward[(programs, cdiv(channels, CHANNELS))](
            x, aligned(taps), query_start.contiguous(), grad, grad_x, partials, tokens, len(query_start) - 1,
            CHANNELS=channels, BLOCK=CHANNELS, TAPS=width, PARTS=count, ROWS=ROWS, STEPS=STEPS, num_warps=4,
        )  # fmt: skip
    sums = partials.sum(0)
    return grad_x, sums[:width].T.unsqueeze(1).contiguous(), sums[width].clone() if of_bias else sums.new_empty(0)


@triton.jit
def _gates(a, rate, bias, floor, decay, step, count, HEADS: tl.constexpr, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    x = tl.load(a + at, at < count, 0.0) + tl.load(bias + at % HEADS)
    soft = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    soft = tl.maximum(soft, floor)
    tl.store(step + at, soft, at < count)
    tl.store(decay + at, tl.exp(-tl.exp(tl.load(rate + at % HEADS)) * soft), at < count)


def recurrent_gates(a: Tensor, rate: Tensor, bias: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    a = aligned(a)
    decay, step = torch.empty_like(a), torch.empty_like(a)
    if a.numel():
        _gates[(cdiv(a.numel(), NUMBERS),)](
            a, aligned(rate), aligned(bias), floor, decay, step, a.numel(), HEADS=a.shape[1], NUMBERS=NUMBERS,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return decay, step
