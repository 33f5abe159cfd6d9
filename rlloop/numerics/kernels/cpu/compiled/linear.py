"""The matrix product: chains of fused multiply-adds over ascending k, joined by a fixed tree, the bias, one rounding.

A chain has `segment` terms, a constant of the caller. Each begins at +0, and they join as a binary counter counts:
two sums of equally many chains become one at once, and what is left at the end joins from the last to the first. So the
left part of each sum has as many chains as the largest power of two leaves. Nothing else can change a bit, and the work
is cut as suits the caches: sixteen outputs of a row lie in the lanes.

An adapter's terms (`Further`) continue the last chain before that joins the others, so a row without an adapter has the
bits of the product alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.amx import ROWS, add_pairs, pack_pairs
from rlloop.numerics.kernels.cpu.compiled.bfloat16 import AMX, BLOCKS, CHAIN, add_blocks
from rlloop.numerics.kernels.cpu.compiled.jit import inlined, kernel, parallel_kernel, stay_apart, take
from rlloop.numerics.kernels.cpu.compiled.simd import LANES, add, load, load_part, store, store_part
from rlloop.numerics.kernels.cpu.compiled.tiles import MAIN, WIDE, add_products, pack_columns, pack_rows

PACKED = 256 * LANES  # numbers packed at a time, so that they stay in the nearest cache; sums wait there in float32
FEW_ROWS = 3
MOST_ROWS = 384  # of a task
# Plain constants would have the kernels below compiled once more for each.
YES, NO = np.bool_(True), np.bool_(False)
FORWARD = np.int64(2048)  # terms of a chain; up to here a product is one chain
GRADIENT = np.int64(256)  # in a backward, where shorter chains cost nothing and are nearer to the exact sum


class Further(NamedTuple):
    """Terms after those of the product, for rows that have an adapter. Arrays are flat; `slots` is empty where no row
    has one."""

    rows: np.ndarray  # [R, width] float32
    lanes: np.ndarray  # matrix m begins at m * stride: [columns, width] if by_row, else [width, columns]
    by_row: np.bool_
    slots: np.ndarray  # [R] int64: which matrix a row's terms are of
    ranks: np.ndarray  # [matrices] int64: how many terms; 0: none
    width: np.int64
    stride: np.int64


@kernel
def no_further(rows, lanes):
    """Of the arrays' types, so that kernels are compiled once."""
    return Further(rows, lanes, YES, np.empty(0, np.int64), np.empty(0, np.int64), np.int64(0), np.int64(0))


@kernel
def finish(sums, tiles, num_rows, bias, has_bias, out, at, column, columns):
    """Rounds sums [num_rows, 16 * tiles] into out[:, column:], whose rows are `columns` long."""
    for row in range(num_rows):
        for n in range(column, min(columns, column + tiles * LANES), LANES):
            total, count = load(sums, row * tiles * LANES + n - column), columns - n
            if count >= LANES:
                store(out, at + row * columns + n, add(total, load(bias, n)) if has_bias else total)
            else:
                total = add(total, load_part(bias, n, count)) if has_bias else total
                store_part(out, at + row * columns + n, count, total)


@inlined
def room_for_lanes(kind):
    return np.empty(4 * PACKED if kind == AMX else PACKED, np.float32)


@inlined
def room_for_sums(chunk, tiles, width, segment):
    """Memory for the sums of `add_strip`: each that the counter may hold, and the chain in progress."""
    buffers, segments = 1, (width - 1) // segment
    while segments > 0:
        buffers, segments = buffers + 1, segments // 2
    return np.empty(chunk * tiles * LANES * buffers, np.float32)


@kernel
def _continue(further, kind, column, columns, first, count, tiles, packed, starts, sums, at):
    """Adds the further terms of `count` rows, from `first` on, to their sums at `at`; neighbours in a slot at once."""
    stay_apart()
    depth, row, span = PACKED // (tiles * LANES), 0, tiles * LANES
    for lane in range(span):
        starts[lane] = min(column + lane, columns - 1) * further.width
    while row < count:
        slot, end = further.slots[first + row], row + 1
        while end < count and further.slots[first + end] == slot:
            end += 1
        matrix = further.lanes[slot * further.stride :]
        for begin in range(0, further.ranks[slot], depth):
            last = min(further.ranks[slot], begin + depth)
            if further.by_row:
                for lane in range(0, span, LANES):
                    pack_rows(matrix, starts, lane, begin, last, packed, lane, span)
            else:
                pack_columns(matrix, column, columns, begin, last, packed, tiles)
            vectors, to = (first + row) * further.width + begin, at + row * span
            if kind == CHAIN:
                add_products(
                    packed, 0, tiles, further.rows, vectors, further.width, 1, end - row, last - begin, sums, to, False
                )  # fmt: skip
            else:
                add_blocks(
                    packed, tiles, further.rows, vectors, further.width, end - row, last - begin, sums, to, False
                )
        row = end


@kernel
def add_strip(
    lanes, by_row, rows, rows_by_row, column, columns, first, count, num_rows, width, segment, kind, tiles, chunk,
    packed, panel, starts, sums, further, further_first,
):  # fmt: skip
    """sums [count, 16 * tiles] of `product`, for `count` rows from `first` on and the columns from `column` on.

    Among the further terms' rows the first has the index `further_first`.
    """
    span, used = tiles * LANES, min(tiles, (columns - column + LANES - 1) // LANES)
    depth, size = len(packed) // span, count * span
    if kind == AMX:  # two terms lie in one number of `packed` and of `rows`
        depth *= 2
    for lane in range(tiles * LANES):  # the last row stands in for those past the end: its sums are not kept
        starts[lane] = min(column + lane, columns - 1) * width
    to = 0  # where the chain's sums lie, behind those that wait
    for chain in range(0, width, segment):
        last = min(width, chain + segment)
        for begin in range(chain, last, depth):
            end, at = min(last, begin + depth), first * width + begin
            if kind == AMX:
                pairs = (end - begin) // 2
                pack_pairs(lanes, by_row, starts, column, columns, begin // 2, begin // 2 + pairs, packed, used)
                add_pairs(rows, at // 2, width // 2, count, packed, used, pairs, sums, to, span, begin == chain)
                continue
            if by_row:
                for lane in range(0, tiles * LANES, LANES):
                    pack_rows(lanes, starts, lane, begin, end, packed, lane, tiles * LANES)
            else:
                pack_columns(lanes, column, columns, begin, end, packed, tiles)
            if kind == BLOCKS:
                add_blocks(packed, tiles, rows, at, width, count, end - begin, sums, to, begin == chain)
            elif rows_by_row:
                add_products(packed, 0, tiles, rows, at, width, 1, count, end - begin, sums, to, begin == chain)
            else:
                pack_columns(rows, first, num_rows, begin, end, panel, chunk // LANES)
                add_products(packed, 0, tiles, panel, 0, 1, chunk, count, end - begin, sums, to, begin == chain)
        if last == width and len(further.slots) > 0:
            _continue(further, kind, column, columns, further_first, count, tiles, packed, starts, sums, to)
        waiting = chain // segment  # in binary: a sum for each bit that is set, of as many chains as the bit says
        while to > 0 and (waiting % 2 == 1 or last == width):
            for i in range(to, to + size, LANES):
                store(sums, i - size, add(load(sums, i - size), load(sums, i)))
            to, waiting = to - size, waiting // 2
        to += size


@parallel_kernel
def product(
    counter, lanes, by_row, rows, rows_by_row, bias, has_bias, out, num_rows, columns, width, segment, kind, tiles,
    chunk, further,
):  # fmt: skip
    """out[m, n] = sum over k of R[m, k] * L[n, k], plus bias[n]: num_rows x columns sums of `width` terms each.

    L is `lanes` [columns, width] if by_row, else the transpose of `lanes` [width, columns]; so is R of `rows`, which is
    float32, or pairs of bfloat16 (`AMX`). The others are of any float kind. A task makes `chunk` rows of 16 * tiles
    columns.
    """
    strips, chunks = (columns + tiles * LANES - 1) // (tiles * LANES), (num_rows + chunk - 1) // chunk
    packed, starts = room_for_lanes(kind), np.empty(tiles * LANES, np.int64)
    panel = np.empty(0 if rows_by_row else PACKED // (tiles * LANES) * chunk, np.float32)
    sums = room_for_sums(chunk, tiles, width, segment)
    task = take(counter)
    while task < strips * chunks:
        column, first = task % strips * tiles * LANES, task // strips * chunk
        count = min(chunk, num_rows - first)
        add_strip(
            lanes, by_row, rows, rows_by_row, column, columns, first, count, num_rows, width, segment, kind, tiles,
            chunk, packed, panel, starts, sums, further, first,
        )  # fmt: skip
        finish(sums, tiles, count, bias, has_bias, out, first * columns, column, columns)
        task = take(counter)


def plan(
    num_rows: int, columns: int, width: int, threads: int, kind: np.int64, rows_by_row: bool = True, by_row: bool = True
) -> tuple[int, int]:
    """(tiles, chunk) for `product`."""
    if kind == AMX:
        strips = -(-columns // (4 * LANES))
        chunks = max(-(-num_rows // MOST_ROWS), -(-3 * threads // strips) if threads > 1 else 1)
        return 4, min(num_rows, -(-num_rows // chunks // (2 * ROWS)) * 2 * ROWS)
    if not rows_by_row:  # the rows are packed too: wide tasks, so that it pays, and chunks of whole sixteens
        chunks = max(-(-num_rows // 96), -(-threads // -(-columns // (4 * LANES))))
        return 4, -(-num_rows // chunks // LANES) * LANES
    if num_rows <= FEW_ROWS and (width <= 1024 or not by_row):
        return 4, num_rows
    tiles = tiles_for(num_rows, columns)
    strips = -(-columns // (tiles * LANES))
    shares = -(-3 * threads // strips) if threads > 1 else 1  # enough to share out evenly
    chunks = max(-(-num_rows // MOST_ROWS), shares)
    return tiles, min(num_rows, -(-num_rows // chunks // MAIN) * MAIN)


def tiles_for(num_rows: int, columns: int) -> int:
    """Tiles of a task: several where rows are many, and where columns leave few lanes of them without a number."""
    needed = -(-columns // LANES)
    return WIDE if num_rows >= MAIN and 3 * WIDE * -(-needed // WIDE) <= 4 * needed else 1
