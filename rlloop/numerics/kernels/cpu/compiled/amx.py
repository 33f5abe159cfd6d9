"""Intel's Advanced Matrix Extensions (AMX): the sums of `bfloat16`, a tile of 16 x 16 at a time.

Its eight registers are tiles of 16 rows of 64 bytes: 0 to 3 hold sums, 4 and 5 rows, 6 and 7 lanes. Rows are read where
they lie, as pairs of terms; lanes are packed into tiles first. Source: Intel's instruction set reference, TDPBF16PS.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from rlloop.numerics.kernels.cpu.compiled.jit import kernel, stay_apart, target_features
from rlloop.numerics.kernels.cpu.compiled.simd import LANES, emit_load_part, f32x16, intrinsic, store
from rlloop.numerics.kernels.cpu.compiled.tiles import (
    emit_data,
    emit_number,
    emit_vector_at,
    transpose_pairs,
    transpose_pairs_part,
)

PAIRS = 16  # of a block of 32 terms
ROWS = 16  # of a tile
TILE = ROWS * PAIRS  # pairs
_BYTE, _SHORT, _INT, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def _permitted() -> bool:
    """Linux saves the unit's registers only for processes that have asked (`arch_prctl`, ARCH_REQ_XCOMP_PERM)."""
    features = target_features()
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


HAS_AMX = _permitted()


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


@intrinsic
def _configure(typing, form):
    """`form` (uint8 [64]) says how large the tiles are; all become 0."""

    def generate(context, builder, signature, args):
        data = emit_data(context, builder, signature.args[0], args[0])
        _call(builder, "ldtilecfg", builder.bitcast(data, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(form), generate


@intrinsic
def _release(typing):
    """Leaves the unit, so that its registers need not be saved for this thread."""

    def generate(context, builder, signature, args):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def tile_sums(num_rows: int, num_columns: int) -> Any:
    """A function for kernels: num_rows x num_columns tiles of sums plus `blocks` blocks of products.

    rows: float32 [16 * num_rows, stride] of pairs, from `rows_at` on. lanes: tiles of packed pairs, of a block
    `lanes_step` after those of the one before, of a column `lanes_stride`.
    """

    @intrinsic
    def add_tile_sums(
        typing, rows, rows_at, rows_stride, lanes, lanes_at, lanes_stride, lanes_step, blocks, sums, sums_at,
        sums_stride, fresh,
    ):  # fmt: skip
        signature = types.void(
            rows, *[types.intp] * 2, lanes, *[types.intp] * 4, sums, *[types.intp] * 2, types.boolean
        )

        def generate(context, builder, signature, args):
            rows, lanes, sums = (emit_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 8))
            _, rows_at, rows_stride, _, lanes_at, lanes_stride, lanes_step, blocks = args[:8]
            sums_at, sums_stride, fresh = args[9:]

            def register(number: int) -> ir.Constant:
                return ir.Constant(_BYTE, number)

            def address(data: Any, index: Any) -> Any:
                return builder.bitcast(builder.gep(data, [index]), _BYTE.as_pointer())

            def down(at: Any, stride: Any, tiles: int) -> Any:
                return builder.add(at, builder.mul(stride, emit_number(tiles * ROWS)))

            def bytes_of(numbers: Any) -> Any:
                return builder.mul(numbers, emit_number(4))

            totals = [
                (register(2 * r + c), address(sums, builder.add(down(sums_at, sums_stride, r), emit_number(c * ROWS))))
                for r in range(num_rows)
                for c in range(num_columns)
            ]
            with builder.if_else(fresh) as (begin, resume):
                with begin:
                    for tile, _ in totals:
                        _call(builder, "tilezero", tile)
                with resume:
                    for tile, tile_address in totals:
                        _call(builder, "tileloadd64", tile, tile_address, bytes_of(sums_stride))
            with cgutils.for_range(builder, blocks, intp=_LONG) as loop:
                row = builder.add(rows_at, builder.mul(loop.index, emit_number(PAIRS)))
                lane = builder.add(lanes_at, builder.mul(loop.index, lanes_step))
                for r in range(num_rows):
                    tile_address = address(rows, down(row, rows_stride, r))
                    _call(builder, "tileloadd64", register(4 + r), tile_address, bytes_of(rows_stride))
                for c in range(num_columns):
                    tile_address = address(lanes, builder.add(lane, builder.mul(lanes_stride, emit_number(c))))
                    _call(builder, "tileloadd64", register(6 + c), tile_address, emit_number(4 * LANES))
                for r in range(num_rows):
                    for c in range(num_columns):
                        _call(builder, "tdpbf16ps", *map(register, (2 * r + c, 4 + r, 6 + c)))
            for tile, tile_address in totals:
                _call(builder, "tilestored64", tile, tile_address, bytes_of(sums_stride))
            return context.get_dummy_value()

        return signature, generate

    return add_tile_sums


_tiles_2x2, _tiles_2x1, _tiles_1x2, _tiles_1x1 = (tile_sums(*shape) for shape in ((2, 2), (2, 1), (1, 2), (1, 1)))


@intrinsic
def _load_pairs(typing, source, low, high, count):
    """`count` numbers of 16 bits (at most 16) from `low` on, each with one from `high` on as the half above it; +0 in
    the other lanes, whose memory is not touched."""

    def generate(context, builder, signature, args):
        data, wide = emit_data(context, builder, signature.args[0], args[0]), ir.VectorType(_INT, LANES)
        both = []
        for index in args[1:3]:
            address = emit_vector_at(builder, data, index)
            address = builder.bitcast(address, ir.VectorType(_SHORT, LANES).as_pointer())
            both.append(builder.zext(emit_load_part(builder, address, args[3]), wide))
        above = builder.shl(both[1], ir.Constant(wide, [16] * LANES))
        return builder.bitcast(builder.or_(both[0], above), _VECTOR)

    return f32x16(source, *[types.intp] * 3), generate


@kernel
def pack_pairs(lanes, by_row, starts, column, columns, begin, end, target, tiles):
    """Pairs begin to end of 16 * tiles columns from `column` on, as target [blocks, tiles, 16 pairs, 16 columns].

    `lanes` holds numbers of 16 bits: [columns, terms] if by_row, where starts[n] is that of column + n; else [terms,
    columns]. Zeros stand for columns and pairs that there are not.
    """
    stay_apart()
    for first in range(begin, end, PAIRS):
        count = min(PAIRS, end - first)
        for tile in range(tiles):
            at, n = ((first - begin) // PAIRS * tiles + tile) * TILE, column + tile * LANES
            if by_row and count == PAIRS:
                transpose_pairs(lanes, starts, tile * LANES, first, count, target, at, LANES)
            elif by_row:
                transpose_pairs_part(lanes, starts, tile * LANES, first, count, target, at, LANES)
            else:
                for pair in range(count):
                    row = 2 * (first + pair) * columns + n
                    terms = _load_pairs(lanes, row, row + columns, max(0, min(LANES, columns - n)))
                    store(target, at + pair * LANES, terms)


@kernel
def _set_form(form, upper, lower, pairs):
    """Tiles of `upper` and, below them, `lower` rows, in blocks of so many pairs."""
    for tile in range(8):
        lanes, below = tile >= 6, tile in (2, 3, 5)
        form[48 + tile] = pairs if lanes else lower if below else upper
        form[16 + 2 * tile] = 4 * pairs if tile in (4, 5) else 4 * LANES
    _configure(form)


@kernel
def _add_tiles(rows, rows_at, rows_stride, count, lanes, tiles, blocks, pairs, sums, sums_at, sums_stride, fresh, form):
    """Whole blocks of so many pairs for `count` rows and `tiles` tiles of packed lanes."""
    step = tiles * TILE
    for first in range(0, count, 2 * ROWS):
        upper, lower = min(ROWS, count - first), min(ROWS, count - first - ROWS)
        if first == 0 or upper < ROWS or lower < ROWS:
            _set_form(form, upper, max(lower, 1), pairs)
        at, to = rows_at + first * rows_stride, sums_at + first * sums_stride
        for tile in range(0, tiles, 2):
            column, lane = to + tile * LANES, tile * TILE
            if lower > 0 and tiles - tile > 1:
                _tiles_2x2(rows, at, rows_stride, lanes, lane, TILE, step, blocks, sums, column, sums_stride, fresh)
            elif lower > 0:
                _tiles_2x1(rows, at, rows_stride, lanes, lane, TILE, step, blocks, sums, column, sums_stride, fresh)
            elif tiles - tile > 1:
                _tiles_1x2(rows, at, rows_stride, lanes, lane, TILE, step, blocks, sums, column, sums_stride, fresh)
            else:
                _tiles_1x1(rows, at, rows_stride, lanes, lane, TILE, step, blocks, sums, column, sums_stride, fresh)


def _add_pairs(rows, rows_at, rows_stride, count, lanes, tiles, pairs, sums, sums_at, sums_stride, fresh):
    """As `bfloat16.add_blocks`: rows [count, rows_stride] of pairs, lanes as `pack_pairs` leaves them."""
    stay_apart()
    whole, rest, form = pairs // PAIRS, pairs % PAIRS, np.zeros(64, np.uint8)
    form[0] = 1  # the only kind there is; `_set_form` writes the rest
    if whole > 0:
        _add_tiles(
            rows, rows_at, rows_stride, count, lanes, tiles, whole, PAIRS, sums, sums_at, sums_stride, fresh, form
        )
    if rest > 0:  # a block of fewer terms, so that nothing behind a row's end is read
        last = lanes[whole * tiles * TILE :]
        at, new = rows_at + whole * PAIRS, fresh and whole == 0
        _add_tiles(rows, at, rows_stride, count, last, tiles, 1, rest, sums, sums_at, sums_stride, new, form)
    _release()


def _no_amx(rows, rows_at, rows_stride, count, lanes, tiles, pairs, sums, sums_at, sums_stride, fresh):
    """Stands in where the compiler has no such instructions."""
    raise RuntimeError("this processor has no AMX")


add_pairs = kernel(_add_pairs if HAS_AMX else _no_amx)
