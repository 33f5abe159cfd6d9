"""Few rows with adapters of their own, times several weights of one input: three launches, or four of a gated pair.

One makes z for all of the weights, then come the plain sums in float32, and one more continues them and is done.
Rows are sorted by adapter once a forward, so a tile has one adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, power_of_two
from rlloop.numerics.kernels.triton.linear import product
from rlloop.numerics.kernels.triton.multi_linear import qkv_linear
from rlloop.numerics.kernels.triton.sorting import Groups
from rlloop.numerics.layout import Factors

WIDTH, OUTPUTS, TERMS = 128, 64, 16


@triton.jit(do_not_specialize=["tasks", "rows"])
def _reduce(
    x, first, second, third, z, order, offsets, table, tasks, rows, width, rank, ROWS: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """z [weights, T, rank]: a tile's rows of x times one weight's A of their slot."""
    tile, index = tl.program_id(0) % tasks, tl.program_id(0) // tasks
    slot, begin = tl.load(table + tile * 2), tl.load(table + tile * 2 + 1)
    if slot >= 0:
        if index == 0:
            down = first
        elif index == 1:
            down = second
        else:
            down = third
        row = begin + tl.arange(0, ROWS)
        valid = row < tl.load(offsets + slot + 1)
        row = tl.load(order + row, valid, 0).to(tl.int64)
        output, k = tl.arange(0, RANK), tl.arange(0, WIDTH)
        x_at = x + row[:, None] * width + k[None, :]
        down_at = tl.multiple_of(down, 16) + (slot.to(tl.int64) * rank + output % rank)[:, None] * width + k[None, :]
        sums = tl.zeros((ROWS, RANK), tl.float32)
        for at in range(0, width, WIDTH):
            if WHOLE:
                xs, ws = tl.load(x_at, valid[:, None], 0.0), tl.load(down_at)
            else:
                inside = (k < width - at)[None, :]
                xs, ws = tl.load(x_at, valid[:, None] & inside, 0.0), tl.load(down_at, inside, 0.0)
            sums = tl.dot(xs, ws.T, sums, input_precision="ieee")
            x_at += WIDTH
            down_at += WIDTH
        to = z + (index * rows + row)[:, None] * rank + output[None, :]
        tl.store(to, sums.to(z.dtype.element_ty), valid[:, None] & (output < rank)[None, :])


@triton.jit
def _continued(sums, at, inside, z, row, valid, up, ranks, slot, output, outputs, rank, TERMS: tl.constexpr):
    total = tl.load(sums + at, inside, 0.0)
    matrix = tl.multiple_of(up, 16) + slot.to(tl.int64) * outputs * rank
    for begin in range(0, tl.load(ranks + slot).to(tl.int32), TERMS):
        k = begin + tl.arange(0, TERMS)
        zs = tl.load(z + row[:, None] * rank + k[None, :], valid[:, None] & (k < rank)[None, :], 0.0)
        us = tl.load(
            matrix + output.to(tl.int64)[None, :] * rank + k[:, None],
            (output < outputs)[None, :] & (k < rank)[:, None], 0.0,
        )  # fmt: skip
        total = tl.dot(zs, us, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tasks", "rows"])
def _continue(
    first, second, third, z, first_up, second_up, third_up, first_ranks, second_ranks, third_ranks, out, second_out,
    third_out, order, offsets, table, tasks, rows, rank, FIRST: tl.constexpr, SECOND: tl.constexpr,
    THIRD: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """A tile's rows, OUTPUTS outputs of one of the weights; `GATED`: of both, rounded as they would be in between."""
    tile, part = tl.program_id(0) % tasks, tl.program_id(0) // tasks
    slot, begin = tl.load(table + tile * 2), tl.load(table + tile * 2 + 1)
    FIRST_PARTS: tl.constexpr = (FIRST + OUTPUTS - 1) // OUTPUTS
    SECOND_PARTS: tl.constexpr = (SECOND + OUTPUTS - 1) // OUTPUTS
    if slot >= 0:
        row = begin + tl.arange(0, ROWS)
        valid = row < tl.load(offsets + slot + 1)
        row = tl.load(order + row, valid, 0).to(tl.int64)
        sums, up, ranks, to, outputs, index = first, first_up, first_ranks, out, FIRST, 0
        if not GATED:
            if part >= FIRST_PARTS + SECOND_PARTS:
                sums, up, ranks, to, outputs, index = third, third_up, third_ranks, third_out, THIRD, 2
                part -= FIRST_PARTS + SECOND_PARTS
            elif part >= FIRST_PARTS:
                sums, up, ranks, to, outputs, index = second, second_up, second_ranks, second_out, SECOND, 1
                part -= FIRST_PARTS
        output = part * OUTPUTS + tl.arange(0, OUTPUTS)
        at, inside = row[:, None] * outputs + output[None, :], valid[:, None] & (output < outputs)[None, :]
        kind = out.dtype.element_ty
        total = _continued(
            sums, at, inside, z + index * rows * rank, row, valid, up, ranks, slot, output, outputs, rank, TERMS
        )
        if GATED:
            other = _continued(
                second, at, inside, z + rows * rank, row, valid, second_up, second_ranks, slot, output, outputs, rank,
                TERMS,
            )  # fmt: skip
            gate, other = total.to(kind).to(tl.float32), other.to(kind).to(tl.float32)
            total = gate / (1.0 + tl.exp(-gate)) * other
        tl.store(to + at, total.to(kind), inside)


def several_adapters(
    x: Tensor, weights: Sequence[Tensor], factors: Sequence[Factors], order: Tensor, groups: Groups, gated: bool
) -> tuple[Tensor, ...]:
    """x [T, K] times two or three weights [N, K] -> [T, N] each, or [T, F] if `gated`; factors of one rank. `order`
    and `groups`: the rows by slot."""
    x, (rows, width) = aligned(x), x.shape
    rank, tasks = factors[0].down.shape[1], len(groups.table)
    downs, ups = ([aligned(getattr(each, name)) for each in factors] for name in ("down", "up"))
    ranks, sizes = [each.ranks for each in factors], [len(each) for each in weights]
    z = x.new_empty(len(weights), rows, rank)
    _reduce[(tasks * len(weights),)](
        x, *(downs * 2)[:3], z, order, groups.offsets, groups.table, tasks, rows, width, rank, ROWS=groups.height.rows,
        RANK=power_of_two(rank, 16), WIDTH=WIDTH, WHOLE=width % WIDTH == 0, num_warps=4, num_stages=4,
    )  # fmt: skip
    if gated:
        sums, outs = [product(x, weight, None, torch.float32) for weight in weights], [x.new_empty(rows, sizes[0])]
        parts = cdiv(sizes[0], OUTPUTS)
    else:
        one, other, last = weights
        sums, outs = list(qkv_linear(x, one, other, last, torch.float32)), [x.new_empty(rows, n) for n in sizes]
        parts = sum(cdiv(n, OUTPUTS) for n in sizes)
    _continue[(tasks * parts,)](
        *(sums * 2)[:3], z, *(ups * 2)[:3], *(ranks * 2)[:3], *(outs * 3)[:3], order, groups.offsets, groups.table,
        tasks, rows, rank, FIRST=sizes[0], SECOND=sizes[1], THIRD=sizes[-1], GATED=gated, ROWS=groups.height.rows,
        OUTPUTS=OUTPUTS, TERMS=TERMS, num_warps=4, num_stages=1, **EXACT,
    )  # fmt: skip
    return tuple(outs)
