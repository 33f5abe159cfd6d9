"""Tiles and segments of keys of one attention, as `attention`'s kernels of every GPU read them.

Of 16-bit heads of 64 to 128 numbers a segment's masses are relative to the highest score of its first tile, which no
later tile changes: no sum has to be made relative to another score, and `prefill` needs no highest score of a tile.
Where masses then sum to more than `LIMIT`, the row's segment is computed anew, relative to its highest score of all.
Other heads have the online softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlloop.numerics.kernels.triton import segments

SLACK = tl.constexpr(segments.SLACK)


@triton.jit
def load_rows(base, offset, inside, WIDTH: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr):
    """Rows of WIDTH numbers at base + offset, as [rows, W]; zeros where not inside."""
    d = tl.arange(0, W)
    at = base + offset[:, None] + d[None, :]
    if MASKED:
        rows = tl.load(at, inside[:, None] & (d < WIDTH)[None, :], 0.0)
    elif W == WIDTH:
        rows = tl.load(at)
    else:
        rows = tl.load(at, tl.broadcast_to((d < WIDTH)[None, :], at.shape), 0.0)
    return rows


@triton.jit
def _scores(
    q, rest, k, v, v_step, blocks, start, block_size, group, position, last, tile,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, W: tl.constexpr, VW: tl.constexpr,
    REST: tl.constexpr, TILE: tl.constexpr, CONTIGUOUS: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(scores [ROWS, TILE], values [TILE, VW]) of a tile of keys. `MASKED`: some query does not attend to all of them;
    with a WINDOW perhaps to none."""
    lane = tl.arange(0, TILE)
    key = tile + lane
    seen = key <= last
    if CONTIGUOUS:
        key_base = k + ((start + tile) * GROUPS + group) * WIDTH
        value_base = v + (start + tile) * v_step + group * V_WIDTH
        key_at, value_at = lane * (GROUPS * WIDTH), lane * v_step
    else:
        slot = tl.load(blocks + key // block_size, seen, 0) + key % block_size
        key_base, value_base = k, v
        key_at, value_at = (slot * GROUPS + group) * WIDTH, slot * v_step + group * V_WIDTH
    values = load_rows(value_base, value_at, seen, V_WIDTH, VW, MASKED)
    if REST == 0:
        keys = load_rows(key_base, key_at, seen, WIDTH, W, MASKED)
        scores = tl.dot(q, keys.T, input_precision="ieee")
    else:  # a key begins with its value
        scores = tl.dot(q, values.T, input_precision="ieee")
        keys = load_rows(key_base + V_WIDTH, key_at, seen, WIDTH - V_WIDTH, REST, MASKED)
        scores = tl.dot(rest, keys.T, scores, input_precision="ieee")
    if MASKED:
        reads = key[None, :] <= position[:, None]
        if WINDOW > 0:
            reads = reads & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(reads, scores, float("-inf"))
    return scores, values


@triton.jit
def _tile(
    top, total, sums, q, rest, k, v, v_step, blocks, start, block_size, group, position, last, tile, scale,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, W: tl.constexpr, VW: tl.constexpr,
    REST: tl.constexpr, TILE: tl.constexpr, CONTIGUOUS: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys of the online softmax."""
    scores, values = _scores(
        q, rest, k, v, v_step, blocks, start, block_size, group, position, last, tile, GROUPS, WIDTH, V_WIDTH, W, VW,
        REST, TILE, CONTIGUOUS, WINDOW, MASKED,
    )  # fmt: skip
    highest = tl.maximum(top, tl.max(scores, 1) * scale)
    base = highest
    if WINDOW > 0:
        base = tl.where(highest == float("-inf"), 0.0, highest)
    masses = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), -base[:, None]))
    fade = tl.exp2(top - base)
    total = tl.fma(total, fade, tl.sum(masses, 1))
    sums = tl.dot(masses.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
    return highest, total, sums


@triton.jit
def _fixed_tile(
    top, highest, total, sums, q, k, v, v_step, blocks, start, block_size, group, position, last, tile, first, scale,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr, CONTIGUOUS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys, of which only that at `first` says what masses are relative to."""
    scores, values = _scores(
        q, q, k, v, v_step, blocks, start, block_size, group, position, last, tile, GROUPS, WIDTH, WIDTH, W, W, 0, TILE,
        CONTIGUOUS, 0, MASKED,
    )  # fmt: skip
    peak = tl.max(scores, 1) * scale
    highest = tl.maximum(highest, peak)
    top = tl.where(tile == first, peak, top)
    masses = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), -top[:, None]))
    total = total + tl.sum(masses, 1)
    sums = tl.dot(masses.to(values.dtype), values, sums, input_precision="ieee")
    return top, highest, total, sums


@triton.jit
def segment(
    q, rest, k, v, v_step, blocks, block_size, group, position, first, last, begin, end, scale, top, total,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, W: tl.constexpr, VW: tl.constexpr,
    REST: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, CONTIGUOUS: tl.constexpr, WINDOW: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """(top, total, sums) of the keys `begin` to `end` after `top` and `total`, for queries from position `first` to
    `last`. `scale` is for powers of two."""
    sums = tl.zeros((ROWS, VW), tl.float32)
    start = tl.load(blocks)
    masked = begin
    if not ONE and WINDOW == 0:  # tiles that every query sees whole need no mask
        masked = begin + tl.maximum(tl.minimum(first + 1, end) - begin, 0) // TILE * TILE
        for tile in range(begin, masked, TILE):
            top, total, sums = _tile(
                top, total, sums, q, rest, k, v, v_step, blocks, start, block_size, group, position, last, tile, scale,
                GROUPS, WIDTH, V_WIDTH, W, VW, REST, TILE, CONTIGUOUS, WINDOW, False,
            )  # fmt: skip
    for tile in range(masked, end, TILE):
        top, total, sums = _tile(
            top, total, sums, q, rest, k, v, v_step, blocks, start, block_size, group, position, last, tile, scale,
            GROUPS, WIDTH, V_WIDTH, W, VW, REST, TILE, CONTIGUOUS, WINDOW, True,
        )  # fmt: skip
    return top, total, sums


@triton.jit
def fixed_segment(
    q, k, v, v_step, blocks, block_size, group, position, first, last, begin, end, scale, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, CONTIGUOUS: tl.constexpr,
    ONE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """(top, total, sums) of the segment of the keys `begin` to `end`, likewise. Rows before it get no numbers."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    highest, total, sums = top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, W), tl.float32)
    start = tl.load(blocks)
    masked = begin
    if not ONE:
        masked = begin + tl.maximum(tl.minimum(first + 1, end) - begin, 0) // TILE * TILE
        for tile in range(begin, masked, TILE):
            top, highest, total, sums = _fixed_tile(
                top, highest, total, sums, q, k, v, v_step, blocks, start, block_size, group, position, last, tile,
                begin, scale, GROUPS, WIDTH, W, TILE, CONTIGUOUS, False,
            )  # fmt: skip
    for tile in range(masked, end, TILE):
        top, highest, total, sums = _fixed_tile(
            top, highest, total, sums, q, k, v, v_step, blocks, start, block_size, group, position, last, tile, begin,
            scale, GROUPS, WIDTH, W, TILE, CONTIGUOUS, True,
        )  # fmt: skip
    over = tl.where((total <= LIMIT) | (position < begin), 0, 1)  # also where it is no number
    anew = tl.max(over, 0) > 0  # other rows get the same bits again
    top = tl.where(over > 0, highest, top)
    total, sums = tl.where(anew, tl.zeros_like(total), total), tl.where(anew, tl.zeros_like(sums), sums)
    # No branch: Triton 3.6 compiles none with products in it for Blackwell.
    for tile in range(begin, tl.where(anew, end, begin), TILE):
        top, highest, total, sums = _fixed_tile(
            top, highest, total, sums, q, k, v, v_step, blocks, start, block_size, group, position, last, tile, -1,
            scale, GROUPS, WIDTH, W, TILE, CONTIGUOUS, True,
        )  # fmt: skip
    return top, total, sums


@triton.jit
def _flushed(x):
    """Numbers below 2^-126 as 0, which is what `prefill`'s additions in memory take them for."""
    return tl.where(tl.abs(x) < 1.1754943508222875e-38, x * 0.0, x)


@triton.jit
def join(top, total, sums, other_top, other_total, other_sums, LIMIT: tl.constexpr):
    """Joins two parts of one softmax. Shapes begin with the rows. `LIMIT`: 0 of the online softmax."""
    if LIMIT == 0:
        highest = tl.maximum(top, other_top)
        fade, other_fade = tl.exp2(top - highest), tl.exp2(other_top - highest)
        total = tl.fma(total, fade, other_total * other_fade)
        sums = tl.fma(sums, tl.broadcast_to(fade[:, None], sums.shape), other_sums * other_fade[:, None])
    else:  # few parts change the reference, and where none does, sums in memory are only added to
        highest = tl.where(other_top > top + SLACK, other_top, top)
        fade, other_fade = tl.exp2(top - highest), tl.exp2(other_top - highest)
        total = total * fade + other_total * other_fade
        sums = _flushed(_flushed(sums * fade[:, None]) + _flushed(other_sums * other_fade[:, None]))
    return highest, total, sums


@triton.jit
def divided(sums, total):
    """sums / total, rows in front: by a row's reciprocal and what then is left over, which is the rounded quotient for
    all but the smallest numbers, and a tenth of a division's instructions."""
    inverse = tl.broadcast_to(tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)[:, None], sums.shape)
    quotient = sums * inverse
    return tl.fma(tl.fma(tl.broadcast_to(-total[:, None], sums.shape), quotient, sums), inverse, quotient)
