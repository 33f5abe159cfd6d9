"""Blocks of 64 elements as one vector each, so that a comparison of all of them is one number of 64 bits.

LLVM maps the vectors to the CPU's registers (two of AVX2, one of AVX-512, four of NEON).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import register_model

from rlloop.numerics.kernels.cpu.compiled.simd import emit_address, emit_splat, intrinsic

BLOCK = 64  # elements
_BYTES = ir.VectorType(ir.IntType(8), BLOCK)
_WORD = ir.IntType(64)


class U8x64(types.Type):
    def __init__(self) -> None:
        super().__init__(name="u8x64")


u8x64 = U8x64()


@register_model(U8x64)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, front_end_type: Any) -> None:
        super().__init__(manager, front_end_type, _BYTES)


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.load(emit_address(context, builder, array_type, array, index, BLOCK), align=1)


@intrinsic
def classes(typing, patterns, index, mask, shift):
    """(pattern & mask) >> shift of a block of a flat array from `index` on; each fits a byte."""

    def generate(context, builder, signature, args):
        block = _load(context, builder, *signature.args[:1], *args[:2])
        element = block.type.element
        mask, shift = (emit_splat(builder, builder.trunc(each, element), block.type) for each in args[2:])
        shifted = builder.lshr(builder.and_(block, mask), shift)
        return builder.trunc(shifted, _BYTES) if element.width > 8 else shifted

    return u8x64(patterns, types.intp, types.uint32, types.uint32), generate


@intrinsic
def where_equal(typing, block, value):
    """One bit for each element of a block, the first lowest: set where it is `value`."""

    def generate(context, builder, signature, args):
        value = emit_splat(builder, args[1], _BYTES)
        return builder.bitcast(builder.icmp_unsigned("==", args[0], value), _WORD)

    return types.uint64(u8x64, types.uint8), generate


@intrinsic
def where_changed(typing, old, new, index):
    """One bit for each element of a block of two flat arrays from `index` on: set where they differ."""

    def generate(context, builder, signature, args):
        one, other = (_load(context, builder, signature.args[i], args[i], args[2]) for i in range(2))
        return builder.bitcast(builder.icmp_unsigned("!=", one, other), _WORD)

    return types.uint64(old, new, types.intp), generate


@intrinsic
def population(typing, bits):
    """Number of bits that are set."""
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


@intrinsic
def lowest(typing, bits):
    """Index of the lowest bit that is set; `bits` must not be 0."""
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.cttz(
        args[0], ir.Constant(ir.IntType(1), 1)
    )
