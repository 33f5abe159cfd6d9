"""Sums of products of bfloat16 numbers, by blocks of 32 terms: the arithmetic of Intel's matrix unit (AMX).

A block's 16 terms at even places are one chain of fused multiply-adds from +0, the 16 at odd places another; both
results are added, and that sum to the sum so far. Numbers below the least normal one are 0, as inputs and as results.
Terms that a last block lacks count as 0. A processor with the unit makes whole tiles of such sums (`amx`); `add_blocks`
makes the same bits with vectors.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from rlloop.numerics.kernels.cpu.compiled.amx import HAS_AMX
from rlloop.numerics.kernels.cpu.compiled.jit import flat, kernel, stay_apart, threads_for
from rlloop.numerics.kernels.cpu.compiled.simd import LANES, intrinsic
from rlloop.numerics.kernels.cpu.compiled.tiles import WIDE, emit_data, emit_number, emit_products, emit_vector_at

BLOCK = 32  # terms
X86 = platform.machine() in ("x86_64", "AMD64")
_BYTE, _INT, _LONG = (ir.IntType(bits) for bits in (8, 32, 64))
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)

# How the terms of a segment are summed: one chain; by blocks, with vectors; or by blocks, with AMX.
CHAIN, BLOCKS, AMX = np.int64(0), np.int64(1), np.int64(2)


def kind_of(rows: Tensor, weight: Tensor, width: int = 0) -> np.int64:
    """The kind of sum for products of rows and a weight. AMX needs an even `width`, since terms lie in pairs."""
    if rows.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return CHAIN
    return AMX if HAS_AMX and width % 2 == 0 else BLOCKS


def flat_rows(rows: Tensor, kind: np.int64) -> np.ndarray:
    """Rows as kernels read them: float32 numbers, or pairs of bfloat16 for AMX."""
    if kind != AMX:
        return flat(rows.float().contiguous())
    rows = rows.contiguous()
    return flat(rows if rows.data_ptr() % 4 == 0 else rows.clone()).view(np.float32)


def threads_of(work: int, weights: int, kind: np.int64) -> int:
    """The number of threads for so many multiply-adds by so many weights. AMX makes them so fast that another thread
    pays only for 64 times as many, counting the packing of the weights as 16 rows more."""
    return threads_for((work + 16 * weights) // 64 if kind == AMX else work)


@intrinsic
def flush_subnormals(typing, flush):
    """Treat numbers below the least normal one as 0 in this thread, or stop doing so (FTZ and DAZ of x86's MXCSR)."""

    def generate(context, builder, signature, args):
        if X86:  # elsewhere they stay what they are, which only sums that small can show
            mxcsr = cgutils.alloca_once(builder, _INT)
            address = builder.bitcast(mxcsr, _BYTE.as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [address.type])
            read, write = (
                cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}")
                for name in ("stmxcsr", "ldmxcsr")
            )
            builder.call(read, [address])
            both = ir.Constant(_INT, 0x8040)
            set_, unset = builder.or_(builder.load(mxcsr), both), builder.and_(builder.load(mxcsr), builder.not_(both))
            builder.store(builder.select(args[0], set_, unset), mxcsr)
            builder.call(write, [address])
        return context.get_dummy_value()

    return types.void(types.boolean), generate


def block_sums(num_rows: int, num_tiles: int) -> Any:
    """`tiles.chains` by blocks: a function for kernels that adds `depth` products to each of num_rows x (16 *
    num_tiles) sums. The first of them begins a block."""

    @intrinsic
    def add_block_sums(
        typing, lanes, lanes_at, lanes_stride, rows, rows_at, rows_stride, depth, sums, sums_at, sums_stride, fresh
    ):
        signature = types.void(
            lanes, *[types.intp] * 2, rows, *[types.intp] * 3, sums, *[types.intp] * 2, types.boolean
        )

        def generate(context, builder, signature, args):
            lanes, rows, sums = (emit_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 7))
            _, lanes_at, lanes_stride, _, rows_at, rows_stride, depth, _, sums_at, sums_stride, fresh = args
            starts = [
                builder.gep(rows, [builder.add(rows_at, builder.mul(rows_stride, emit_number(r)))])
                for r in range(num_rows)
            ]
            addresses = [
                emit_vector_at(
                    builder,
                    sums,
                    builder.add(sums_at, builder.add(builder.mul(sums_stride, emit_number(r)), emit_number(t * LANES))),
                )
                for r in range(num_rows)
                for t in range(num_tiles)
            ]

            def chains(first: Any, end: Any) -> list[Any]:
                """Sums of every second term from `first` up to `end`."""
                before = builder.block
                loop, body, done = (builder.append_basic_block(name) for name in ("terms", "term", "summed"))
                builder.branch(loop)
                builder.position_at_end(loop)
                k, totals = builder.phi(_LONG), [builder.phi(_VECTOR) for _ in addresses]
                k.add_incoming(first, before)
                for total in totals:
                    total.add_incoming(_ZERO, before)
                builder.cbranch(builder.icmp_signed("<", k, end), body, done)
                builder.position_at_end(body)
                at = builder.add(lanes_at, builder.mul(k, lanes_stride))
                emit_products(builder, lanes, at, [builder.gep(start, [k]) for start in starts], totals)
                k.add_incoming(builder.add(k, emit_number(2)), body)
                builder.branch(loop)
                builder.position_at_end(done)
                return totals

            with builder.if_then(fresh):
                for address in addresses:
                    builder.store(_ZERO, address, align=4)
            with cgutils.for_range_slice(builder, emit_number(0), depth, emit_number(BLOCK), _LONG) as (begin, _):
                end = builder.add(begin, emit_number(BLOCK))
                end = builder.select(builder.icmp_signed("<", end, depth), end, depth)
                even, odd = chains(begin, end), chains(builder.add(begin, emit_number(1)), end)
                for address, one, other in zip(addresses, even, odd, strict=True):
                    builder.store(
                        builder.fadd(builder.load(address, align=4), builder.fadd(one, other)), address, align=4
                    )
            return context.get_dummy_value()

        return signature, generate

    return add_block_sums


_six, _five, _four, _three, _two, _one = (block_sums(rows, 1) for rows in (6, 5, 4, 3, 2, 1))
_one_by_four, _six_by_four = block_sums(1, 4), block_sums(6, 4)


@kernel
def add_blocks(lanes, tiles, rows, rows_at, rows_stride, num_rows, depth, sums, sums_at, fresh):
    """sums [num_rows, 16 * tiles], from `sums_at` on, plus `depth` products of rows and lanes [depth, 16 * tiles].

    All are float32, and the first term begins a block.
    """
    stay_apart()
    flush_subnormals(True)
    stride, tile = tiles * LANES, 0
    while num_rows == 1 and tiles - tile >= 4:
        _one_by_four(
            lanes, tile * LANES, stride, rows, rows_at, rows_stride, depth, sums, sums_at + tile * LANES, stride, fresh
        )
        tile += 4
    while tile < tiles:
        at, to, first, left = tile * LANES, sums_at + tile * LANES, rows_at, num_rows
        together = WIDE if num_rows >= 6 and tiles - tile >= WIDE else 1
        while left >= 6:
            if together > 1:
                _six_by_four(lanes, at, stride, rows, first, rows_stride, depth, sums, to, stride, fresh)
            else:
                _six(lanes, at, stride, rows, first, rows_stride, depth, sums, to, stride, fresh)
            left, first, to = left - 6, first + 6 * rows_stride, to + 6 * stride
        for _ in range(together):
            if left == 5:
                _five(lanes, at, stride, rows, first, rows_stride, depth, sums, to, stride, fresh)
            elif left == 4:
                _four(lanes, at, stride, rows, first, rows_stride, depth, sums, to, stride, fresh)
            elif left == 3:
                _three(lanes, at, stride, rows, first, rows_stride, depth, sums, to, stride, fresh)
            elif left == 2:
                _two(lanes, at, stride, rows, first, rows_stride, depth, sums, to, stride, fresh)
            elif left == 1:
                _one(lanes, at, stride, rows, first, rows_stride, depth, sums, to, stride, fresh)
            at, to = at + LANES, to + LANES
        tile += together
    flush_subnormals(False)
