"""Operations on 64-bit words and unaligned memory for the compiled coders.

Numba caches kernels by their own file: when one of these changes, touch the files that use it.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from rlloop.numerics.kernels.cpu.compiled.blocks import BLOCK, u8x64
from rlloop.numerics.kernels.cpu.compiled.simd import emit_address, emit_splat, intrinsic

PADDING = 32  # bytes required after an array's content, so that `load` stays inside it
COUNTS = 128  # numbers that `up_to` looks at
_WORD = ir.IntType(64)
_BYTES = ir.VectorType(ir.IntType(8), BLOCK)
_DEPOSITS = bool(llvm.get_host_cpu_features().get("bmi2")) and llvm.get_host_cpu_name() not in ("znver1", "znver2")


@intrinsic
def outside(typing, block, first, last):
    """Mask of a block's elements below `first` or above `last`; the first element is the lowest bit."""

    def generate(context, builder, signature, args):
        first, last = (emit_splat(builder, each, _BYTES) for each in args[1:])
        below, above = builder.icmp_unsigned("<", args[0], first), builder.icmp_unsigned(">", args[0], last)
        return builder.bitcast(builder.or_(below, above), _WORD)

    return types.uint64(u8x64, types.uint8, types.uint8), generate


@intrinsic
def length(typing, value):
    """Bit length of a nonnegative number; 0 for 0."""

    def generate(context, builder, signature, args):
        return builder.sub(ir.Constant(_WORD, 64), builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0)))

    return types.int64(types.int64), generate


@intrinsic
def select(typing, bits, n):
    """Index of the n-th set bit, counted from 0."""

    def generate(context, builder, signature, args):
        bits, n = args
        if _DEPOSITS:
            kind = ir.FunctionType(_WORD, [_WORD, _WORD])
            deposit = builder.module.declare_intrinsic("llvm.x86.bmi.pdep.64", (), kind)
            deposited = builder.call(deposit, [builder.shl(ir.Constant(_WORD, 1), n), bits])
            return builder.cttz(deposited, ir.Constant(ir.IntType(1), 0))
        at: Any = ir.Constant(_WORD, 0)
        for width in (32, 16, 8, 4, 2, 1):
            low = builder.and_(builder.lshr(bits, at), ir.Constant(_WORD, (1 << width) - 1))
            count = builder.ctpop(low)
            above = builder.icmp_signed(">=", n, count)
            n = builder.select(above, builder.sub(n, count), n)
            at = builder.select(above, builder.add(at, ir.Constant(_WORD, width)), at)
        return at

    return types.int64(types.uint64, types.int64), generate


@intrinsic
def up_to(typing, ascending, index, n):
    """The number of those among `COUNTS` ascending int16 numbers, from `index` on, that are at most `n`."""

    def generate(context, builder, signature, args):
        kind = ir.VectorType(ir.IntType(16), BLOCK)
        n, total = emit_splat(builder, builder.trunc(args[2], kind.element), kind), ir.Constant(_WORD, 0)
        for start in range(0, COUNTS, BLOCK):
            at = builder.add(args[1], ir.Constant(_WORD, start))
            numbers = builder.load(emit_address(context, builder, signature.args[0], args[0], at, BLOCK), align=2)
            total = builder.add(total, builder.ctpop(builder.bitcast(builder.icmp_signed("<=", numbers, n), _WORD)))
        return total

    return types.int64(ascending, types.intp, types.int64), generate


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, width: int) -> Any:
    from numba.core import cgutils

    data = cgutils.create_struct_proxy(array_type)(context, builder, value=array).data
    return builder.bitcast(builder.gep(data, [index]), ir.IntType(width).as_pointer())


@intrinsic
def load(typing, content, index):
    """Read eight bytes of a uint8 array from `index` on as a little-endian number."""

    def generate(context, builder, signature, args):
        return builder.load(_address(context, builder, signature.args[0], args[0], args[1], 64), align=1)

    return types.int64(content, types.intp), generate


@intrinsic
def store(typing, content, index, value):
    """Write a number as eight little-endian bytes of a uint8 array from `index` on."""

    def generate(context, builder, signature, args):
        builder.store(args[2], _address(context, builder, signature.args[0], args[0], args[1], 64), align=1)
        return context.get_dummy_value()

    return types.void(content, types.intp, types.int64), generate
