"""Packed weights on CUDA: dequantised whole, or on the fly in products of few rows.

Every weight is bfloat16(float32(q) * float32(scale)), as `rlloop.numerics.packed` has it; then come the chains of
`linear` and `grouped`. Products of few rows wait for what they read of the weights, so int4 codes are unpacked in few
instructions, in the registers that the tensor core reads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton import grouped, linear
from rlloop.numerics.kernels.triton.grouped import activated, rows_of, task_of
from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, generation, hopper
from rlloop.numerics.kernels.triton.sorting import Groups, Tiles, groups_of
from rlloop.numerics.packed import FP8, INT4, MXFP4, NVFP4, PackedWeight

KIND = {INT4: 0, MXFP4: 1, NVFP4: 2, FP8: 3}
WIDTH = 128  # of K, that `dequantised` takes at a time
FEW_ROWS = 64  # a group: with more, a weight is dequantised once for all of them
TILES = {  # of int4 by `sorting.Height.most`; an output with its gate is two
    0: Tiles(64, 128, 4, 6),
    0.5: Tiles(64, 128, 4, 4),
    8: Tiles(64, 128, 4, 4),
    24: Tiles(64, 128, 4, 4),
    96: Tiles(128, 128, 8, 3),
}
OTHERS = Tiles(64, 128, 4, 2)  # of the other formats
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# A byte's two codes, and twice their scale, in pairs of bfloat16. Under 0x4300 a code u reads as 128 + u; less 136 that
# is u - 8, exactly, and the product with the scale is rounded once. By fma, which has pairs wherever bfloat16 is: times
# 1, and plus -0, which leaves a zero its sign. A multiplication moves the high code: the unit of shifts is busier.
UNPACK = tl.constexpr("""{
    .reg .b32 pair, none, one, eight, zero;
    mov.b32 none, 0;
    mov.b32 one, 0x3F803F80;
    mov.b32 eight, 0xC308C308;
    mov.b32 zero, 0x80008000;
    prmt.b32 pair, $2, none, $3;
    mul.lo.u32 pair, pair, 0x1001;
    lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 pair, pair, one, eight;
    fma.rn.bf16x2 pair, pair, $4, zero;
    mov.b32 {$0, $1}, pair;
}""")


@triton.jit
def _int4_tile(
    codes, scales, row, at, width, WHOLE: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """[OUTPUTS, WIDTH] bfloat16 int4 weights from column `at` on; scales are those of two groups, in an int32.

    Each thread unpacks those two codes of a word that it multiplies, so words alone move between threads, and loads of
    at least 4 bytes let the compiler fetch words and scales some steps ahead.
    """
    WORDS: tl.constexpr = WIDTH // 8
    spans = width // 64
    word, span = tl.arange(0, WORDS)[None, :], tl.arange(0, WIDTH // 64)[None, :]
    word_at, span_at = codes + row[:, None] * (spans * 8) + word, scales + row[:, None] * spans + span
    if WHOLE:
        words, twice = tl.load(word_at + at // 8), tl.load(span_at + at // 64)
    else:
        words = tl.load(word_at + at // 8, word < (width - at) // 8, 0)
        twice = tl.load(span_at + at // 64, span < (width - at) // 64, 0)
    twice = tl.join((twice & 0xFFFF) * 0x10001, (twice >> 16 & 0xFFFF) * 0x10001).reshape(OUTPUTS, WIDTH // 32)
    twice = tl.broadcast_to(twice[:, :, None, None], (OUTPUTS, WIDTH // 32, 4, 4)).reshape(OUTPUTS, WORDS, 4)
    words = tl.broadcast_to(words[:, :, None], (OUTPUTS, WORDS, 4))
    byte = tl.broadcast_to(tl.arange(0, 4)[None, None, :], (OUTPUTS, WORDS, 4))
    if INTERPRETED:
        scale, code = (twice << 16).to(tl.float32, bitcast=True), words >> 8 * byte
        even = (((code & 15) - 8).to(tl.float32) * scale).to(tl.bfloat16)
        odd = (((code >> 4 & 15) - 8).to(tl.float32) * scale).to(tl.bfloat16)
    else:
        even, odd = tl.inline_asm_elementwise(
            UNPACK, "=h,=h,r,r,r", [words, 0x4440 + byte, twice], (tl.bfloat16, tl.bfloat16), True, 1
        )
    return tl.join(even, odd).reshape(OUTPUTS, WIDTH)


@triton.jit
def _tile(
    codes, scales, tensor_scale, row, at, width, KIND: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """[OUTPUTS, WIDTH] float32 weights of rows from column `at` on, each rounded to bfloat16; 0 beyond the width."""
    GROUPS: tl.constexpr = WIDTH // GROUP
    row = row[:, None]
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
    row = (output % outputs).to(tl.int64)
    values = _tile(codes, scales, tensor_scale, row, at, width, KIND, EACH, GROUP, OUTPUTS, WIDTH)
    column = at + tl.arange(0, WIDTH)
    inside = (output < outputs)[:, None] & (column < width)[None, :]
    tl.store(out + output.to(tl.int64)[:, None] * width + column[None, :], values.to(out.dtype.element_ty), inside)


def dequantised(weight: PackedWeight) -> Tensor:
    """The weight in its type, [..., N, K], or transposed as it says."""
    packing, codes = weight.packing, weight.codes
    flat, width = codes.numel() // codes.shape[-1], codes.shape[-1] * packing.each
    out = torch.empty(*codes.shape[:-1], width, dtype=weight.dtype, device=codes.device)
    if out.numel():
        _dequantise[(cdiv(flat, 32), cdiv(width, WIDTH))](
            *_parts(weight), out, flat, width, KIND=KIND[packing], EACH=packing.each, GROUP=packing.group, OUTPUTS=32,
            WIDTH=WIDTH, num_warps=4, **EXACT,
        )  # fmt: skip
    return out.mT if weight.transposed else out


def _parts(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    scale = weight.scales if weight.tensor_scale is None else weight.tensor_scale
    return weight.codes, weight.scales, scale


@triton.jit(do_not_specialize=["tasks", "count", "copies"])
def _product(
    x, codes, scales, tensor_scale, out, order, offsets, table, tasks, count, outputs, width, copies,
    KIND: tl.constexpr, PER: tl.constexpr, GROUP: tl.constexpr, FAST: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    PAIRS: tl.constexpr, EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `grouped._product`. `PER`: codes of an element. `FAST`: by `_int4_tile`.

    Weights are the left operand. As the right one of 16 rows they would go through registers, whose layout the compiler
    lets permute K there: another order of the sum.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    STEP: tl.constexpr = OUTPUTS // 2 if PAIRS else OUTPUTS
    tile, column = tl.program_id(0) % tasks, tl.program_id(0) // tasks * STEP
    group, begin = task_of(table, tile, count, EACH)
    if group >= 0:
        row, valid, unsorted_row, source = rows_of(order, offsets, group, begin, copies, ROWS, GATHER, SCATTER, EACH)
        lane, k = tl.arange(0, OUTPUTS), tl.arange(0, WIDTH)
        if PAIRS:
            known, first = (column + lane // 2) % outputs + lane % 2 * outputs, group.to(tl.int64) * (2 * outputs)
        else:
            known, first = (column + lane) % outputs, group.to(tl.int64) * outputs
        known = first + known
        x_at = x + source[:, None] * width + k[None, :]
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for at in range(0, width, WIDTH):  # weights first: their places are known while the rows' are looked up
            if FAST:
                ws = _int4_tile(codes, scales, known, at, width, WHOLE, OUTPUTS, WIDTH)
            else:
                ws = _tile(codes, scales, tensor_scale, known, at, width, KIND, PER, GROUP, OUTPUTS, WIDTH)
            if WHOLE:
                xs = tl.load(x_at, valid[:, None], 0.0)
            else:
                xs = tl.load(x_at, valid[:, None] & (k < width - at)[None, :], 0.0)
            sums = tl.dot(ws.to(xs.dtype), xs.T, sums, input_precision="ieee")
            x_at += WIDTH
        kind = out.dtype.element_ty
        sums = sums.T
        if PAIRS:
            sums = activated(sums.reshape(ROWS, STEP, 2), kind)
        to, output = (unsorted_row if SCATTER else row).to(tl.int64), column + tl.arange(0, STEP)
        tl.store(
            out + to[:, None] * outputs + output[None, :], sums.to(kind), valid[:, None] & (output < outputs)[None, :]
        )


def sums(x: Tensor, weight: Tensor, by_row: bool, offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`grouped.product` by plain or packed weights [G, N, K]; without offsets `linear.product`, by [N, K]."""
    if isinstance(weight, PackedWeight):
        groups = 1 if offsets is None else len(offsets) - 1
        if by_row and _suits(x, weight, len(x), groups):
            if offsets is None:
                offsets = torch.arange(2, device=x.device) * len(x)
            return _multiplied(x, weight, groups_of(offsets, len(x), x.dtype), len(x), dtype=dtype)
        weight = dequantised(weight)
    if offsets is None:
        return linear.product(x, weight, None, dtype)
    return grouped.product(x, weight, groups_of(offsets, len(x), x.dtype), len(x), by_row=by_row, dtype=dtype)


def product(x: Tensor, weight: Tensor, groups: Groups, rows: int, **options: Any) -> Tensor:
    """`grouped.product` by row, of plain or packed weights."""
    if isinstance(weight, PackedWeight):
        if _suits(x, weight, rows, len(weight)):
            return _multiplied(x, weight, groups, rows, **options)
        weight = dequantised(weight)
    return grouped.product(x, weight, groups, rows, **options)


def _in_order(device: torch.device) -> bool:
    """True if codes can be unpacked where they are multiplied. Elsewhere the compiler permutes K of joined operands."""
    return generation(device) in (0, 9, 10)


def _suits(x: Tensor, weight: PackedWeight, rows: int, groups: int) -> bool:
    few = rows <= FEW_ROWS * groups
    return few and x.element_size() == 2 and weight.codes.shape[-1] > 0 and not weight.transposed


def _multiplied(
    x: Tensor, weight: PackedWeight, groups: Groups, rows: int, *, order: Tensor | None = None, gather: int = 0,
    scatter: bool = False, activate: bool = False, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    outputs, width, packing = weight.codes.shape[-2] // (2 if activate else 1), x.shape[1], weight.packing
    out = x.new_empty(rows, outputs, dtype=dtype)
    if out.numel() == 0:
        return out
    codes, scales, tensor_scale = _parts(weight)
    fast = packing is INT4 and width % 64 == 0 and scales.data_ptr() % 4 == 0 and _in_order(x.device)
    if fast:
        scales = scales.view(torch.int32)
    height, early = groups.height.rows, hopper(x.device)
    tiles = TILES[groups.height.most] if fast else OTHERS
    tasks, step = len(groups.table), tiles.outputs // (2 if activate else 1)
    _product[(tasks * cdiv(outputs, step),)](
        aligned(x), codes, scales, tensor_scale, out, groups.table if order is None else order, groups.offsets,
        groups.table, tasks, weight.codes.shape[0] if groups.each else 0, outputs, width, max(gather, 1),
        KIND=KIND[packing], PER=packing.each, GROUP=packing.group, FAST=fast, WHOLE=width % tiles.width == 0,
        ROWS=height, OUTPUTS=tiles.outputs, WIDTH=tiles.width, GATHER=gather > 0, SCATTER=scatter, PAIRS=activate,
        EACH=groups.each, EARLY=early, num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=early, **EXACT,
    )  # fmt: skip
    return out
