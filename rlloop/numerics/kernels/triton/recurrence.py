"""Recurrent layers on CUDA: a short convolution, and a state that every token decays and writes to. Float32 throughout.

The state is kept at multiples of `CHUNK` tokens, counted from a sequence's begin. From there on a chunk's tokens are
made together, by products: with S the state before the chunk, D[t, j] the product of the decays after token j up to t,
and a[t] that of all up to t,

    u = (1 + A)^-1 beta (v - a k S)  where A[t, j] = beta[t] D[t, j] k[t] . k[j] for j < t;  or u = beta v
    out = a q S + (D q k^T) u,  and after a whole chunk  S <- a[last] S + (D[last] k)^T u

Row t of each product reads rows up to t alone. What a chunk's later tokens need, the engine keeps (`scan_state`), so
that decode computes the whole chunk again from S, with the rows that are not there yet as zeros: one compiled kernel
runs in training, prefill and decode, and a token's bits do not depend on where a sequence is cut. Each program has some
columns of one head's state, which are independent of the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import EXACT, aligned, power_of_two

CHUNK = 16
COLUMNS, WARPS = 32, 4  # of a program of the scan
PRECISION = "tf32x3"  # three products of 11-bit parts, whose sum is as good as float32
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
    blocks = triton.cdiv(channels, CHANNELS)
    _convolution[(triton.cdiv(tokens, ROWS), blocks)](
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
    grad_x, programs, count = torch.empty_like(x), triton.cdiv(tokens, ROWS * STEPS), power_of_two(width + 1)
    partials = torch.empty(programs, count, channels, device=x.device)
    if tokens:
        _convolution_backward[(programs, triton.cdiv(channels, CHANNELS))](
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
        _gates[(triton.cdiv(a.numel(), NUMBERS),)](
            a, aligned(rate), aligned(bias), floor, decay, step, a.numel(), HEADS=a.shape[1], NUMBERS=NUMBERS,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return decay, step


def scan_state(groups: int, heads: int, key_width: int, width: int) -> tuple[int, ...]:
    """Each head's state, and of the tokens since the last whole chunk keys, values, decays and betas, end to end."""
    return (heads * key_width * width + CHUNK * (groups * key_width + heads * (width + 2)),)


@triton.jit(do_not_specialize=["has_states", "single"])
def _scan(
    q, k, v, decay, beta, query_start, context, rows, states, out, has_states, single, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`single`: no sequence leaves its chunk, so that its new rows are kept here."""
    KEYS: tl.constexpr = HEADS * KEY * WIDTH  # where keys begin among the states, then values, decays and betas
    VALUES: tl.constexpr = KEYS + CHUNK * GROUPS * KEY
    DECAYS: tl.constexpr = VALUES + CHUNK * HEADS * WIDTH
    BETAS: tl.constexpr = DECAYS + CHUNK * HEADS
    SIZE: tl.constexpr = BETAS + CHUNK * HEADS
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // (HEADS // GROUPS)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    known = begin * 0
    mine = states
    if has_states != 0:
        known = tl.load(context + sequence)
        mine = states + tl.load(rows + sequence) * SIZE
    i, j, n = tl.arange(0, K), block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    of_key, of_value = (i < KEY)[None, :], (j < WIDTH)[None, :]
    state_at = mine + (head * KEY + i)[:, None] * WIDTH + j[None, :]
    whole = (i < KEY)[:, None] & of_value
    state = tl.load(state_at, whole & (known >= CHUNK), 0.0)
    end, first = known + count, known // CHUNK * CHUNK
    kept_key = mine + KEYS + ((n * GROUPS + group) * KEY)[:, None] + i[None, :]
    kept_value = mine + VALUES + ((n * HEADS + head) * WIDTH)[:, None] + j[None, :]
    kept_gate = mine + DECAYS + n * HEADS + head
    for chunk in range(first, end, CHUNK):
        position = chunk + n
        old, new = position < known, (position >= known) & (position < end)
        token = begin + position - known
        key_at, gate_at = ((token * GROUPS + group) * KEY)[:, None] + i[None, :], token * HEADS + head
        value_at = (gate_at * WIDTH)[:, None] + j[None, :]
        has_old, has_new = old[:, None], new[:, None]
        keys = tl.where(has_old, tl.load(kept_key, has_old & of_key, 0.0), tl.load(k + key_at, has_new & of_key, 0.0))
        values = tl.where(
            has_old, tl.load(kept_value, has_old & of_value, 0.0), tl.load(v + value_at, has_new & of_value, 0.0)
        )
        decays = tl.where(old, tl.load(kept_gate, old, 1.0), tl.load(decay + gate_at, new, 1.0))
        betas = tl.where(old, tl.load(kept_gate + BETAS - DECAYS, old, 0.0), tl.load(beta + gate_at, new, 0.0))
        queries = tl.load(q + key_at, has_new & of_key, 0.0)
        row, column = n[:, None], n[None, :]
        fades = tl.cumprod(tl.where(row > column, tl.broadcast_to(decays[:, None], (CHUNK, CHUNK)), 1.0), 0)
        fades = tl.where(row >= column, fades, 0.0)
        since = tl.cumprod(decays, 0)
        if CORRECTS:
            alike = tl.dot(keys, keys.T, input_precision=PRECISION) * fades * betas[:, None]
            alike = tl.where(row > column, alike, 0.0)
            inverse = tl.where(row == column, 1.0, 0.0)
            for r in range(1, CHUNK):
                factors = tl.sum(tl.where(row == r, alike, 0.0), 0)
                inverse -= tl.where(row == r, tl.sum(factors[:, None] * inverse, 0)[None, :], 0.0)
            read = tl.dot(keys, state, input_precision=PRECISION)
            values_left = (values - since[:, None] * read) * betas[:, None]
            written = tl.dot(inverse, values_left, input_precision=PRECISION)
        else:
            written = values * betas[:, None]
        weights = tl.dot(queries, keys.T, input_precision=PRECISION) * fades
        output = since[:, None] * tl.dot(queries, state, input_precision=PRECISION)
        output += tl.dot(weights, written, input_precision=PRECISION)
        tl.store(out + value_at, output, has_new & of_value)
        if chunk + CHUNK <= end:
            to_end = tl.sum(tl.where(row == CHUNK - 1, fades, 0.0), 0)
            faded = state * tl.sum(tl.where(n == CHUNK - 1, since, 0.0), 0)
            state = faded + tl.dot((keys * to_end[:, None]).T, written, input_precision=PRECISION)
        if single != 0:
            tl.store(kept_key, keys, has_new & of_key & (block == 0) & (head % (HEADS // GROUPS) == 0))
            tl.store(kept_value, values, has_new & of_value)
            tl.store(kept_gate, decays, new & (block == 0))
            tl.store(kept_gate + BETAS - DECAYS, betas, new & (block == 0))
    if (has_states != 0) & (end // CHUNK * CHUNK > known):
        tl.store(state_at, state, whole)


@triton.jit
def _keep_rows(
    k, v, decay, beta, query_start, context, rows, states, HEADS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, BEGIN: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has some numbers of one row of the chunk that a sequence ends in; `KEYS` and `VALUES` make a row."""
    sequence, n, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, known = tl.load(query_start + sequence), tl.load(context + sequence)
    end = known + tl.load(query_start + sequence + 1) - begin
    position = end // CHUNK * CHUNK + n
    if (position >= known) & (position < end):
        token, at = begin + position - known, block * BLOCK + tl.arange(0, BLOCK)
        mine = states + tl.load(rows + sequence) * SIZE + BEGIN
        tl.store(mine + n * KEYS + at, tl.load(k + token * KEYS + at, at < KEYS), at < KEYS)
        mine += CHUNK * KEYS
        tl.store(mine + n * VALUES + at, tl.load(v + token * VALUES + at, at < VALUES), at < VALUES)
        mine += CHUNK * VALUES + n * HEADS
        tl.store(mine + at, tl.load(decay + token * HEADS + at, at < HEADS), at < HEADS)
        tl.store(mine + CHUNK * HEADS + at, tl.load(beta + token * HEADS + at, at < HEADS), at < HEADS)


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, query_start: Tensor,
    context: Tensor | None = None, states: Tensor | None = None, rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (tokens, groups, key_width), (_, heads, width), sequences = q.shape, v.shape, len(query_start) - 1
    q, k, v, decay, beta = (aligned(x) for x in (q, k, v, decay, beta))
    out = torch.empty_like(v)
    if tokens == 0:
        return out
    query_start = aligned(query_start)
    has_states = states is not None and context is not None and rows is not None
    context, rows, store = (aligned(context), aligned(rows), states) if has_states else (query_start, query_start, q)
    single = has_states and tokens == sequences
    columns = min(COLUMNS, power_of_two(width, 16))
    # No argument of the training's is specialised otherwise than the engine's: both run one compiled kernel.
    _scan[(triton.cdiv(width, columns), heads, sequences)](
        q, k, v, decay, beta, query_start, context, rows, store, out, int(has_states), int(single), GROUPS=groups,
        HEADS=heads, KEY=key_width, WIDTH=width, K=power_of_two(key_width, 16), COLUMNS=columns, CHUNK=CHUNK,
        CORRECTS=corrects, PRECISION=PRECISION, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    if has_states and not single:
        keys, values, block = groups * key_width, heads * width, 1024
        _keep_rows[(sequences, CHUNK, triton.cdiv(max(keys, values), block))](
            k, v, decay, beta, query_start, context, rows, store, HEADS=heads, KEYS=keys, VALUES=values,
            BEGIN=heads * key_width * width, SIZE=scan_state(groups, heads, key_width, width)[0], CHUNK=CHUNK,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
