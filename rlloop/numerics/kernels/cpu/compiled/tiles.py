"""The inner loops of every product: sums that stay in registers, and the packing that feeds them.

A tile is sixteen results side by side, one to a lane. `chains(R, T)` makes R rows of T tiles at once. Each result is
one chain of fused multiply-adds over ascending k, whatever R and T are, so they are chosen for speed alone: R * T sums
fill the registers. Arrays are flat and of float32, but for what a packing reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from rlloop.numerics.kernels.cpu.compiled.jit import inlined, kernel, stay_apart, target_features
from rlloop.numerics.kernels.cpu.compiled.simd import (
    LANES,
    emit_load_part,
    emit_splat,
    emit_widen,
    intrinsic,
    load,
    load_part,
    splat,
    store,
    store_part,
)

ZERO = np.float32(0)
_INT = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


def emit_number(value: int) -> ir.Constant:
    return ir.Constant(_INT, value)


def emit_data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return cgutils.create_struct_proxy(kind)(context, builder, value=array).data


def emit_vector_at(builder: Any, data: Any, index: Any, lanes: int = LANES) -> Any:
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(data.type.pointee, lanes).as_pointer())


def emit_products(builder: Any, lanes: Any, at: Any, factors: list[Any], totals: list[Any]) -> None:
    """One term of the chains in `totals`, a phi for each factor (an address) and each vector of lanes from `at` on."""
    kind, tiles = ir.FunctionType(_VECTOR, [_VECTOR] * 3), len(totals) // len(factors)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    vectors = [
        builder.load(emit_vector_at(builder, lanes, builder.add(at, emit_number(t * LANES))), align=4)
        for t in range(tiles)
    ]
    for r, address in enumerate(factors):
        factor = emit_splat(builder, builder.load(address))
        for t, vector in enumerate(vectors):
            total = totals[r * tiles + t]
            total.add_incoming(builder.call(fma, [factor, vector, total]), builder.block)


def chains(num_rows: int, num_tiles: int) -> Any:
    """A function for kernels that adds `depth` products to each of num_rows x (16 * num_tiles) sums.

    sums[sums_at + r * sums_stride + n] += sum over k of rows[rows_at + r * rows_stride + k * rows_step] *
    lanes[lanes_at + k * lanes_stride + n], starting from +0 where `fresh`.
    """

    @intrinsic
    def add_chains(
        typing, lanes, lanes_at, lanes_stride, rows, rows_at, rows_stride, rows_step, depth, sums, sums_at, sums_stride,
        fresh,
    ):  # fmt: skip
        signature = types.void(
            lanes, *[types.intp] * 2, rows, *[types.intp] * 4, sums, *[types.intp] * 2, types.boolean
        )

        def generate(context, builder, signature, args):
            lanes, rows, sums = (emit_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 8))
            _, lanes_at, lanes_stride, _, rows_at, rows_stride, rows_step, depth, _, sums_at, sums_stride, fresh = args

            def offset(base, stride, times, more=0):
                return builder.add(base, builder.add(builder.mul(stride, emit_number(times)), emit_number(more)))

            starts = [builder.gep(rows, [offset(rows_at, rows_stride, r)]) for r in range(num_rows)]
            addresses = [
                emit_vector_at(builder, sums, offset(sums_at, sums_stride, r, t * LANES))
                for r in range(num_rows)
                for t in range(num_tiles)
            ]
            begin, resume, loop, body, done = (
                builder.append_basic_block(name) for name in ("begin", "resume", "loop", "body", "done")
            )
            builder.branch(begin)
            builder.position_at_end(begin)
            builder.cbranch(fresh, loop, resume)
            builder.position_at_end(resume)
            resumed = [builder.load(address, align=4) for address in addresses]
            builder.branch(loop)

            builder.position_at_end(loop)
            k, totals = builder.phi(_INT), [builder.phi(_VECTOR) for _ in addresses]
            k.add_incoming(emit_number(0), begin)
            k.add_incoming(emit_number(0), resume)
            for total, value in zip(totals, resumed, strict=True):
                total.add_incoming(_ZERO, begin)
                total.add_incoming(value, resume)
            builder.cbranch(builder.icmp_signed("<", k, depth), body, done)

            builder.position_at_end(body)
            at, step = builder.add(lanes_at, builder.mul(k, lanes_stride)), builder.mul(k, rows_step)
            emit_products(builder, lanes, at, [builder.gep(start, [step]) for start in starts], totals)
            k.add_incoming(builder.add(k, emit_number(1)), body)
            builder.branch(loop)

            builder.position_at_end(done)
            for address, total in zip(addresses, totals, strict=True):
                builder.store(total, address, align=4)
            return context.get_dummy_value()

        return signature, generate

    return add_chains


# Registers hold the sums of 12 tiles with AVX-512 (one each, of 32), else of 6 (two each of 16; on Arm four of 32).
MAIN = 12 if target_features().get("avx512f") else 6

_main, _six, _five, _four = chains(MAIN, 1), chains(6, 1), chains(5, 1), chains(4, 1)
_three, _two, _one = chains(3, 1), chains(2, 1), chains(1, 1)
_two_by_two, _two_by_four, _one_by_four, _six_by_four = chains(2, 2), chains(2, 4), chains(1, 4), chains(6, 4)
WIDE = 4 if MAIN == 12 else 1  # tiles at once for many rows: 24 sums take fewer loads a product, but 24 registers


@inlined
def add_products(lanes, lanes_at, tiles, rows, rows_at, rows_stride, rows_step, num_rows, depth, sums, sums_at, fresh):
    """`chains` of any shape: lanes [depth, 16 * tiles] and sums [num_rows, 16 * tiles], each from its place on."""
    # Numba would compile a function again for each constant among its arguments.
    _add_products(
        lanes, np.int64(lanes_at), np.int64(tiles), rows, np.int64(rows_at), np.int64(rows_stride), np.int64(rows_step),
        np.int64(num_rows), np.int64(depth), sums, np.int64(sums_at), np.int64(fresh),
    )  # fmt: skip


@kernel
def _add_products(lanes, lanes_at, tiles, rows, rows_at, rows_stride, rows_step, num_rows, depth, sums, sums_at, fresh):
    stay_apart()
    stride, tile, new = tiles * LANES, 0, fresh != 0
    if num_rows == 1:  # one tile's few sums would leave the multipliers idle, so several are made at once
        while tiles - tile >= 4:
            at, to = lanes_at + tile * LANES, sums_at + tile * LANES
            _one_by_four(lanes, at, stride, rows, rows_at, rows_stride, rows_step, depth, sums, to, stride, new)
            tile += 4
    elif num_rows == 2:
        while tiles - tile >= 4:
            at, to = lanes_at + tile * LANES, sums_at + tile * LANES
            _two_by_four(lanes, at, stride, rows, rows_at, rows_stride, rows_step, depth, sums, to, stride, new)
            tile += 4
        while tiles - tile >= 2:
            at, to = lanes_at + tile * LANES, sums_at + tile * LANES
            _two_by_two(lanes, at, stride, rows, rows_at, rows_stride, rows_step, depth, sums, to, stride, new)
            tile += 2
    while tile < tiles:
        at, to, first, left = lanes_at + tile * LANES, sums_at + tile * LANES, rows_at, num_rows
        together = WIDE if num_rows >= 6 and tiles - tile >= WIDE else 1
        if together > 1:
            while left >= 6:
                _six_by_four(lanes, at, stride, rows, first, rows_stride, rows_step, depth, sums, to, stride, new)
                left, first, to = left - 6, first + 6 * rows_stride, to + 6 * stride
        else:
            while left >= MAIN:
                _main(lanes, at, stride, rows, first, rows_stride, rows_step, depth, sums, to, stride, new)
                left, first, to = left - MAIN, first + MAIN * rows_stride, to + MAIN * stride
            if left >= 6:
                _six(lanes, at, stride, rows, first, rows_stride, rows_step, depth, sums, to, stride, new)
                left, first, to = left - 6, first + 6 * rows_stride, to + 6 * stride
        for _ in range(together):
            if left == 5:
                _five(lanes, at, stride, rows, first, rows_stride, rows_step, depth, sums, to, stride, new)
            elif left == 4:
                _four(lanes, at, stride, rows, first, rows_stride, rows_step, depth, sums, to, stride, new)
            elif left == 3:
                _three(lanes, at, stride, rows, first, rows_stride, rows_step, depth, sums, to, stride, new)
            elif left == 2:
                _two(lanes, at, stride, rows, first, rows_stride, rows_step, depth, sums, to, stride, new)
            elif left == 1:
                _one(lanes, at, stride, rows, first, rows_stride, rows_step, depth, sums, to, stride, new)
            at, to = at + LANES, to + LANES
        tile += together


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Eight vectors of eight: ever smaller blocks change places across the diagonal."""
    rows, distance = list(rows), 4
    while distance:
        stay = [i % (2 * distance) < distance for i in range(8)]
        low = [i if stay[i] else i - distance + 8 for i in range(8)]
        high = [i + distance if stay[i] else i + 8 for i in range(8)]
        masks = [ir.Constant(ir.VectorType(ir.IntType(32), 8), mask) for mask in (low, high)]
        for i in range(8):
            if stay[i]:
                pair = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        distance //= 2
    return rows


def _transposer(masked: bool, pairs: bool = False) -> Any:
    @intrinsic
    def transpose(typing, source, starts, first, column, count, target, at, stride):
        """target[at + stride * i + lane] = source[starts[first + lane] + column + i] in float32, for 16 lanes and i.

        Masked: +0 for i from `count` on, and the source is not read there. In `pairs`, two numbers of 16 bits are one
        that is moved as it is: source[starts[first + lane] + 2 * (column + i)] and the one behind it.
        """
        signature = types.void(source, starts, *[types.intp] * 3, target, *[types.intp] * 2)

        def generate(context, builder, signature, args):
            kind = signature.args[0]
            source, starts, target = (emit_data(context, builder, signature.args[i], args[i]) for i in (0, 1, 5))
            _, _, first, column, count, _, at, stride = args

            def numbers(lane, skipped):
                start = builder.load(builder.gep(starts, [builder.add(first, emit_number(lane))]))
                index = builder.add(column, emit_number(skipped))
                index = builder.add(start, builder.mul(index, emit_number(2)) if pairs else index)
                address = emit_vector_at(builder, source, index, 8)
                if pairs:
                    address = builder.bitcast(address, ir.VectorType(ir.FloatType(), 8).as_pointer())
                if masked:
                    left = builder.sub(count, emit_number(skipped))
                    loaded = emit_load_part(builder, address, left)
                else:
                    loaded = builder.load(address, align=2)
                return loaded if pairs else emit_widen(builder, kind, loaded)

            # By blocks of 8 x 8, since their rows fit the registers of AVX2. A cache line of a row is read at one go.
            for lane, skipped in ((0, 0), (0, 8), (8, 0), (8, 8)):
                rows = _transposed(builder, [numbers(lane + i, skipped) for i in range(8)])
                for i, row in enumerate(rows):
                    index = builder.add(at, builder.mul(stride, emit_number(skipped + i)))
                    builder.store(
                        row, emit_vector_at(builder, target, builder.add(index, emit_number(lane)), 8), align=4
                    )
            return context.get_dummy_value()

        return signature, generate

    return transpose


_transpose, _transpose_part = _transposer(False), _transposer(True)
transpose_pairs, transpose_pairs_part = _transposer(False, pairs=True), _transposer(True, pairs=True)


@inlined
def pack_rows(source, starts, first, begin, end, target, at, stride):
    """Sixteen rows into lanes: target[at + stride * (k - begin) + lane] = source[starts[first + lane] + k].

    The target needs room for whole sixteens of k.
    """
    _pack_rows(source, starts, np.int64(first), np.int64(begin), np.int64(end), target, np.int64(at), np.int64(stride))


@kernel
def _pack_rows(source, starts, first, begin, end, target, at, stride):
    stay_apart()
    for column in range(begin, end, LANES):
        if end - column >= LANES:
            _transpose(source, starts, first, column, LANES, target, at, stride)
        else:
            _transpose_part(source, starts, first, column, end - column, target, at, stride)
        at += LANES * stride


@kernel
def pack_columns(source, column, columns, begin, end, target, tiles):
    """Rows begin to end of source [:, columns], from `column` on, as target [end - begin, 16 * tiles]; +0 past the
    last column."""
    at = 0
    for k in range(begin, end):
        for n in range(column, column + tiles * LANES, LANES):
            if columns - n >= LANES:
                store(target, at, load(source, k * columns + n))
            elif n < columns:
                store(target, at, load_part(source, k * columns + n, columns - n))
            else:  # products with whatever lies there would be wasted, and slow where it looks like denormals
                store(target, at, splat(ZERO))
            at += LANES


@kernel
def widen(source, begin, count, target, at):
    """target[at:] = `count` numbers of any kind from `begin` on, in float32, then +0 to a whole sixteen."""
    for i in range(0, count, LANES):
        if count - i >= LANES:
            store(target, at + i, load(source, begin + i))
        else:
            store(target, at + i, load_part(source, begin + i, count - i))


@kernel
def narrow(source, at, count, target, begin):
    """`widen` reversed: rounded once to the target's type, and not past `count`."""
    for i in range(0, count, LANES):
        if count - i >= LANES:
            store(target, begin + i, load(source, at + i))
        else:
            store_part(target, begin + i, count - i, load(source, at + i))
