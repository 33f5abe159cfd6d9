"""`scan_chunks` without the delta rule where programs are few: four chunks side by side, a warp each.

What a chunk adds to S does not depend on S then: warps make it at once. It crosses through shared memory, so that each
warp has a part of S for all four chunks, and makes S before each in turn; those cross back, each to its chunk's warp,
which multiplies it with q. Numbers are those of `scan_chunks`: the same chains of the same instructions."""

from __future__ import annotations

import triton
import triton.language as tl

from rlloop.numerics.kernels.triton.scan_kernels import keep_begun, step_of
from rlloop.numerics.kernels.triton.scan_products import (
    nothing,
    pieces,
    plus,
    split,
    straight_tiles,
    summed,
    turned,
    written,
)


@triton.jit
def _apart(x, PIECE: tl.constexpr):
    """Tiles of warps, [4, V, K] -> of each chunk a tile [V, K], of which each warp has a part."""
    even, odd = x.reshape(2, 2, 16, PIECE).permute(2, 3, 0, 1).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@triton.jit
def _together(a, b, c, d, PIECE: tl.constexpr):
    """The other way, without `tl.join`: it is multiplied."""
    chunk = tl.arange(0, 4)[:, None, None]
    a, b, c, d = a.reshape(1, 16, PIECE), b.reshape(1, 16, PIECE), c.reshape(1, 16, PIECE), d.reshape(1, 16, PIECE)
    return tl.where(chunk < 2, tl.where(chunk == 0, a, b), tl.where(chunk == 2, c, d))


@triton.jit(do_not_specialize=["has_states"])
def scan_four(
    q, k, v, beta, query_start, context, rows, states, made, begun, out, has_states, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    CHUNK: tl.constexpr, CORRECTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, INVERSES: tl.constexpr,
    FADES: tl.constexpr, SINCE: tl.constexpr, SIZE: tl.constexpr, MADE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has 16 columns of a head's state, and a sequence's chunks, four at a time."""
    tl.static_assert(not CORRECTS)
    SHARE: tl.constexpr = HEADS // GROUPS
    STRIDE: tl.constexpr = GROUPS * KEY
    ROW: tl.constexpr = HEADS * WIDTH
    SQUARE: tl.constexpr = CHUNK * CHUNK
    SPAN: tl.constexpr = 4 * CHUNK
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // SHARE
    begin, known, mine, old, end = step_of(sequence, query_start, context, rows, states, has_states, SIZE, CHUNK)
    i, n, j = tl.arange(0, PIECE), tl.arange(0, CHUNK), block * 16 + tl.arange(0, 16)
    state_at = mine + (head * WIDTH + j)[:, None] * KEY + i[None, :]
    state = pieces(state_at, (j < WIDTH)[:, None] & (known >= CHUNK), i, KEY, PIECES, PIECE)
    to = made + ((begin // CHUNK + 2 * sequence) * HEADS + head) * MADE
    q += ((begin - old) * GROUPS + group) * KEY
    k += ((begin - old) * GROUPS + group) * KEY
    v += ((begin - old) * HEADS + head) * WIDTH
    out += ((begin - old) * HEADS + head) * WIDTH
    beta += (begin - old) * HEADS + head
    chunk = tl.arange(0, 4)[:, None]  # and warp
    token = chunk * CHUNK + n[None, :]
    begun_at = begun + (sequence * CHUNK * GROUPS + group) * KEY + token * STRIDE
    column = j[None, :, None]
    value_at = token[:, None, :] * ROW + column
    kept_at = mine + VALUES + (head * CHUNK + token)[:, None, :] * WIDTH + column
    made_at = chunk * (HEADS * MADE) + SQUARE + n[None, :]
    row = turned(turned(n))  # of W, whose rows are turned: turning thrice changes nothing
    weights_at = chunk[:, :, None] * (HEADS * MADE) + SQUARE + row[None, None, :] * CHUNK + n[None, :, None]
    for first in tl.range(0, end, SPAN, num_stages=STAGES):
        is_old, has_key = first + token < old, first + token < end
        # r of old rows is kept.
        values = tl.load(
            tl.where(is_old[:, None, :], kept_at, v + value_at), has_key[:, None, :] & (column < WIDTH), 0.0
        )
        r = values * tl.load(beta + token * HEADS, has_key & ~is_old, 1.0)[:, None, :]
        begins, whole = first + chunk * CHUNK < end, first + (chunk + 1) * CHUNK <= end
        weights = tl.load(to + weights_at, begins[:, :, None], 0.0)
        since = tl.load(to + made_at + SQUARE, begins, 0.0)
        to_end = tl.load(to + made_at + SQUARE + CHUNK, whole, 0.0)
        totals = ()
        for c in tl.static_range(4):
            total_at = to + c * (HEADS * MADE) + 2 * SQUARE + CHUNK - 1
            totals = totals + (tl.load(total_at, first + (c + 1) * CHUNK <= end, 1.0),)  # noqa: RUF005
        high, low = split(r * to_end[:, None, :])
        keys_at = tl.where(first + token < old, begun_at, k + token * STRIDE)[:, :, None] + i[None, None, :]
        queries_at = (q + token * STRIDE)[:, None, :] + i[None, :, None]
        there = (first + token >= old) & (first + token < end)
        asked_sums = nothing(64, CHUNK, 4)
        after = ()
        for piece in tl.static_range(PIECES):
            of_key = (piece * PIECE + i < KEY) | (KEY % PIECE == 0)
            inside = (first + token < end)[:, :, None] & of_key[None, None, :]
            added = written(high, low, tl.load(keys_at + piece * PIECE, inside, 0.0))
            adds = _apart(added, PIECE)
            s, before = state[piece], ()
            for c in tl.static_range(4):
                before = before + (s,)  # noqa: RUF005
                s = s * totals[c] + adds[c]
            after = after + (s,)  # noqa: RUF005
            x = _together(before[0], before[1], before[2], before[3], PIECE)
            # Always true: numbers go to the warps as a product has them, once, and not as two parts each.
            x = tl.where(block >= 0, straight_tiles(x, 4, PIECE, True), added)
            s_high, s_low = split(straight_tiles(x, 4, PIECE))
            inside = there[:, None, :] & of_key[None, :, None]
            to_high, to_low = split(tl.load(queries_at + piece * PIECE, inside, 0.0))
            asked_sums = plus(asked_sums, s_high, s_low, to_high, to_low)
        state = after
        high, low = split(r)
        to_high, to_low = split(weights)
        output = since[:, None, :] * summed(asked_sums)
        output += summed(plus(nothing(64, CHUNK, 4), high, low, to_high, to_low))
        tl.store(out + value_at, output, (has_key & ~is_old)[:, None, :] & (column < WIDTH))
        to += 4 * HEADS * MADE
        q += SPAN * STRIDE
        k += SPAN * STRIDE
        v += SPAN * ROW
        out += SPAN * ROW
        beta += SPAN * HEADS
    if has_states != 0:
        if end >= CHUNK:
            for piece in tl.static_range(PIECES):
                inside = (j < WIDTH)[:, None] & (piece * PIECE + i < KEY)[None, :]
                tl.store(state_at + piece * PIECE, state[piece], inside)
        upto = end % CHUNK
        is_new = (n < upto) & ((end >= CHUNK) | (n >= old))
        back = tl.cdiv(end, SPAN) * 4 - end // CHUNK  # chunks, to the begun one
        inside = is_new[:, None] & (j < WIDTH)[None, :]
        fresh = tl.load(v + (n - back * CHUNK)[:, None] * ROW + j[None, :], inside, 0.0)
        fresh *= tl.load(beta + (n - back * CHUNK) * HEADS, is_new, 0.0)[:, None]
        tl.store(mine + VALUES + (head * CHUNK + n)[:, None] * WIDTH + j[None, :], fresh, inside)
        if (block == 0) & (upto > 0):  # nothing of this is read in this launch
            keep_begun(
                mine, to - back * (HEADS * MADE), k - back * (CHUNK * STRIDE), head, upto, is_new, KEY, STRIDE, SHARE,
                PIECES, PIECE, CHUNK, CORRECTS, KEYS, INVERSES, FADES, SINCE,
            )  # fmt: skip
