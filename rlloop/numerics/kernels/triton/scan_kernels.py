"""Kernels of `scan` over chunks, whose notation and formulas are there; products are in `scan_products`."""

from __future__ import annotations

import triton
import triton.language as tl

from rlloop.numerics.kernels.triton.scan_products import (
    nothing,
    pieces,
    plus,
    split,
    straight,
    summed,
    times,
    turned,
    written,
)


@triton.jit(do_not_specialize=["has_states", "sequences"])
def prepare(
    q, k, decay, beta, query_start, context, rows, states, made, begun, has_states, sequences, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr,
    CORRECTS: tl.constexpr, KEYS: tl.constexpr, INVERSES: tl.constexpr, FADES: tl.constexpr, SINCE: tl.constexpr,
    SIZE: tl.constexpr, MADE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of a chunk and each head of a group, what does not depend on the state: T, W, a and D's last row to `made`.
    A chunk that was begun in an earlier step has rows of the state, and its keys go to `begun`."""
    SHARE: tl.constexpr = HEADS // GROUPS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    slot, group = tl.program_id(0), tl.program_id(1)
    sequence, length = slot * 0, sequences
    while length > 1:
        half = length // 2
        base = tl.load(query_start + sequence + half) // CHUNK + 2 * (sequence + half)
        sequence = tl.where(base <= slot, sequence + half, sequence)
        length -= half
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    known = begin * 0
    mine = states
    if has_states != 0:
        known = tl.load(context + sequence)
        mine = states + tl.load(rows + sequence) * SIZE
    end = known + count
    start = (known // CHUNK + slot - begin // CHUNK - 2 * sequence) * CHUNK
    if (count > 0) & (start < end):
        old = tl.maximum(known - start, 0).to(tl.int32)
        upto = tl.minimum(end - start, CHUNK).to(tl.int32)
        n, i = tl.arange(0, CHUNK), tl.arange(0, PIECE)
        row, column = n[:, None], n[None, :]
        is_old, is_new = n < old, (n >= old) & (n < upto)
        # Rows are put where they are a product's `turned` columns.
        weight_at = SQUARE + ((row & -8) | ((row & 3) << 1) | ((row & 4) >> 2)) * CHUNK + column
        first = begin + start - known
        at = row * (GROUPS * KEY) + i[None, :]
        new_at = ((first * GROUPS + group) * KEY) + at
        kept_at = mine + KEYS + group * (CHUNK * KEY) + row * KEY + i[None, :]
        keys_at = tl.where(is_old[:, None], kept_at, k + new_at)
        begun_at = begun + (sequence.to(tl.int64) * CHUNK * GROUPS + group) * KEY + at
        asked_sums = nothing(CHUNK, CHUNK)
        alike_sums = asked_sums
        for piece in tl.range(PIECES, num_stages=STAGES):
            of_key = (piece * PIECE + i < KEY)[None, :]
            keys = tl.load(keys_at + piece * PIECE, (n < upto)[:, None] & of_key, 0.0)
            queries = tl.load(q + new_at + piece * PIECE, is_new[:, None] & of_key, 0.0)
            tl.store(begun_at + piece * PIECE, keys, of_key & (row >= 0) & (old > 0))
            to_high, to_low = split(keys.T)
            high, low = split(queries)
            asked_sums = plus(asked_sums, high, low, to_high, to_low)
            if CORRECTS:
                key_high, key_low = split(keys)
                alike_sums = plus(alike_sums, key_high, key_low, to_high, to_low)
        asked, alike = summed(asked_sums), summed(alike_sums)
        for member in range(SHARE):
            head = group * SHARE + member
            to = made + (slot.to(tl.int64) * HEADS + head) * MADE
            gate_at = first * HEADS + head + n * HEADS
            last = tl.load(mine + FADES + head * SQUARE + (old - 1) * CHUNK + n, is_old, 1.0)
            before = tl.load(mine + SINCE + head * CHUNK + old - 1, old > 0, 1.0)
            fades, since = tl.broadcast_to(last[None, :], (CHUNK, CHUNK)), tl.where(n >= 0, before, 1.0)
            for t in tl.static_range(CHUNK):  # in this order
                factor = tl.load(decay + (first + t) * HEADS + head, (t >= old) & (t < upto), 1.0)
                fades *= tl.where((column < t) & (row >= t), factor, 1.0)
                since *= tl.where(n >= t, factor, 1.0)
            fades = tl.where(row >= column, fades, 0.0)
            tl.store(to + weight_at, asked * fades)
            tl.store(to + 2 * SQUARE + n, since)
            tl.store(to + 2 * SQUARE + CHUNK + column + 0 * row, fades, row == CHUNK - 1)
            if CORRECTS:
                betas = tl.load(beta + gate_at, is_new, 0.0)
                lower = tl.where(row > column, alike * fades * betas[:, None], 0.0)
                lower_high, lower_low = split(straight(lower.T, CHUNK, CHUNK, True))
                # T^T [j, t], in whose columns the tokens are turned.
                token = turned(n)[None, :]
                inverse_at = mine + INVERSES + head * SQUARE + token * CHUNK + row
                inverse = tl.load(inverse_at, (token < old) & (row >= 0), 0.0)
                for t in range(old, upto):
                    high, low = split(straight(inverse, CHUNK, CHUNK))
                    product = times(high, low, lower_high, lower_low, CHUNK, CHUNK)
                    inverse = tl.where(token == t, tl.where(row == t, 1.0, 0.0) - product, inverse)
                tl.store(to + column * CHUNK + row, inverse)


@triton.jit
def _chunk(
    state, q, k, to, values, betas, given, is_old, there, keys_there, whole, KEY: tl.constexpr, STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """-> the state after it (the same where it is not whole), outputs and r, both [V, 16]. r of old rows is `given`.

    `there`: rows that have a query; those that are old or there have a key, `keys_there` in order. All else is
    `turned`."""
    SQUARE: tl.constexpr = CHUNK * CHUNK
    BLOCKS: tl.constexpr = COLUMNS // 16
    i, n = tl.arange(0, PIECE), tl.arange(0, CHUNK)
    token, has_key = turned(n), is_old | there
    square = n[None, :] * CHUNK + n[:, None]
    weights, since = tl.load(to + SQUARE + square), tl.load(to + 2 * SQUARE + token)
    to_end = tl.where(whole, tl.load(to + 2 * SQUARE + CHUNK + token), 0.0)
    total = tl.where(whole, tl.load(to + 2 * SQUARE + CHUNK - 1), 1.0)
    read_sums = nothing(COLUMNS, CHUNK, BLOCKS)
    asked_sums = read_sums
    for piece in tl.static_range(PIECES):
        of_key = (piece * PIECE + i < KEY)[:, None]
        at = token[None, :] * STRIDE + piece * PIECE + i[:, None]
        high, low = split(state[piece])
        if CORRECTS:
            to_high, to_low = split(tl.load(k + at, has_key[None, :] & of_key, 0.0))
            read_sums = plus(read_sums, high, low, to_high, to_low, BLOCKS)
        to_high, to_low = split(tl.load(q + at, there[None, :] & of_key, 0.0))
        asked_sums = plus(asked_sums, high, low, to_high, to_low, BLOCKS)
    if CORRECTS:
        r = (values - since[None, :] * summed(read_sums, BLOCKS)) * betas[None, :]
        r = tl.where(is_old[None, :], given, r)
        r_high, r_low = split(straight(r, COLUMNS, CHUNK))
        to_high, to_low = split(tl.load(to + square))
        u = times(r_high, r_low, to_high, to_low, COLUMNS, CHUNK, BLOCKS)
    else:
        r = tl.where(is_old[None, :], given, values * betas[None, :])
        u = r
    u_high, u_low = split(straight(u, COLUMNS, CHUNK))
    to_high, to_low = split(weights)
    output = since[None, :] * summed(asked_sums, BLOCKS)
    output += times(u_high, u_low, to_high, to_low, COLUMNS, CHUNK, BLOCKS)
    u_high, u_low = split(straight(u * to_end[None, :], COLUMNS, CHUNK))
    after = ()
    for piece in tl.static_range(PIECES):
        of_key = (piece * PIECE + i < KEY)[None, :]
        keys = tl.load(k + n[:, None] * STRIDE + piece * PIECE + i[None, :], keys_there[:, None] & of_key, 0.0)
        keys = straight(keys, CHUNK, PIECE, True)
        added = straight(written(u_high, u_low, keys, BLOCKS), COLUMNS, PIECE)
        after = after + (state[piece] * total + added,)  # noqa: RUF005
    return after, output, r


@triton.jit
def step_of(sequence, query_start, context, rows, states, has_states, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """-> a sequence's first token of this step, its tokens before it, its state, and `old` and `end`: tokens are
    counted from the first chunk's begin, those of this step are `old` and on, up to `end`."""
    begin = tl.load(query_start + sequence)
    count = (tl.load(query_start + sequence + 1) - begin).to(tl.int32)
    known = begin * 0
    mine = states
    if has_states != 0:
        known = tl.load(context + sequence)
        mine = states + tl.load(rows + sequence) * SIZE
    old = (known % CHUNK).to(tl.int32)
    end = tl.where(count > 0, old + count, 0)
    return begin, known, mine, old, end


@triton.jit
def keep_begun(
    mine, to, k, head, upto, is_new, KEY: tl.constexpr, STRIDE: tl.constexpr, SHARE: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr, CORRECTS: tl.constexpr, KEYS: tl.constexpr,
    INVERSES: tl.constexpr, FADES: tl.constexpr, SINCE: tl.constexpr,
):  # fmt: skip
    """Keeps of a chunk that has `upto` tokens, at `to` and `k`: T, the last rows of D and a, keys that `is_new`."""
    SQUARE: tl.constexpr = CHUNK * CHUNK
    i, n = tl.arange(0, PIECE), tl.arange(0, CHUNK)
    row, column = n[:, None], n[None, :]
    if CORRECTS:
        inverse = tl.load(to + row * CHUNK + column)
        tl.store(mine + INVERSES + head * SQUARE + turned(n)[:, None] * CHUNK + column, inverse)
    faded, since = tl.load(to + 2 * SQUARE + CHUNK + n), tl.load(to + 2 * SQUARE + CHUNK - 1)
    tl.store(mine + FADES + head * SQUARE + (upto - 1) * CHUNK + n, faded)
    tl.store(mine + SINCE + head * CHUNK + upto - 1, since)
    kept = mine + KEYS + head // SHARE * (CHUNK * KEY) + row * KEY + i[None, :]
    for piece in tl.static_range(PIECES):
        mask = (is_new & (head % SHARE == 0))[:, None] & (piece * PIECE + i < KEY)[None, :]
        fresh = tl.load(k + row * STRIDE + piece * PIECE + i[None, :], mask, 0.0)
        tl.store(kept + piece * PIECE, fresh, mask)


@triton.jit(do_not_specialize=["has_states"])
def scan_chunks(
    q, k, v, beta, query_start, context, rows, states, made, begun, out, has_states, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, CORRECTS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, INVERSES: tl.constexpr, FADES: tl.constexpr, SINCE: tl.constexpr, SIZE: tl.constexpr,
    MADE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has some columns of a head's state, and a sequence's chunks in turn."""
    SHARE: tl.constexpr = HEADS // GROUPS
    STRIDE: tl.constexpr = GROUPS * KEY
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // SHARE
    begin, known, mine, old, end = step_of(sequence, query_start, context, rows, states, has_states, SIZE, CHUNK)
    i, j, n = tl.arange(0, PIECE), block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    of_value = (j < WIDTH)[:, None]
    state_at = mine + (head * WIDTH + j)[:, None] * KEY + i[None, :]
    state = pieces(state_at, of_value & (known >= CHUNK), i, KEY, PIECES, PIECE)
    token = turned(n)
    kept_at = mine + VALUES + (head * CHUNK + token)[None, :] * WIDTH + j[:, None]
    to = made + ((begin // CHUNK + 2 * sequence) * HEADS + head) * MADE
    q += ((begin - old) * GROUPS + group) * KEY
    k += ((begin - old) * GROUPS + group) * KEY
    v += ((begin - old) * HEADS + head) * WIDTH
    out += ((begin - old) * HEADS + head) * WIDTH
    beta += (begin - old) * HEADS + head
    value_at = token[None, :] * (HEADS * WIDTH) + j[:, None]
    keys = k
    if old > 0:
        keys = begun + (sequence * CHUNK * GROUPS + group) * KEY
    for chunk in tl.range(0, end, CHUNK, num_stages=STAGES):
        is_old, there = chunk + token < old, (chunk + token >= old) & (chunk + token < end)
        is_new = there[None, :] & of_value
        values = tl.load(v + value_at, is_new, 0.0)
        betas = tl.load(beta + token * HEADS, there, 0.0)
        given = tl.load(kept_at, is_old[None, :] & of_value, 0.0)
        state, output, r = _chunk(
            state, q, keys, to, values, betas, given, is_old, there, chunk + n < end, chunk + CHUNK <= end, KEY, STRIDE,
            COLUMNS, PIECES, PIECE, CHUNK, CORRECTS,
        )  # fmt: skip
        tl.store(out + value_at, output, is_new)
        tl.store(kept_at, r, is_new & (has_states != 0) & (end < chunk + CHUNK))
        to += HEADS * MADE
        q += CHUNK * STRIDE
        k += CHUNK * STRIDE
        v += CHUNK * HEADS * WIDTH
        out += CHUNK * HEADS * WIDTH
        beta += CHUNK * HEADS
        keys = k
    if has_states != 0:
        if end >= CHUNK:
            for piece in tl.static_range(PIECES):
                tl.store(state_at + piece * PIECE, state[piece], of_value & (piece * PIECE + i < KEY)[None, :])
        upto = end % CHUNK
        if (block == 0) & (upto > 0):  # nothing of this is read in this launch
            is_new = (n < upto) & ((end >= CHUNK) | (n >= old))
            keep_begun(
                mine, to - HEADS * MADE, k - CHUNK * STRIDE, head, upto, is_new, KEY, STRIDE, SHARE, PIECES, PIECE,
                CHUNK, CORRECTS, KEYS, INVERSES, FADES, SINCE,
            )  # fmt: skip
