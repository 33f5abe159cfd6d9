"""Several consecutive operations in one kernel, for forwards without gradients. Bits are those of each alone.

The operations of a small step take hardly longer than waking the threads that share them, so fewer and larger ones
are faster.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rlloop.numerics.kernels.cpu.compiled.bfloat16 import flat_rows, kind_of, threads_of
from rlloop.numerics.kernels.cpu.compiled.elementwise import get, mean_square, put, silu_times
from rlloop.numerics.kernels.cpu.compiled.jit import flat, inlined, parallel_kernel, take, threads_for
from rlloop.numerics.kernels.cpu.compiled.linear import (
    FORWARD,
    NO,
    YES,
    add_strip,
    finish,
    no_further,
    plan,
    room_for_lanes,
    room_for_sums,
)
from rlloop.numerics.kernels.cpu.compiled.simd import LANES, add, load, mul, splat, store, sub

TOKENS = 8  # of a task of `cache_write`


@parallel_kernel
def three_products(
    counter, first, second, third, rows, out_first, out_second, out_third, columns, num_rows, width, kind, tiles,
    chunk,
):  # fmt: skip
    """`linear.product` of one input by three matrices [columns[i], width], without biases."""
    span = tiles * LANES
    ends = np.cumsum((columns + span - 1) // span)
    packed, starts, panel = room_for_lanes(kind), np.empty(span, np.int64), np.empty(0, np.float32)
    sums, further = room_for_sums(chunk, tiles, width, FORWARD), no_further(rows, first)
    task = take(counter)
    while task < ends[2] * ((num_rows + chunk - 1) // chunk):
        strip, row = task % ends[2], task // ends[2] * chunk
        if strip < ends[0]:
            lanes, out, count, column = first, out_first, columns[0], strip * span
        elif strip < ends[1]:
            lanes, out, count, column = second, out_second, columns[1], (strip - ends[0]) * span
        else:
            lanes, out, count, column = third, out_third, columns[2], (strip - ends[1]) * span
        some = min(chunk, num_rows - row)
        add_strip(
            lanes, YES, rows, YES, column, count, row, some, num_rows, width, FORWARD, kind, tiles, chunk, packed,
            panel, starts, sums, further, row,
        )  # fmt: skip
        finish(sums, tiles, some, sums, NO, out, row * count, column, count)
        task = take(counter)


def qkv_linear(x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights, (num_rows, width) = (q_weight, k_weight, v_weight), x.shape
    one, other, last = (x.new_empty(num_rows, len(weight)) for weight in weights)
    columns = np.array([len(weight) for weight in weights])
    kind = kind_of(x, q_weight, width)
    threads = threads_of(num_rows * int(columns.sum()) * width, int(columns.sum()) * width, kind)
    three_products(
        threads, *(flat(weight.contiguous()) for weight in weights), flat_rows(x, kind), flat(one), flat(other),
        flat(last), columns, num_rows, width, kind, *plan(num_rows, int(columns.sum()), width, threads, kind),
    )  # fmt: skip
    return one, other, last


@parallel_kernel
def gated_product(counter, gate, up, rows, out, num_rows, columns, width, kind, tiles, chunk):
    """out = silu(rows gate^T) * (rows up^T). Both products are rounded to what `out` holds before that."""
    span = tiles * LANES
    strips = (columns + span - 1) // span
    packed, starts, panel = room_for_lanes(kind), np.empty(span, np.int64), np.empty(0, np.float32)
    gates, ups = room_for_sums(chunk, tiles, width, FORWARD), room_for_sums(chunk, tiles, width, FORWARD)
    rounded, further = np.empty(2 * LANES, out.dtype), no_further(rows, gate)
    task = take(counter)
    while task < strips * ((num_rows + chunk - 1) // chunk):
        column, first = task % strips * span, task // strips * chunk
        count = min(chunk, num_rows - first)
        for lanes, sums in ((gate, gates), (up, ups)):
            add_strip(
                lanes, YES, rows, YES, column, columns, first, count, num_rows, width, FORWARD, kind, tiles, chunk,
                packed, panel, starts, sums, further, first,
            )  # fmt: skip
        for row in range(count):
            for n in range(0, min(span, columns - column), LANES):
                store(rounded, 0, load(gates, row * span + n))
                store(rounded, LANES, load(ups, row * span + n))
                gated = silu_times(load(rounded, 0), load(rounded, LANES))
                put(out, (first + row) * columns + column + n, columns - column - n, gated)
        task = take(counter)


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    (num_rows, width), columns = x.shape, len(gate)
    out = x.new_empty(num_rows, columns)
    kind = kind_of(x, gate, width)
    threads = threads_of(2 * num_rows * columns * width, 2 * columns * width, kind)
    gated_product(
        threads, flat(gate.contiguous()), flat(up.contiguous()), flat_rows(x, kind), flat(out), num_rows, columns,
        width, kind, *plan(num_rows, columns, width, threads, kind),
    )  # fmt: skip
    return out


@inlined  # a call counts references to each array, which takes as long as what it does
def _turned(x, at, weight, eps, normed, cos, sin, table, half, line, out, to):
    """Writes one head: normed as by `rms_norm`, rounded to what `line` holds, then turned as by `rope`."""
    width = 2 * half
    scale = splat(np.float32(1) / np.sqrt(mean_square(x, at, width) + eps) if normed else np.float32(1))
    for i in range(0, width, LANES):
        vector = get(x, at + i, width - i)
        put(line, i, width - i, mul(mul(vector, scale), get(weight, i, width - i)) if normed else vector)
    for i in range(0, half, LANES):
        left = half - i
        c, s = get(cos, table + i, left), get(sin, table + i, left)
        low, high = get(line, i, left), get(line, half + i, left)
        put(out, to + i, left, sub(mul(low, c), mul(high, s)))
        put(out, to + half + i, left, add(mul(high, c), mul(low, s)))


@parallel_kernel
def cache_write(
    counter, q, k, v, q_weight, k_weight, eps, normed, positions, cos, sin, slots, out, keys, values, heads, groups,
    half,
):  # fmt: skip
    width, line = 2 * half, np.empty(2 * half, out.dtype)
    begin = take(counter) * TOKENS
    while begin < len(positions):
        for token in range(begin, min(len(positions), begin + TOKENS)):
            table, cache_offset, first = positions[token] * half, slots[token] * groups * width, token * groups * width
            for at in range(token * heads * width, (token + 1) * heads * width, width):
                _turned(q, at, q_weight, eps, normed, cos, sin, table, half, line, out, at)
            for i in range(0, groups * width, width):
                _turned(k, first + i, k_weight, eps, normed, cos, sin, table, half, line, keys, cache_offset + i)
            for i in range(0, groups * width, LANES):
                put(values, cache_offset + i, groups * width - i, get(v, first + i, groups * width - i))
        begin = take(counter) * TOKENS


def qkv_cache_write(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, positions: Tensor,
    cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    (tokens, heads, width), groups = q.shape, k.shape[1]
    out = q.new_empty(tokens, heads, width)
    weights = (flat(q if weight is None else weight) for weight in (q_weight, k_weight))
    cache_write(
        threads_for(16 * tokens * (heads + groups) * width), *(flat(x.contiguous()) for x in (q, k, v)), *weights,
        np.float32(eps), q_weight is not None, flat(positions.contiguous()), flat(cos), flat(sin),
        flat(slots.contiguous()), flat(out), flat(keys.view(-1)), flat(values.view(-1)), heads, groups, width // 2,
    )  # fmt: skip
    return out
