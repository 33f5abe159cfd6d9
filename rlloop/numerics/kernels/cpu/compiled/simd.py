"""Sixteen float32 lanes as a numba type, so that kernels fix the order of their sums.

A plain loop leaves the order of a sum to the compiler's vectoriser, and with it the bits. Here the lanes are explicit:
a kernel adds into sixteen of them and ends with `reduce_sum`, whose tree is fixed. LLVM maps the vector to the CPU's
registers (two of AVX2, one of AVX-512, four of NEON), which cannot change a bit: every operation is IEEE per lane, and
`fma` is fused by definition. Arrays are flat and of float32, or of uint16 for bfloat16 bits and int16 for float16 bits:
loading widens, storing rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic as _numba_intrinsic
from numba.extending import register_model

LANES = 16

intrinsic: Any = _numba_intrinsic  # what it makes has another signature than what it decorates

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class F32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = F32x16()


@register_model(F32x16)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, front_end_type: Any) -> None:
        super().__init__(manager, front_end_type, _VECTOR)


def emit_address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, lanes: int = LANES) -> Any:
    data = cgutils.create_struct_proxy(array_type)(context, builder, value=array).data
    address = builder.gep(data, [index])
    return builder.bitcast(address, ir.VectorType(address.type.pointee, lanes).as_pointer())


def emit_widen(builder: Any, array_type: Any, value: Any) -> Any:
    """A loaded vector as float32: uint16 holds bfloat16 bits, int16 float16 ones."""
    wide = ir.VectorType(_FLOAT, value.type.count)
    if array_type.dtype == types.uint16:
        ints = ir.VectorType(_INT, value.type.count)
        bits = builder.shl(builder.zext(value, ints), ir.Constant(ints, [16] * ints.count))
        return builder.bitcast(bits, wide)
    if array_type.dtype == types.int16:
        return builder.fpext(builder.bitcast(value, ir.VectorType(ir.HalfType(), value.type.count)), wide)
    return value


def _narrow(builder: Any, array_type: Any, value: Any) -> Any:
    """A float32 vector as what the array holds, rounded once to nearest, ties to even."""
    shorts = ir.VectorType(ir.IntType(16), LANES)
    if array_type.dtype == types.uint16:
        bits = builder.bitcast(value, _INTS)
        last = builder.and_(builder.lshr(bits, ir.Constant(_INTS, [16] * LANES)), ir.Constant(_INTS, [1] * LANES))
        rounded = builder.add(bits, builder.add(last, ir.Constant(_INTS, [0x7FFF] * LANES)))
        quiet = builder.or_(bits, ir.Constant(_INTS, [0x400000] * LANES))  # a NaN must not round to infinity
        bits = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
        return builder.trunc(builder.lshr(bits, ir.Constant(_INTS, [16] * LANES)), shorts)
    if array_type.dtype == types.int16:
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), shorts)
    return value


def emit_splat(builder: Any, scalar: Any, kind: ir.VectorType = _VECTOR) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_INT, 0))
    first = ir.Constant(ir.VectorType(_INT, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), first)


def _mask(builder: Any, count: Any, width: int = LANES) -> Any:
    """Bits of a vector, true in the first `count` lanes."""
    ints = ir.VectorType(_INT, width)
    lanes = emit_splat(builder, builder.trunc(count, _INT), ints)
    return builder.icmp_signed("<", ir.Constant(ints, list(range(width))), lanes)


@intrinsic
def splat(typing, value):
    """All lanes `value`."""
    return f32x16(types.float32), lambda context, builder, signature, args: emit_splat(builder, args[0])


@intrinsic
def load(typing, array, index):
    """Sixteen numbers of a flat array from `index` on."""

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        return emit_widen(builder, kind, builder.load(emit_address(context, builder, kind, *args), align=2))

    return f32x16(array, types.intp), generate


@intrinsic
def store(typing, array, index, vector):
    """Sixteen numbers to a flat array from `index` on, rounded once to what it holds."""

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        builder.store(_narrow(builder, kind, args[2]), emit_address(context, builder, kind, *args[:2]), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), generate


def _masked(builder: Any, address: Any, what: str, result: ir.Type, *args: Any) -> Any:
    vector = address.type.pointee
    name = {16: "i16", 32: "f32"}[16 if isinstance(vector.element, ir.IntType) else 32]
    function = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, function, f"llvm.masked.{what}.v{vector.count}{name}.p0"), args
    )


def emit_load_part(builder: Any, address: Any, count: Any) -> Any:
    """The first `count` lanes at an address of a vector, +0 in the others."""
    vector = address.type.pointee
    zeros = ir.Constant(vector, None)

    def masked() -> Any:
        mask = _mask(builder, count, vector.count)
        return _masked(builder, address, "load", vector, address, ir.Constant(_INT, 2), mask, zeros)

    if vector.count != LANES:
        return masked()
    with builder.if_else(_is_half(builder, count)) as (half, rest):
        with half:
            low = builder.load(_half_of(builder, address), align=2)
            lanes = [*range(LANES // 2), *[LANES // 2] * (LANES // 2)]  # of `low`, then of zeros
            shuffle_mask = ir.Constant(ir.VectorType(_INT, LANES), lanes)
            whole, half_end = builder.shuffle_vector(low, ir.Constant(low.type, None), shuffle_mask), builder.block
        with rest:
            partial, rest_end = masked(), builder.block
    loaded = builder.phi(vector)
    loaded.add_incoming(whole, half_end)
    loaded.add_incoming(partial, rest_end)
    return loaded


def _is_half(builder: Any, count: Any) -> Any:
    """Half a vector, as in heads of 16 that are turned, is loaded and stored as such: masked stores take ten times as
    long, and what they wrote cannot be loaded at once."""
    return builder.icmp_signed("==", count, ir.Constant(count.type, LANES // 2))


def _half_of(builder: Any, address: Any) -> Any:
    return builder.bitcast(address, ir.VectorType(address.type.pointee.element, LANES // 2).as_pointer())


@intrinsic
def prefetch(typing, array, index):
    """Fetches the cache line of an element into the second cache."""

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        address = builder.bitcast(emit_address(context, builder, kind, *args), ir.IntType(8).as_pointer())
        function = ir.FunctionType(ir.VoidType(), [address.type, *[_INT] * 3])
        zero, two, one = (ir.Constant(_INT, value) for value in (0, 2, 1))
        builder.call(
            cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0"), [address, zero, two, one]
        )
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def load_part(typing, array, index, count):
    """`count` numbers (at most 16) from `index` on, and +0 in the other lanes, whose memory is not touched."""

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        address = emit_address(context, builder, kind, *args[:2])
        return emit_widen(builder, kind, emit_load_part(builder, address, args[2]))

    return f32x16(array, types.intp, types.intp), generate


def _emit_store_part(builder: Any, address: Any, count: Any, value: Any) -> None:
    with builder.if_else(_is_half(builder, count)) as (half, rest):
        with half:
            low = ir.Constant(ir.VectorType(_INT, LANES // 2), list(range(LANES // 2)))
            low_half = builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), low)
            builder.store(low_half, _half_of(builder, address), align=2)
        with rest:
            mask = _mask(builder, count)
            _masked(builder, address, "store", ir.VoidType(), value, address, ir.Constant(_INT, 2), mask)


@intrinsic
def store_part(typing, array, index, count, vector):
    """The first `count` lanes to a flat array from `index` on; other memory is not touched."""

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        value = _narrow(builder, kind, args[3])
        address = emit_address(context, builder, kind, *args[:2])
        _emit_store_part(builder, address, args[2], value)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, f32x16), generate


@intrinsic
def load_up_to(typing, array, index, count):
    """`load` where there are so many numbers, else `load_part`. A function would count references to the array."""

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        address = emit_address(context, builder, kind, *args[:2])
        with builder.if_else(_is_whole(builder, args[2])) as (whole, rest):
            with whole:
                full, full_end = builder.load(address, align=2), builder.block
            with rest:
                partial, partial_end = emit_load_part(builder, address, args[2]), builder.block
        loaded = builder.phi(full.type)
        loaded.add_incoming(full, full_end)
        loaded.add_incoming(partial, partial_end)
        return emit_widen(builder, kind, loaded)

    return f32x16(array, types.intp, types.intp), generate


@intrinsic
def store_up_to(typing, array, index, count, vector):
    """`store` where there is room for it, else `store_part`."""

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        value, address = _narrow(builder, kind, args[3]), emit_address(context, builder, kind, *args[:2])
        with builder.if_else(_is_whole(builder, args[2])) as (whole, rest):
            with whole:
                builder.store(value, address, align=2)
            with rest:
                _emit_store_part(builder, address, args[2], value)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, f32x16), generate


def _is_whole(builder: Any, count: Any) -> Any:
    return builder.icmp_signed(">=", count, ir.Constant(count.type, LANES))


def _elementwise(operation: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def binary(typing, left, right):
        return f32x16(f32x16, f32x16), lambda context, builder, signature, args: operation(builder, *args)

    return binary


def _call(name: str, arguments: int) -> Callable[..., Any]:
    def call(builder: Any, *args: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * arguments)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v16f32"), args)

    return call


add = _elementwise(lambda builder, left, right: builder.fadd(left, right))
sub = _elementwise(lambda builder, left, right: builder.fsub(left, right))
mul = _elementwise(lambda builder, left, right: builder.fmul(left, right))
div = _elementwise(lambda builder, left, right: builder.fdiv(left, right))
maximum = _elementwise(lambda builder, left, right: builder.select(builder.fcmp_ordered(">", left, right), left, right))


@intrinsic
def fma(typing, left, right, addend):
    """`left * right + addend` with one rounding."""
    call = _call("fma", 3)
    return f32x16(f32x16, f32x16, f32x16), lambda context, builder, signature, args: call(builder, *args)


@intrinsic
def _times_power_of_two(typing, vector, shifted):
    """`vector * 2 ** n` where `shifted` is n + ROUNDER, by adding n to the exponent; the result must be normal."""

    def generate(context, builder, signature, args):
        value, exponent = (builder.bitcast(arg, _INTS) for arg in args)
        exponent = builder.shl(exponent, ir.Constant(_INTS, [23] * LANES))
        return builder.bitcast(builder.add(value, exponent), _VECTOR)

    return f32x16(f32x16, f32x16), generate


def _select(comparison: str) -> Any:
    @intrinsic
    def select(typing, left, right, yes, no):
        def generate(context, builder, signature, args):
            return builder.select(builder.fcmp_ordered(comparison, args[0], args[1]), args[2], args[3])

        return f32x16(f32x16, f32x16, f32x16, f32x16), generate

    return select


# Lane by lane `yes if left < right else no`; a NaN compares false.
select_less = _select("<")
select_less_equal = _select("<=")


def _reduction(combine: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def reduce(typing, vector):
        def generate(context, builder, signature, args):
            value, width = args[0], LANES
            while width > 1:
                width //= 2
                low, high = (
                    builder.shuffle_vector(
                        value,
                        ir.Constant(value.type, ir.Undefined),
                        ir.Constant(ir.VectorType(_INT, width), list(range(start, start + width))),
                    )
                    for start in (0, width)
                )
                value = combine(builder, low, high)
            return builder.extract_element(value, ir.Constant(_INT, 0))

        return types.float32(f32x16), generate

    return reduce


# Halves are combined lane by lane, then quarters, ...: lane 0 with 8, 4, 2, 1.
reduce_sum = _reduction(lambda builder, low, high: builder.fadd(low, high))
reduce_max = _reduction(lambda builder, low, high: builder.select(builder.fcmp_ordered(">", low, high), low, high))

LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
EXP_LOW, EXP_HIGH = np.float32(-87.33), np.float32(88.72283)  # e ** x is a normal number between them
ROUNDER = np.float32(3 << 22)  # added to a small number, leaves it rounded to a whole one in the low bits of the sum
ZERO, INFINITY = np.float32(0), np.float32(np.inf)
_C = [np.float32(c) for c in (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)]
C7, C6, C5, C4, C3, C2, C1, C0 = _C


@njit(inline="always")
def exp(x):
    """e ** x; +0 below EXP_LOW, infinity above EXP_HIGH, NaN of NaN. Largest error 0.92 units in the last place.

    x = n ln 2 + r with |r| <= ln 2 / 2, the Taylor polynomial of degree 7 in r, scaled by 2 ** n. A library's exp is
    often another function in a vector body than in its tail; this one is the same everywhere.
    """
    shifted = fma(x, splat(LOG2_E), splat(ROUNDER))
    n = sub(shifted, splat(ROUNDER))
    r = fma(n, splat(-LN2_HIGH), x)
    r = fma(n, splat(-LN2_LOW), r)
    p = fma(splat(C7), r, splat(C6))
    p = fma(p, r, splat(C5))
    p = fma(p, r, splat(C4))
    p = fma(p, r, splat(C3))
    p = fma(p, r, splat(C2))
    p = fma(p, r, splat(C1))
    p = fma(p, r, splat(C0))
    p = _times_power_of_two(p, shifted)
    p = select_less_equal(x, splat(EXP_HIGH), p, add(x, splat(INFINITY)))
    return select_less(x, splat(EXP_LOW), splat(ZERO), p)
