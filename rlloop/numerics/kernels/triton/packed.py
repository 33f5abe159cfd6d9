"""Packed weights on CUDA: dequantised whole, or on the fly in products of few rows.

Every weight is bfloat16(float32(q) * float32(scale)), as `rlloop.numerics.packed` has it; then come the chains of
`linear` and `grouped`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton import grouped, linear
from rlloop.numerics.kernels.triton.launch import EXACT, aligned
from rlloop.numerics.kernels.triton.sorting import groups_of
from rlloop.numerics.packed import FP8, INT4, MXFP4, NVFP4, PackedWeight

KIND = {INT4: 0, MXFP4: 1, NVFP4: 2, FP8: 3}
ROWS, OUTPUTS, WIDTH = 16, 64, 128  # of a tile of a product
FEW_ROWS = 64  # a group: with more, a weight is dequantised once for all of them


@triton.jit
def _tile(
    codes, scales, tensor_scale, output, at, outputs, width, KIND: tl.constexpr, EACH: tl.constexpr,
    GROUP: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """[OUTPUTS, WIDTH] float32 weights from column `at` on, each rounded to bfloat16; 0 beyond the width."""
    GROUPS: tl.constexpr = WIDTH // GROUP
    row = (output % outputs).to(tl.int64)[:, None]
    stored, groups = width // EACH, tl.cdiv(width, GROUP)
    column = at // EACH + tl.arange(0, WIDTH // EACH)
    here = codes + row * stored + column[None, :]
    if KIND == 3:
        values = tl.load(here, (column < stored)[None, :], 0.0).to(tl.float32)
    else:
        words = tl.load(here, (column < stored)[None, :], 0)
        shifts = 4 * tl.arange(0, EACH)
        nibbles = ((words.to(tl.int32)[:, :, None] >> shifts[None, None, :]) & 15).reshape(OUTPUTS, WIDTH)
        if KIND == 0:
            values = (nibbles - 8).to(tl.float32)
        else:  # a sign, two bits of an exponent, one of a fraction; in quarters
            exponent, fraction = (nibbles >> 1) & 3, nibbles & 1
            quarters = tl.where(exponent == 0, fraction * 2, (2 + fraction) << exponent)
            values = quarters.to(tl.float32) * 0.25
            values = tl.where(nibbles >= 8, -values, values)
    group = at // GROUP + tl.arange(0, GROUPS)
    known = (group < groups)[None, :]
    if KIND == 1:
        exponent = tl.load(scales + row * groups + group[None, :], known, 127).to(tl.int32)
        bits = tl.where(exponent == 0, 0x400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + row * groups + group[None, :], known, 0.0).to(tl.float32)
        if KIND == 2:
            scale = scale * tl.load(tensor_scale + row)
    wide = tl.broadcast_to(scale[:, :, None], (OUTPUTS, GROUPS, GROUP)).reshape(OUTPUTS, WIDTH)
    return (values * wide).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _dequantise(
    codes, scales, tensor_scale, out, outputs, width, KIND: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    output, at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * WIDTH
    values = _tile(codes, scales, tensor_scale, output, at, outputs, width, KIND, EACH, GROUP, OUTPUTS, WIDTH)
    column = at + tl.arange(0, WIDTH)
    inside = (output < outputs)[:, None] & (column < width)[None, :]
    tl.store(out + output.to(tl.int64)[:, None] * width + column[None, :], values.to(out.dtype.element_ty), inside)


def dequantised(weight: PackedWeight) -> Tensor:
    """The weight in its type, [..., N, K], or transposed as it says."""
    packing, codes = weight.packing, weight.codes
    flat, width = codes.numel() // codes.shape[-1], codes.shape[-1] * packing.each
    out = torch.empty(*codes.shape[:-1], width, dtype=weight.dtype, device=codes.device)
    if out.numel():
        _dequantise[(triton.cdiv(flat, 32), triton.cdiv(width, WIDTH))](
            *_parts(weight), out, flat, width, KIND=KIND[packing], EACH=packing.each, GROUP=packing.group, OUTPUTS=32,
            WIDTH=WIDTH, num_warps=4, **EXACT,
        )  # fmt: skip
    return out.mT if weight.transposed else out


def _parts(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    scale = weight.scales if weight.tensor_scale is None else weight.tensor_scale
    return weight.codes, weight.scales, scale


@triton.jit(do_not_specialize=["tasks"])
def _product(
    x, codes, scales, tensor_scale, out, offsets, table, tasks, outputs, width, KIND: tl.constexpr, EACH: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows by group, as `grouped._product`: a tile's group and first row stand in the table.

    Weights are the left operand. As the right one of 16 rows they would go through registers, whose layout the compiler
    lets permute K there: another order of the sum.
    """
    tile, column = tl.program_id(0) % tasks, tl.program_id(0) // tasks * OUTPUTS
    group, begin = tl.load(table + tile * 2), tl.load(table + tile * 2 + 1)
    if group >= 0:
        row, output, k = begin + tl.arange(0, ROWS), column + tl.arange(0, OUTPUTS), tl.arange(0, WIDTH)
        valid = row < tl.load(offsets + group + 1)
        first = group.to(tl.int64) * outputs
        of_codes = codes + first * (width // EACH)
        of_scales = scales + first * tl.cdiv(width, GROUP)
        x_at = x + row.to(tl.int64)[:, None] * width + k[None, :]
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for at in range(0, width, WIDTH):
            xs = tl.load(x_at, valid[:, None] & (k < width - at)[None, :], 0.0)
            ws = _tile(
                of_codes, of_scales, tensor_scale + first, output, at, outputs, width, KIND, EACH, GROUP, OUTPUTS, WIDTH
            )
            sums = tl.dot(ws.to(xs.dtype), xs.T, sums, input_precision="ieee")
            x_at += WIDTH
        to = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
        tl.store(to, sums.T.to(out.dtype.element_ty), valid[:, None] & (output < outputs)[None, :])


def sums(x: Tensor, weight: Tensor, by_row: bool, offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`grouped.product` by plain or packed weights [G, N, K]; without offsets `linear.product`, by [N, K]."""
    if isinstance(weight, PackedWeight):
        if by_row and (output := product(x, weight, offsets, dtype)) is not None:
            return output
        weight = dequantised(weight)
    if offsets is None:
        return linear.product(x, weight, None, dtype)
    return grouped.product(x, weight, groups_of(offsets, len(x), x.dtype), len(x), by_row=by_row, dtype=dtype)


def product(x: Tensor, weight: PackedWeight, offsets: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Rows of x [R, K] times their group's rows, [G, N, K] or, without offsets, [N, K]. None: not for this shape."""
    groups = 1 if offsets is None else len(offsets) - 1
    if weight.transposed or x.element_size() != 2 or len(x) > FEW_ROWS * groups or weight.codes.shape[-1] == 0:
        return None
    (rows, width), outputs, packing = x.shape, weight.codes.shape[-2], weight.packing
    out = x.new_empty(rows, outputs, dtype=dtype)
    if out.numel() == 0:
        return out
    if offsets is None:
        offsets = torch.arange(2, device=x.device) * rows
    tiles = groups_of(offsets, rows, torch.float32)  # 16 rows a tile, or 64
    table, height = tiles.table, tiles.height.rows
    _product[(len(table) * triton.cdiv(outputs, OUTPUTS),)](
        aligned(x), *_parts(weight), out, offsets, table, len(table), outputs, width, KIND=KIND[packing],
        EACH=packing.each, GROUP=packing.group, ROWS=height, OUTPUTS=OUTPUTS, WIDTH=WIDTH, num_warps=4, num_stages=2,
        **EXACT,
    )  # fmt: skip
    return out
