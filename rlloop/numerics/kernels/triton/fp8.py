"""Products of 8-bit floats on CUDA: `rlloop.numerics.fp8` has the definition.

Each 128 inputs are one float32 sum of the tensor core, from zero, which is multiplied by both scales and added to the
total, in ascending order. Weights are always the left operand, whose 64 rows or more a warp group multiplies, and
tokens the right one, however few there are: every batch has the one instruction, and its bits. Multiplying by powers of
2 is exact, so it does not matter what the compiler joins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.fp8 import BLOCK, Fp8Weight
from rlloop.numerics.kernels.triton.launch import aligned, cdiv
from rlloop.numerics.kernels.triton.sorting import Groups, groups_of, height_for

BAND = 8  # tiles of rows that share what they read of the weights
QUANTISED = 16  # rows of a program


class Tiles(NamedTuple):
    outputs: int
    warps: int
    stages: int


TILES = {16: Tiles(64, 4, 6), 32: Tiles(64, 4, 5), 64: Tiles(128, 4, 4), 128: Tiles(64, 4, 4)}  # by rows of tokens


@triton.jit
def _scale(largest):
    """(scale, its inverse) of a block by its largest magnitude: `fp8.scales_of`."""
    bits = tl.minimum(largest.to(tl.int32, bitcast=True), 0x7F800000)
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 87)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _quantise(x, codes, scales, rows, width, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    values = tl.load(x + at, inside, 0.0).to(tl.float32)
    scale, inverse = _scale(tl.max(tl.abs(values), 1))
    values = values * inverse[:, None]
    values = tl.where(tl.abs(values) <= 448.0, values, float("nan"))
    tl.store(codes + at, values.to(tl.float8e4nv), inside)
    tl.store(scales + row * blocks + block, scale, row < rows)


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    x, (rows, width) = aligned(x), x.shape
    blocks = cdiv(width, BLOCK)
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    if codes.numel():
        _quantise[(cdiv(rows, QUANTISED), blocks)](
            x, codes, scales, rows, width, blocks, ROWS=QUANTISED, BLOCK=BLOCK, num_warps=4
        )
    return codes, scales


@triton.jit
def _dequantise(
    codes, scales, out, rows, width, span, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of all matrices, end to end: whole spans, so a row's block follows from its number."""
    row, block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    of_block = row // span * tl.cdiv(span, BLOCK) + row % span // BLOCK
    scale = tl.load(scales + of_block * blocks + block, row < rows, 0.0)
    values = tl.load(codes + at, inside, 0.0).to(tl.float32) * scale[:, None]
    tl.store(out + at, values.to(out.dtype.element_ty), inside)


def fp8_dequantised(codes: Tensor, scales: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    codes, scales = codes.contiguous(), scales.contiguous()
    out, width = torch.empty(codes.shape, dtype=dtype, device=codes.device), codes.shape[-1]
    if out.numel():
        rows, blocks = codes.numel() // width, cdiv(width, BLOCK)
        _dequantise[(cdiv(rows, 32), blocks)](
            codes, scales, out, rows, width, span, blocks, ROWS=32, BLOCK=BLOCK, num_warps=4
        )
    return out


@triton.jit(do_not_specialize=["rows", "tasks", "copies"])
def _product(
    codes, scales, weight, w_scales, out, order, offsets, table, rows, tasks, outputs, width, span, blocks, copies,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr, WHOLE: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, ONE: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """`ONE`: a tile's weights lie in one block of each 128 inputs."""
    output_tiles = tl.cdiv(outputs, OUTPUTS)
    task, band = tl.program_id(0), BAND * output_tiles
    first = task // band * BAND
    height = min(tasks - first, BAND)
    tile, column = first + task % band % height, task % band // height * OUTPUTS
    if GROUPED:
        group, begin = tl.load(table + tile * 2), tl.load(table + tile * 2 + 1)
    else:
        group, begin = tile * 0, tile * ROWS
    if group >= 0:
        row, output, k = begin + tl.arange(0, ROWS), column + tl.arange(0, OUTPUTS), tl.arange(0, BLOCK)
        if GROUPED:
            valid = row < tl.load(offsets + group + 1)
        else:
            valid = row < rows
        unsorted_row = row
        if GATHER or SCATTER:
            unsorted_row = tl.load(order + row, valid, 0).to(tl.int32)
        source = tl.where(valid, unsorted_row // copies if GATHER else row, 0).to(tl.int64)
        known = group.to(tl.int64) * outputs + output % outputs  # of the rows of all matrices, end to end
        w_at = weight + known[:, None] * width + k[None, :]
        x_at = codes + source[:, None] * width + k[None, :]
        if ONE:
            at = group.to(tl.int64) * outputs + column
        else:
            at = known
        of_w = w_scales + (at // span * tl.cdiv(span, BLOCK) + at % span // BLOCK) * blocks
        of_x = scales + source * blocks
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for block in range(blocks):
            if WHOLE:
                ws, xs = tl.load(w_at), tl.load(x_at, valid[:, None], 0.0)
            else:
                left = (k < width - block * BLOCK)[None, :]
                ws, xs = tl.load(w_at, left, 0.0), tl.load(x_at, valid[:, None] & left, 0.0)
            block_sums = tl.dot(ws, xs.T)
            if ONE:
                sums += block_sums * (tl.load(of_w + block) * tl.load(of_x + block))[None, :]
            else:
                sums += block_sums * (tl.load(of_w + block)[:, None] * tl.load(of_x + block)[None, :])
            w_at += BLOCK
            x_at += BLOCK
        to = out + (unsorted_row if SCATTER else row).to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(to, sums.to(out.dtype.element_ty), (output < outputs)[:, None] & valid[None, :])


def product(
    codes: Tensor, scales: Tensor, weight: Fp8Weight, rows: int, dtype: torch.dtype, groups: Groups | None = None, *,
    order: Tensor | None = None, gather: int = 0, scatter: bool = False,
) -> Tensor:  # fmt: skip
    """Rows of `fp8_rows` times a weight [N, K], or their group's of [G, N, K]; the rest as for `grouped.product`."""
    (outputs, width), blocks = weight.codes.shape[-2:], scales.shape[1]
    out = torch.empty(rows, outputs, dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    height = height_for(rows, 1, torch.bfloat16) if groups is None else groups.height
    tiles, table = TILES[height.rows], codes if groups is None else groups.table
    tasks = cdiv(rows, height.rows) if groups is None else len(groups.table)
    _product[(tasks * cdiv(outputs, tiles.outputs),)](
        codes, scales, weight.codes, weight.scales, out, table if order is None else order,
        table if groups is None else groups.offsets, table, rows, tasks, outputs, width, weight.span, blocks,
        max(gather, 1), ROWS=height.rows, OUTPUTS=tiles.outputs, BLOCK=BLOCK, GROUPED=groups is not None,
        WHOLE=width % BLOCK == 0, GATHER=gather > 0, SCATTER=scatter, ONE=weight.span % tiles.outputs == 0,
        BAND=BAND, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def fp8_product(codes: Tensor, scales: Tensor, weight: Fp8Weight, offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
    groups = None if offsets is None else groups_of(offsets, len(codes), torch.bfloat16)
    return product(codes, scales, weight, len(codes), dtype, groups)
