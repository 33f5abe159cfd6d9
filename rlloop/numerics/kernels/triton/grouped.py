"""Many matrix products in one launch, one a group of rows: the experts of a layer, or the heads of a projection.

Each output is the chain of `linear`. Groups and tiles leave its bits alone, so an expert's row has the bits that a
dense layer of its weights gives, whatever rows other experts have.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from rlloop.numerics.kernels.triton.launch import ALIGNMENT, aligned, cdiv, hopper
from rlloop.numerics.kernels.triton.sorting import Groups

BAND = 8  # tiles of rows that share what they read of the weights


@triton.jit
def _sums(
    x, weight, x_tiles, w_tiles, source, valid, begin, group, column, outputs, width, w_group, w_row, w_column,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, BY_ROW: tl.constexpr, WHOLE: tl.constexpr,
    PAIRS: tl.constexpr, FETCH: tl.constexpr, FETCH_X: tl.constexpr,
):  # fmt: skip
    """[ROWS, OUTPUTS] float32, or [ROWS, 2 * OUTPUTS] with gates and ups by turns. `FETCH`: tiles by descriptors."""
    WIDE: tl.constexpr = 2 * OUTPUTS if PAIRS else OUTPUTS
    k, output = tl.arange(0, WIDTH), tl.arange(0, WIDE)
    sums = tl.zeros((ROWS, WIDE), tl.float32)
    if not FETCH_X:
        x_at = x + source[:, None] * width + k[None, :]
    if not FETCH:
        known = (column + (output // 2 if PAIRS else output)) % outputs + (output % 2 * outputs if PAIRS else 0)
        mine = weight + group.to(tl.int64) * w_group
        if BY_ROW:
            w_at = mine + known.to(tl.int64)[:, None] * w_row + k[None, :] * w_column
        else:
            w_at = mine + k[:, None] * w_column + known.to(tl.int64)[None, :] * w_row
    for at in range(0, width, WIDTH):  # a row that is none is not read: all would ask one place of the cache for it
        if FETCH_X:
            xs = x_tiles.load([begin, at])
        elif WHOLE:
            xs = tl.load(x_at, valid[:, None], 0.0)
        else:
            xs = tl.load(x_at, valid[:, None] & (k < width - at)[None, :], 0.0)
        if FETCH:
            if PAIRS:
                ws = w_tiles.load([group, column, 0, at]).reshape(WIDE, WIDTH)
            elif BY_ROW:
                ws = w_tiles.load([group, column, at]).reshape(WIDE, WIDTH)
            else:
                ws = w_tiles.load([group, at, column]).reshape(WIDTH, WIDE)
        elif WHOLE:
            ws = tl.load(w_at)
        elif BY_ROW:
            ws = tl.load(w_at, (k < width - at)[None, :], 0.0)
        else:
            ws = tl.load(w_at, (k < width - at)[:, None], 0.0)
        if BY_ROW:
            sums = tl.dot(xs, ws.T, sums, input_precision="ieee")
        else:
            sums = tl.dot(xs, ws, sums, input_precision="ieee")
        if not FETCH_X:
            x_at += WIDTH
        if not FETCH:
            w_at += WIDTH * w_column
    return sums


@triton.jit
def task_of(table, tile, count, EACH: tl.constexpr):
    """(a tile's group or −1, its first row), as in `sorting.Groups`."""
    if EACH:
        group, begin = tl.load(table + tile).to(tl.int32), tile
        group = tl.where(group < count, group, -1)
    else:
        group, begin = tl.load(table + tile * 2), tl.load(table + tile * 2 + 1)
    return group, begin


@triton.jit
def rows_of(
    order, offsets, group, begin, copies, ROWS: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """A tile's rows by group, which of them there are, where they were before, and whence they are read."""
    lane = tl.arange(0, ROWS)
    row = begin + lane
    if EACH:
        valid = lane == 0
        unsorted_row = row
    else:
        valid = row < tl.load(offsets + group + 1)
        unsorted_row = row
        if GATHER or SCATTER:
            unsorted_row = tl.load(order + row, valid, 0)
    source = tl.where(valid, unsorted_row // copies if GATHER else row, 0).to(tl.int64)
    return row, valid, unsorted_row, source


@triton.jit
def activated(sums, KIND: tl.constexpr):
    """silu(gate) * up of the rounded sums [..., 2]."""
    gate, up = sums.split()
    gate, up = gate.to(KIND).to(tl.float32), up.to(KIND).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["tasks", "count", "copies"])
def _product(
    x, weight, x_tiles, w_tiles, out, order, offsets, table, tasks, count, outputs, width, w_group, w_row, w_column,
    copies, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, BY_ROW: tl.constexpr, WHOLE: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr, FETCH: tl.constexpr,
    FETCH_X: tl.constexpr, EARLY: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """`PAIRS`: the weights are gates over ups, and silu(gate) * up of the rounded sums is what comes out.

    `EARLY`: this launch has begun before the one before it is done, and lets the next one begin.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    output_tiles = tl.cdiv(outputs, OUTPUTS)
    task, band = tl.program_id(0), BAND * output_tiles
    first = task // band * BAND
    height = min(tasks - first, BAND)
    tile, column = first + task % band % height, task % band // height * OUTPUTS
    group, begin = task_of(table, tile, count, EACH)
    if group >= 0:
        row, valid, unsorted_row, source = rows_of(order, offsets, group, begin, copies, ROWS, GATHER, SCATTER, EACH)
        sums = _sums(
            x, weight, x_tiles, w_tiles, source, valid, begin, group, column, outputs, width, w_group, w_row, w_column,
            ROWS, OUTPUTS, WIDTH, BY_ROW, WHOLE, PAIRS, FETCH, FETCH_X,
        )  # fmt: skip
        kind = out.dtype.element_ty
        if PAIRS:
            sums = activated(sums.reshape(ROWS, OUTPUTS, 2), kind)
        to, output = (unsorted_row if SCATTER else row).to(tl.int64), column + tl.arange(0, OUTPUTS)
        tl.store(
            out + to[:, None] * outputs + output[None, :], sums.to(kind), valid[:, None] & (output < outputs)[None, :]
        )


def _fetchable(x: Tensor) -> bool:
    """True if a descriptor can address tiles of x."""
    steps = [step * x.itemsize for step in x.stride()[:-1]] + [x.data_ptr()]
    return x.itemsize == 2 and x.stride(-1) == 1 and all(step % ALIGNMENT == 0 for step in steps) and hopper(x.device)


def product(
    x: Tensor, weight: Tensor, groups: Groups, rows: int, *, by_row: bool = True, order: Tensor | None = None,
    gather: int = 0, scatter: bool = False, activate: bool = False, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Each group's rows times each row of its matrix, or each column where not by_row.

    x [R, K], weight [G, N, K] (else [G, K, N]) -> [R, N]. With `gather`, row i is x[order[i] // gather]; with `scatter`
    it goes to order[i]. With `activate`, N is 2F, gates over ups, and silu(gate) * up comes out: [R, F].
    It is of `dtype`; None: of the type of x.
    """
    x, outputs = aligned(x), weight.shape[1 if by_row else 2] // (2 if activate else 1)
    out, width = x.new_empty(rows, outputs, dtype=dtype), x.shape[1]
    if out.numel() == 0:
        return out
    if min(weight.stride()[1:]) != 1 or weight.data_ptr() % ALIGNMENT:
        weight = weight.contiguous()
    w_row, w_column = weight.stride()[1:] if by_row else weight.stride()[:0:-1]
    height, early = groups.height.rows, hopper(x.device)
    tiles = groups.height.pairs if activate else groups.height.plain
    fetch, fetch_x = _fetchable(weight), _fetchable(x) and not gather
    x_tiles: Any = x
    w_tiles: Any = weight
    if fetch_x:
        x_tiles = TensorDescriptor(x, list(x.shape), list(x.stride()), [height, tiles.width])
    if fetch and activate:  # a gate and its up lie side by side in a tile
        step, (group, half) = weight.stride(1), (weight.stride(0), weight.stride(1) * outputs)
        w_tiles = TensorDescriptor(
            weight, [len(weight), outputs, 2, width], [group, step, half, 1], [1, tiles.outputs, 2, tiles.width]
        )
    elif fetch:
        block = [tiles.outputs, tiles.width] if by_row else [tiles.width, tiles.outputs]
        w_tiles = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [1, *block])
    tasks = len(groups.table)
    _product[(tasks * cdiv(outputs, tiles.outputs),)](
        x, weight, x_tiles, w_tiles, out, groups.table if order is None else order, groups.offsets, groups.table, tasks,
        len(weight), outputs, width, weight.stride(0), w_row, w_column, max(gather, 1), ROWS=height,
        OUTPUTS=tiles.outputs, WIDTH=tiles.width, BY_ROW=by_row, WHOLE=width % tiles.width == 0, GATHER=gather > 0,
        SCATTER=scatter, PAIRS=activate, EACH=groups.each, FETCH=fetch, FETCH_X=fetch_x, EARLY=early, BAND=BAND,
        num_warps=tiles.warps, num_stages=tiles.stages if early else 2, launch_pdl=early,
    )  # fmt: skip
    return out


@triton.jit
def _weight_gradient(
    left, right, out, order, offsets, outputs, columns, copies, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr,
):  # fmt: skip
    """`GATHER_LEFT`: row i of the group is left[order[i]]; `GATHER_RIGHT`: right[order[i] // copies]."""
    group = tl.program_id(1).to(tl.int64)
    column_tiles = tl.cdiv(columns, COLUMNS)
    output = tl.program_id(0) // column_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = tl.load(offsets + group), tl.load(offsets + group + 1)
    sums = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
    for at in range(begin, end, ROWS):
        row = at + tl.arange(0, ROWS)
        valid = row < end
        from_left, from_right = row, row
        if GATHER_LEFT:
            from_left = tl.load(order + row, valid, 0).to(tl.int64)
        if GATHER_RIGHT:
            from_right = (tl.load(order + row, valid, 0) // copies).to(tl.int64)
        ls = tl.load(
            left + from_left[:, None] * outputs + output[None, :], valid[:, None] & (output < outputs)[None, :], 0.0
        )
        rs = tl.load(
            right + from_right[:, None] * columns + column[None, :], valid[:, None] & (column < columns)[None, :], 0.0
        )
        sums = tl.dot(ls.T, rs, sums, input_precision="ieee")
    to = out + (group * outputs + output)[:, None] * columns + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), (output < outputs)[:, None] & (column < columns)[None, :])


def weight_gradient(
    left: Tensor, right: Tensor, offsets: Tensor, dtype: torch.dtype, *, order: Tensor | None = None,
    gather_left: bool = False, gather_right: int = 0,
) -> Tensor:  # fmt: skip
    """Sum over each group's rows of left times right: [R, N], [R, K] -> [G, N, K]. Zero where there are no rows."""
    left, right = aligned(left), aligned(right.to(left.dtype))
    outputs, columns, count = left.shape[1], right.shape[1], len(offsets) - 1
    out = left.new_empty(count, outputs, columns, dtype=dtype)
    half = left.dtype.itemsize == 2
    tile, depth, warps = (128, 64, 8) if half else (64, 16, 4)
    if out.numel():
        grid = (cdiv(outputs, tile) * cdiv(columns, tile), count)
        _weight_gradient[grid](
            left, right, out, offsets if order is None else order, offsets, outputs, columns, max(1, gather_right),
            OUTPUTS=tile, COLUMNS=tile, ROWS=depth, GATHER_LEFT=gather_left, GATHER_RIGHT=gather_right > 0,
            num_warps=warps, num_stages=3 if half else 2,
        )  # fmt: skip
    return out
