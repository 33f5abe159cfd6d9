"""Many matrix products at once, one a group: the experts of a layer, or the heads of a projection.

Each output is that of `linear`: the same chains, the same tree, one rounding. The number of rows of a group decides how
the work is cut and nothing else, so an expert's row has the bits that a dense layer of its weights gives.
"""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.amx import ROWS
from rlloop.numerics.kernels.cpu.compiled.bfloat16 import AMX
from rlloop.numerics.kernels.cpu.compiled.jit import kernel, parallel_kernel, take
from rlloop.numerics.kernels.cpu.compiled.linear import (
    MOST_ROWS,
    NO,
    PACKED,
    add_strip,
    finish,
    room_for_lanes,
    room_for_sums,
    tiles_for,
)
from rlloop.numerics.kernels.cpu.compiled.simd import LANES
from rlloop.numerics.kernels.cpu.compiled.tiles import MAIN


@kernel
def _group_of(first_task, task):
    low, high = 0, len(first_task) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if first_task[middle] <= task:
            low = middle
        else:
            high = middle
    return low


@parallel_kernel
def grouped_product(
    counter, lanes, lanes_at, by_row, rows, rows_at, rows_by_row, out, out_at, counts, widths, first_task, columns,
    segment, kind, tiles, chunk, further,
):  # fmt: skip
    """Per group g: out_g[m, n] = sum over k of R_g[m, k] * L_g[n, k], counts[g] x columns sums of widths[g] terms.

    L_g lies in `lanes` from lanes_at[g] on, as [columns, width] if by_row, else transposed; so does R_g in `rows`, of
    float32. Group g has the tasks first_task[g] to first_task[g + 1]; groups without rows have none.
    """
    strips, depth = (columns + tiles * LANES - 1) // (tiles * LANES), PACKED // (tiles * LANES)
    packed = room_for_lanes(kind)
    panel = np.empty(0 if rows_by_row else depth * chunk, np.float32)
    sums, starts = room_for_sums(chunk, tiles, widths.max(), segment), np.empty(tiles * LANES, np.int64)
    tasks = first_task[-1]
    task = take(counter)
    while task < tasks:
        group = _group_of(first_task, task)
        item, width, num_rows = task - first_task[group], widths[group], counts[group]
        column, first = item % strips * tiles * LANES, item // strips * chunk
        count = min(chunk, num_rows - first)
        matrix, vectors = lanes[lanes_at[group] :], rows[rows_at[group] :]
        if width == 0:
            sums[:] = np.float32(0)
        add_strip(
            matrix, by_row, vectors, rows_by_row, column, columns, first, count, num_rows, width, segment, kind, tiles,
            chunk, packed, panel, starts, sums, further, out_at[group] // columns + first,
        )  # fmt: skip
        finish(sums, tiles, count, sums, NO, out, out_at[group] + first * columns, column, columns)
        task = take(counter)


def plan(counts: np.ndarray, columns: int, kind: np.int64, rows_by_row: bool) -> tuple[np.ndarray, int, int]:
    """(first_task, tiles, chunk) for `grouped_product`."""
    most = int(counts.max(initial=1))
    if not rows_by_row:  # the rows are packed too: wide tasks, so that it pays, and chunks of whole sixteens
        tiles, chunk = 4, min(96, -(-most // LANES) * LANES)
    else:  # a group's weights are packed for each chunk of its rows, so the fewest chunks that fit, of equal size
        chunks = max(1, -(-most // MOST_ROWS))
        tiles, together = (4, 2 * ROWS) if kind == AMX else (tiles_for(most, columns), MAIN)
        chunk = -(-most // chunks // together) * together
    strips = -(-columns // (tiles * LANES))
    first_task = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(-(-counts // chunk) * strips, out=first_task[1:])
    return first_task, tiles, chunk
