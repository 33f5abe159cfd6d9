"""Many matrix products in one launch, one a group of rows: the experts of a layer, or the heads of a projection.

Each output is the chain of `linear`. Groups, tiles and which operand is the tensor core's left one leave its
bits alone, so an expert's row has the bits that a dense layer of its weights gives, whatever other experts have to do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.triton.launch import aligned, power_of_two
from rlloop.numerics.triton.linear import Tiles

HALF = (  # (up to so many rows a group on average, the tiles), of 16-bit numbers
    (8, Tiles(16, 128, 128, True, 4, 4)),
    (24, Tiles(32, 64, 128, True, 4, 4)),
    (64, Tiles(64, 128, 64, True, 4, 4)),
    (None, Tiles(128, 128, 64, False, 8, 3)),
)
FLOAT32 = ((16, Tiles(16, 64, 32, False, 4, 2)), (None, Tiles(64, 64, 16, False, 4, 2)))
BAND = 8  # tiles of rows that share what they read of the weights
SORTED = 2048  # choices that a program looks at, at a time


class Groups(NamedTuple):
    """Rows by group, cut into tiles of `tiles.rows`."""

    offsets: Tensor  # [G + 1] int64
    table: Tensor  # [tasks, 2] int32: a tile's group (−1: there is no tile) and its first row
    tiles: Tiles


def tiles_for(rows: int, groups: int, dtype: torch.dtype) -> Tiles:
    table = FLOAT32 if dtype == torch.float32 else HALF
    return next(tiles for most, tiles in table if most is None or rows <= most * groups)


def _tasks(rows: int, groups: int, height: int) -> tuple[int, bool]:
    """(tiles at most, whether group g has those from its first row on; else from offset // height + g on)."""
    by_rows = rows // height + groups
    return (rows, True) if rows <= by_rows else (by_rows, False)


@triton.jit
def _fill(table, group, begin, count, tasks, GROUPS: tl.constexpr, HEIGHT: tl.constexpr, BY_ROW: tl.constexpr):
    """The group's entries, and −1 in what is left up to the next group's."""
    if BY_ROW:
        first, end = begin, begin + count
    else:
        first, end = begin // HEIGHT + group, (begin + count) // HEIGHT + group + 1
    if group == GROUPS - 1:
        end = tl.maximum(end, tasks)
    lane = tl.arange(0, 128)
    for at in range(first, end, 128):
        row = (at - first + lane) * HEIGHT
        inside = at + lane < tl.minimum(end, tasks)
        tl.store(table + (at + lane) * 2, tl.where(row < count, group, -1), inside)
        tl.store(table + (at + lane) * 2 + 1, (begin + row).to(tl.int32), inside)


@triton.jit(do_not_specialize=["tasks"])
def _of_offsets(offsets, table, tasks, GROUPS: tl.constexpr, HEIGHT: tl.constexpr, BY_ROW: tl.constexpr):
    group = tl.program_id(0)
    begin = tl.load(offsets + group)
    _fill(table, group, begin, tl.load(offsets + group + 1) - begin, tasks, GROUPS, HEIGHT, BY_ROW)


def groups_of(offsets: Tensor, rows: int, dtype: torch.dtype) -> Groups:
    """Of rows that lie by group: group g has the rows from offsets[g] to offsets[g + 1]."""
    count = len(offsets) - 1
    tiles = tiles_for(rows, count, dtype)
    tasks, by_row = _tasks(rows, count, tiles.rows)
    table = torch.empty(tasks, 2, dtype=torch.int32, device=offsets.device)
    _of_offsets[(count,)](offsets, table, tasks, GROUPS=count, HEIGHT=tiles.rows, BY_ROW=by_row, num_warps=4)
    return Groups(offsets, table, tiles)


@triton.jit(do_not_specialize=["rows", "tasks"])
def _sort(
    chosen, order, offsets, table, rows, tasks, GROUPS: tl.constexpr, HEIGHT: tl.constexpr, BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a group: how many choices are of groups before it, and its own in their order."""
    group, lane = tl.program_id(0), tl.arange(0, BLOCK)
    before, mine = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for at in range(0, rows, BLOCK):
        each = tl.load(chosen + at + lane, at + lane < rows, GROUPS)
        before += (each < group).to(tl.int32)
        mine += (each == group).to(tl.int32)
    begin, count = tl.sum(before, 0), tl.sum(mine, 0)
    tl.store(offsets + group, begin.to(tl.int64))
    if group == GROUPS - 1:
        tl.store(offsets + GROUPS, (begin + count).to(tl.int64))
    _fill(table, group, begin, count, tasks, GROUPS, HEIGHT, BY_ROW)
    done = begin
    for at in range(0, rows, BLOCK):
        hit = (tl.load(chosen + at + lane, at + lane < rows, GROUPS) == group).to(tl.int32)
        rank = tl.cumsum(hit, 0)
        tl.store(order + done + rank - 1, at + lane, hit != 0)
        done += tl.sum(hit, 0)


def sorted_by_group(chosen: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Groups]:
    """The places of `chosen` [R] int64 by what stands there, stably: ([R] int32, the groups). No host looks at them."""
    rows = len(chosen)
    tiles = tiles_for(rows, count, dtype)
    tasks, by_row = _tasks(rows, count, tiles.rows)
    order = torch.empty(rows, dtype=torch.int32, device=chosen.device)
    offsets = torch.empty(count + 1, dtype=torch.int64, device=chosen.device)
    table = torch.empty(tasks, 2, dtype=torch.int32, device=chosen.device)
    _sort[(count,)](
        chosen.contiguous(), order, offsets, table, rows, tasks, GROUPS=count, HEIGHT=tiles.rows, BY_ROW=by_row,
        BLOCK=min(SORTED, power_of_two(rows, 128)), num_warps=4,
    )  # fmt: skip
    return order, Groups(offsets, table, tiles)


@triton.jit
def _sums(
    x_at, w_at, k, width, w_column, sums, WIDTH: tl.constexpr, SWAPPED: tl.constexpr, BY_ROW: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    for begin in range(0, width, WIDTH):
        if WHOLE:
            xs, ws = tl.load(x_at), tl.load(w_at)
        elif BY_ROW:
            inside = (k < width - begin)[None, :]
            xs, ws = tl.load(x_at, inside, 0.0), tl.load(w_at, inside, 0.0)
        else:
            inside = k < width - begin
            xs, ws = tl.load(x_at, inside[None, :], 0.0), tl.load(w_at, inside[:, None], 0.0)
        if BY_ROW:  # ws is [outputs, k]
            if SWAPPED:
                sums = tl.dot(ws, xs.T, sums, input_precision="ieee")
            else:
                sums = tl.dot(xs, ws.T, sums, input_precision="ieee")
        elif SWAPPED:
            sums = tl.dot(ws.T, xs.T, sums, input_precision="ieee")
        else:
            sums = tl.dot(xs, ws, sums, input_precision="ieee")
        x_at += WIDTH
        w_at += WIDTH * w_column
    return sums


@triton.jit(do_not_specialize=["tasks", "copies"])
def _product(
    x, weight, out, order, offsets, table, tasks, outputs, width, w_group, w_row, w_column, copies,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, SWAPPED: tl.constexpr, BY_ROW: tl.constexpr,
    WHOLE: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, ACTIVATE: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """`ACTIVATE`: the weights are gates over ups, and silu(gate) * up of the rounded sums is what comes out."""
    output_tiles = tl.cdiv(outputs, OUTPUTS)
    task, band = tl.program_id(0), BAND * output_tiles
    first = task // band * BAND
    height = min(tasks - first, BAND)
    tile, column = first + task % band % height, task % band // height * OUTPUTS
    group = tl.load(table + tile * 2)
    if group >= 0:
        row = tl.load(table + tile * 2 + 1) + tl.arange(0, ROWS)
        valid = row < tl.load(offsets + group + 1)
        place = row
        if GATHER or SCATTER:
            place = tl.load(order + row, valid, 0)
        source = tl.where(valid, place // copies if GATHER else row, 0).to(tl.int64)
        output, k = column + tl.arange(0, OUTPUTS), tl.arange(0, WIDTH)
        known = (output % outputs).to(tl.int64)
        x_at = x + source[:, None] * width + k[None, :]
        mine = weight + group.to(tl.int64) * w_group
        if BY_ROW:
            w_at = mine + known[:, None] * w_row + k[None, :] * w_column
        else:
            w_at = mine + k[:, None] * w_column + known[None, :] * w_row
        if SWAPPED:
            empty = tl.zeros((OUTPUTS, ROWS), tl.float32)
        else:
            empty = tl.zeros((ROWS, OUTPUTS), tl.float32)
        kind = out.dtype.element_ty
        sums = _sums(x_at, w_at, k, width, w_column, empty, WIDTH, SWAPPED, BY_ROW, WHOLE)
        if ACTIVATE:
            ups = _sums(x_at, w_at + outputs * w_row, k, width, w_column, empty, WIDTH, SWAPPED, BY_ROW, WHOLE)
            gate, up = sums.to(kind).to(tl.float32), ups.to(kind).to(tl.float32)
            sums = gate / (1.0 + tl.exp(-gate)) * up
        if SWAPPED:
            sums = sums.T
        to = (place if SCATTER else row).to(tl.int64)
        tl.store(
            out + to[:, None] * outputs + output[None, :], sums.to(kind), valid[:, None] & (output < outputs)[None, :]
        )


def product(
    x: Tensor, weight: Tensor, groups: Groups, rows: int, *, by_row: bool = True, order: Tensor | None = None,
    gather: int = 0, scatter: bool = False, activate: bool = False,
) -> Tensor:  # fmt: skip
    """Each group's rows times each row of its matrix, or each column where not by_row.

    x [R, K], weight [G, N, K] (else [G, K, N]) -> [R, N]. With `gather`, row i is x[order[i] // gather]; with `scatter`
    it goes to order[i]. With `activate`, N is 2F, gates over ups, and silu(gate) * up comes out: [R, F].
    """
    x, outputs = aligned(x), weight.shape[1 if by_row else 2] // (2 if activate else 1)
    out, width, tiles = x.new_empty(rows, outputs), x.shape[1], groups.tiles
    if out.numel() == 0:
        return out
    w_row, w_column = weight.stride()[1:] if by_row else weight.stride()[:0:-1]
    if min(w_row, w_column) != 1 or weight.data_ptr() % 16:
        weight = weight.contiguous()
        w_row, w_column = weight.stride()[1:] if by_row else weight.stride()[:0:-1]
    grid = (len(groups.table) * triton.cdiv(outputs, tiles.outputs),)
    _product[grid](
        x, weight, out, groups.table if order is None else order, groups.offsets, groups.table, len(groups.table),
        outputs, width, weight.stride(0), w_row, w_column, max(gather, 1), ROWS=tiles.rows, OUTPUTS=tiles.outputs,
        WIDTH=tiles.width, SWAPPED=tiles.swapped, BY_ROW=by_row, WHOLE=width % tiles.width == 0, GATHER=gather > 0,
        SCATTER=scatter, ACTIVATE=activate, BAND=BAND, num_warps=tiles.warps, num_stages=tiles.stages,
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
        grid = (triton.cdiv(outputs, tile) * triton.cdiv(columns, tile), count)
        _weight_gradient[grid](
            left, right, out, offsets if order is None else order, offsets, outputs, columns, max(1, gather_right),
            OUTPUTS=tile, COLUMNS=tile, ROWS=depth, GATHER_LEFT=gather_left, GATHER_RIGHT=gather_right > 0,
            num_warps=warps, num_stages=3 if half else 2,
        )  # fmt: skip
    return out
