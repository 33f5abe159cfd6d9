"""Rows by group, cut into tiles: found on the device, so that no host waits for how many rows a group has."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.launch import cdiv, hopper, power_of_two

FEW = 2048  # choices that a program of each group looks at; more are counted first, in parts
PARTS = 32


class Tiles(NamedTuple):
    outputs: int
    width: int  # of K at a time
    warps: int
    stages: int


class Height(NamedTuple):
    """Tile shape for up to `most` rows a group on average."""

    most: float | None
    rows: int
    plain: Tiles
    pairs: Tiles  # an output is a gate and an up


EACH = Height(0, 16, Tiles(64, 128, 4, 4), Tiles(64, 128, 4, 4))  # one row a tile, of 16-bit numbers
HALF = (  # of 16-bit numbers; measured on an H200
    Height(0.5, 16, Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3)),
    Height(8, 16, Tiles(64, 128, 4, 4), Tiles(64, 128, 4, 4)),
    Height(24, 32, Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3)),
    Height(96, 64, Tiles(128, 64, 4, 4), Tiles(128, 64, 8, 4)),
    Height(None, 128, Tiles(256, 64, 8, 4), Tiles(128, 64, 8, 4)),
)
FLOAT32 = (
    Height(16, 16, Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2)),
    Height(None, 64, Tiles(64, 16, 4, 2), Tiles(32, 16, 4, 2)),
)


class Groups(NamedTuple):
    """Rows by group, cut into tiles of `height.rows`."""

    offsets: Tensor  # [G + 1] int64
    table: Tensor  # [tasks, 2] int32: a tile's group (−1: there is no tile) and its first row
    height: Height
    each: bool = False  # a tile is one row, and the table [rows] says its group


def height_for(rows: int, groups: int, dtype: torch.dtype) -> Height:
    table = FLOAT32 if dtype == torch.float32 else HALF
    return next(each for each in table if each.most is None or rows <= each.most * groups)


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
    height = height_for(rows, count, dtype)
    tasks, by_row = _tasks(rows, count, height.rows)
    table = torch.empty(tasks, 2, dtype=torch.int32, device=offsets.device)
    _of_offsets[(count,)](offsets, table, tasks, GROUPS=count, HEIGHT=height.rows, BY_ROW=by_row, num_warps=4)
    return Groups(offsets, table, height)


def each_its_own(chosen: Tensor, dtype: torch.dtype) -> Groups:
    """A tile a choice, [R] int64: for so few that a sort would take longer than a second look at a group's weights."""
    return Groups(chosen, chosen.contiguous(), FLOAT32[0] if dtype == torch.float32 else EACH, each=True)


@triton.jit(do_not_specialize=["rows", "tasks"])
def _sort(
    chosen, order, offsets, table, rows, tasks, GROUPS: tl.constexpr, HEIGHT: tl.constexpr, BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program a group: how many choices are of groups before it, and its own in their order."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    group, lane = tl.program_id(0), tl.arange(0, BLOCK)
    each = tl.load(chosen + lane, lane < rows, GROUPS)
    hit = (each == group).to(tl.int32)
    begin, count = tl.sum((each < group).to(tl.int32), 0), tl.sum(hit, 0)
    tl.store(offsets + group, begin.to(tl.int64))
    if group == GROUPS - 1:
        tl.store(offsets + GROUPS, (begin + count).to(tl.int64))
    _fill(table, group, begin, count, tasks, GROUPS, HEIGHT, BY_ROW)
    tl.store(order + begin + tl.cumsum(hit, 0) - 1, lane, hit != 0)


@triton.jit(do_not_specialize=["rows", "span"])
def _count(chosen, counts, rows, span, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A program `span` choices: how many of each group there are."""
    begin, lane = tl.program_id(0) * span, tl.arange(0, BLOCK)
    histogram = tl.zeros((WIDE,), tl.int32)
    for at in range(begin, min(begin + span, rows), BLOCK):
        inside = at + lane < rows
        each = tl.load(chosen + at + lane, inside, 0).to(tl.int32)
        histogram += tl.histogram(each, WIDE, inside & (each < WIDE))
    tl.store(counts + tl.program_id(0) * WIDE + tl.arange(0, WIDE), histogram)


@triton.jit(do_not_specialize=["rows", "tasks", "span"])
def _place(
    chosen, counts, order, offsets, table, rows, tasks, span, GROUPS: tl.constexpr, WIDE: tl.constexpr,
    HEIGHT: tl.constexpr, BY_ROW: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program a group and `span` choices: the group's own among them, in their order."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    group, part = tl.program_id(0), tl.program_id(1)
    each_group, each_part, lane = tl.arange(0, WIDE)[None, :], tl.arange(0, PARTS)[:, None], tl.arange(0, BLOCK)
    part_counts = tl.load(counts + each_part * WIDE + each_group, each_part < tl.num_programs(1), 0)
    begin = tl.sum(tl.sum(tl.where(each_group < group, part_counts, 0), 1), 0)
    mine = tl.sum(tl.where(each_group == group, part_counts, 0), 1)
    count = tl.sum(mine, 0)
    if part == 0:
        tl.store(offsets + group, begin.to(tl.int64))
        if group == GROUPS - 1:
            tl.store(offsets + GROUPS, (begin + count).to(tl.int64))
        _fill(table, group, begin, count, tasks, GROUPS, HEIGHT, BY_ROW)
    done = begin + tl.sum(tl.where(tl.arange(0, PARTS) < part, mine, 0), 0)
    for at in range(part * span, min((part + 1) * span, rows), BLOCK):
        hit = (tl.load(chosen + at + lane, at + lane < rows, GROUPS) == group).to(tl.int32)
        tl.store(order + done + tl.cumsum(hit, 0) - 1, at + lane, hit != 0)
        done += tl.sum(hit, 0)


def sorted_by_group(chosen: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Groups]:
    """The places of `chosen` [R] int64 by what stands there, stably: ([R] int32, the groups). No host looks at them.

    Where `count` stands there, the place is in no group, and the order's end is not filled.
    """
    rows, early, chosen = len(chosen), hopper(chosen.device), chosen.contiguous()
    height = height_for(rows, count, dtype)
    tasks, by_row = _tasks(rows, count, height.rows)
    order = torch.empty(rows, dtype=torch.int32, device=chosen.device)
    offsets = torch.empty(count + 1, dtype=torch.int64, device=chosen.device)
    table = torch.empty(tasks, 2, dtype=torch.int32, device=chosen.device)
    if rows <= FEW:
        _sort[(count,)](
            chosen, order, offsets, table, rows, tasks, GROUPS=count, HEIGHT=height.rows, BY_ROW=by_row,
            BLOCK=power_of_two(rows, 128), EARLY=early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    else:
        blocks, wide = cdiv(rows, FEW), power_of_two(count)
        span = cdiv(blocks, PARTS) * FEW
        parts = cdiv(rows, span)
        counts = torch.empty(parts, wide, dtype=torch.int32, device=chosen.device)
        _count[(parts,)](chosen, counts, rows, span, WIDE=wide, BLOCK=FEW, num_warps=4)
        _place[(count, parts)](
            chosen, counts, order, offsets, table, rows, tasks, span, GROUPS=count, WIDE=wide, HEIGHT=height.rows,
            BY_ROW=by_row, BLOCK=FEW, PARTS=PARTS, EARLY=early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return order, Groups(offsets, table, height)
