"""Kernel of `scan` for one token of each sequence, whose notation and formulas are there."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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


@triton.jit
def _queries(q, k, at, inside, is_key, CORRECTS: tl.constexpr):
    """A tile of which one row or column is the key's and every other the query's."""
    x = tl.load(q + at, inside, 0.0)
    return tl.where(is_key, tl.load(k + at, inside, 0.0), x) if CORRECTS else x


@triton.jit
def _rows(
    of_state, kept, keys_at, k, inverse, fades, factor, t, KEY: tl.constexpr, PIECES: tl.constexpr,
    PIECE: tl.constexpr, CHUNK: tl.constexpr, CORRECTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Row t of W, and rows up to t of T. `inverse`: rows before t; `kept`: keys before t, if read ahead."""
    i, n = tl.arange(0, PIECE), tl.arange(0, CHUNK)
    row, column = n[:, None], n[None, :]
    sums = nothing(CHUNK, 8)
    for piece in tl.static_range(PIECES):
        inside = piece * PIECE + i < KEY
        if AHEAD:
            keys = tl.where(row == t, tl.load(k + piece * PIECE + i, inside, 0.0)[None, :], kept[piece])
        else:
            keys = tl.load(keys_at + piece * PIECE, (row <= t) & inside[None, :], 0.0)
        high, low = split(keys)
        to_high, to_low = split(of_state[piece])
        sums = plus(sums, high, low, to_high, to_low)
    products = summed(sums) * fades[:, None]
    eight = turned(tl.arange(0, 8))[None, :]
    weights = tl.sum(tl.where(eight == (t + 1) % 8, products, 0.0), 1)  # of one number each
    if CORRECTS:
        alike = tl.sum(tl.where(eight == t % 8, products, 0.0), 1)
        high, low = split(tl.where((row == t) & (column < t), alike[None, :] * factor, 0.0))
        to_high, to_low = split(inverse)
        product = times(high, low, to_high, to_low, CHUNK, CHUNK)
        inverse = tl.where(row == t, tl.where(row == column, 1.0, 0.0) - product, inverse)
    return weights, inverse


@triton.jit
def _of_columns(
    mine, head, token, t, known, block, HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """A block of columns of the state before this chunk, transposed, and of r before t."""
    i, j = tl.arange(0, PIECE), block * COLUMNS + tl.arange(0, COLUMNS)
    of_value = (j < WIDTH)[:, None]
    state_at = mine + (head * WIDTH + j)[:, None] * KEY + i[None, :]
    state = pieces(state_at, of_value & (known >= CHUNK), i, KEY, PIECES, PIECE)
    r = tl.load(mine + VALUES + (head * CHUNK + token) * WIDTH + j[:, None], of_value & (token < t), 0.0)
    return state, r


@triton.jit
def decode(
    q, k, v, decay, beta, context, rows, states, out, GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr, CORRECTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, INVERSES: tl.constexpr,
    FADES: tl.constexpr, SINCE: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One token of each sequence, row t of its chunk, by `BLOCKS` times `COLUMNS` columns of one head. Whatever is
    stored here is row t, which no program reads. `EARLY`: this launch has begun before the one before it is done;
    `AHEAD`: which has not written to states, so their one block is read meanwhile."""
    if EARLY and not AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    SQUARE: tl.constexpr = CHUNK * CHUNK
    SHARE: tl.constexpr = HEADS // GROUPS
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // SHARE
    known = tl.load(context + sequence)
    mine = states + tl.load(rows + sequence) * SIZE
    t = (known % CHUNK).to(tl.int32)
    i, n = tl.arange(0, PIECE), tl.arange(0, CHUNK)
    row, column = n[:, None], n[None, :]
    token = turned(column)
    inverse_at = mine + INVERSES + head * SQUARE + row * CHUNK + column
    keys_at = mine + KEYS + group * (CHUNK * KEY) + row * KEY + i[None, :]
    fades_at = mine + FADES + head * SQUARE + t * CHUNK + n
    since_at = mine + SINCE + head * CHUNK + t
    kept = ()
    if AHEAD:
        kept = pieces(keys_at, row < t, i, KEY, PIECES, PIECE)
    inverse = tl.zeros((CHUNK, CHUNK), tl.float32)
    if CORRECTS:
        inverse = tl.load(inverse_at, (row < t) & (column >= 0), 0.0)
    fades, since = tl.load(fades_at - CHUNK, n < t, 0.0), tl.load(since_at - 1, t > 0, 1.0)
    if AHEAD:
        state, r = _of_columns(
            mine, head, token, t, known, part, HEADS, KEY, WIDTH, PIECES, PIECE, COLUMNS, CHUNK, VALUES
        )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
    q += (sequence * GROUPS + group) * KEY
    k += (sequence * GROUPS + group) * KEY
    fade, factor = tl.load(decay + sequence * HEADS + head), tl.load(beta + sequence * HEADS + head)
    fades = tl.where(n < t, fades * fade, tl.where(n == t, 1.0, 0.0))
    since = since * fade
    # Of eight columns, one is the key's and every other the query's. A product of 16 columns has them twice.
    eight = tl.arange(0, 8)[None, :]
    down = i[:, None] + 0 * eight
    is_key = (turned(eight) == t % 8) & (down >= 0)
    of_state = ()
    for piece in tl.static_range(PIECES):
        of_key = (piece * PIECE + i < KEY)[:, None] & (eight >= 0)
        of_state = of_state + (_queries(q, k, down + piece * PIECE, of_key, is_key, CORRECTS),)  # noqa: RUF005
    of_chunk = tl.where(row == t, k + row * 0 + i[None, :], keys_at)
    if BLOCKS > 1 or AHEAD:
        weights, inverse = _rows(
            of_state, kept, of_chunk, k, inverse, fades, factor, t, KEY, PIECES, PIECE, CHUNK, CORRECTS, AHEAD
        )  # fmt: skip
    for block in tl.range(part * BLOCKS, part * BLOCKS + BLOCKS, num_stages=STAGES):
        j = block * COLUMNS + tl.arange(0, COLUMNS)
        of_value = (j < WIDTH)[:, None]
        if not AHEAD:
            state, r = _of_columns(
                mine, head, token, t, known, block, HEADS, KEY, WIDTH, PIECES, PIECE, COLUMNS, CHUNK, VALUES
            )  # fmt: skip
        r_at = mine + VALUES + (head * CHUNK + token) * WIDTH + j[:, None]
        value_at = (sequence * HEADS + head) * WIDTH + j[:, None]
        values = tl.load(v + value_at, of_value, 0.0)
        if BLOCKS == 1 and not AHEAD:  # here, so that the state is on its way meanwhile
            weights, inverse = _rows(
                of_state, kept, of_chunk, k, inverse, fades, factor, t, KEY, PIECES, PIECE, CHUNK, CORRECTS, AHEAD
            )  # fmt: skip
        read_sums = nothing(COLUMNS, 8)
        for piece in tl.static_range(PIECES):
            high, low = split(state[piece])
            to_high, to_low = split(of_state[piece])
            read_sums = plus(read_sums, high, low, to_high, to_low)
        read = tl.broadcast_to(summed(read_sums)[:, None, :], (COLUMNS, 2, 8)).reshape(COLUMNS, CHUNK)
        if CORRECTS:
            r = tl.where(token == t, (values - since * read) * factor, r)
            high, low = split(straight(r, COLUMNS, CHUNK))
            to_high, to_low = split(straight(inverse.T, CHUNK, CHUNK, True))
            u = times(high, low, to_high, to_low, COLUMNS, CHUNK)
        else:
            r = tl.where(token == t, values * factor, r)
            u = r
        high, low = split(straight(u, COLUMNS, CHUNK))
        to_high, to_low = split(tl.broadcast_to(weights[:, None], (CHUNK, CHUNK)))
        output = since * read + times(high, low, to_high, to_low, COLUMNS, CHUNK)
        tl.store(out + value_at + 0 * column, output, of_value & (token == (t + 1) % CHUNK))
        tl.store(r_at, r, of_value & (token == t))
    if t == CHUNK - 1:
        tl.debug_barrier()
        inverse_high, inverse_low = split(inverse.T)
        for block in range(part * BLOCKS, part * BLOCKS + BLOCKS):
            j = block * COLUMNS + tl.arange(0, COLUMNS)
            of_value = (j < WIDTH)[:, None]
            state_at = mine + (head * WIDTH + j)[:, None] * KEY + i[None, :]
            r_at = mine + VALUES + (head * CHUNK + n)[None, :] * WIDTH + j[:, None]
            u = tl.load(r_at, of_value & (column >= 0), 0.0)
            if CORRECTS:
                u_high, u_low = split(u)
                u = times(u_high, u_low, inverse_high, inverse_low, COLUMNS, CHUNK)
            u_high, u_low = split(u * fades[None, :])
            for piece in tl.static_range(PIECES):
                of_piece = (piece * PIECE + i < KEY)[None, :]
                chunk_keys = tl.load(of_chunk + piece * PIECE, of_piece & (row >= 0), 0.0)
                before = tl.load(state_at + piece * PIECE, of_value & of_piece & (known >= CHUNK), 0.0)
                after = before * since + written(u_high, u_low, chunk_keys)
                tl.store(state_at + piece * PIECE, after, of_value & of_piece)
    elif part == 0:
        if CORRECTS:
            tl.store(inverse_at, inverse, (row == t) & (column >= 0))
        tl.store(fades_at, fades)
        tl.store(since_at, since)
        if head % SHARE == 0:
            for piece in tl.static_range(PIECES):
                of_row = piece * PIECE + i < KEY
                numbers = tl.load(k + piece * PIECE + i, of_row, 0.0)
                tl.store(mine + KEYS + (group * CHUNK + t) * KEY + piece * PIECE + i, numbers, of_row)
