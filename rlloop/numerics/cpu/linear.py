"""The matrix product: each output is one chain of fused multiply-adds over ascending K.

Nothing else can change a bit, so the shape decides how the work is cut: one operand is laid into lanes (sixteen of its
rows side by side), the other's rows are broadcast against them, and a result is the same number either way round.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from rlloop.numerics.cpu.jit import inlined, kernel, parallel_kernel
from rlloop.numerics.simd import LANES, broadcast, fma, load, splat, store

ZERO = np.float32(0)


@kernel
def _pack(source, packed, tile, rows, width):
    """packed[tile, k, lane] = source[16 * tile + lane, k] in float32, +0 in lanes past the last row."""
    base, first = tile * width * LANES, tile * LANES
    count = min(LANES, rows - first)
    line = np.empty(LANES, np.float32)
    for start in range(0, width, LANES):
        stop = min(width, start + LANES)
        for lane in range(LANES):
            if lane >= count:
                for k in range(start, stop):
                    packed[base + k * LANES + lane] = ZERO
            elif stop - start == LANES:
                store(line, 0, load(source, (first + lane) * width + start))
                for k in range(LANES):
                    packed[base + (start + k) * LANES + lane] = line[k]
            else:
                for k in range(start, stop):
                    store(line, 0, broadcast(source, (first + lane) * width + k))
                    packed[base + k * LANES + lane] = line[0]


@inlined
def _chains6(packed, base, rows, at, width, out):
    zero = splat(ZERO)
    a, b, c, d, e, f = zero, zero, zero, zero, zero, zero
    for k in range(width):
        x, i = load(packed, base + k * LANES), at + k
        a = fma(broadcast(rows, i), x, a)
        b = fma(broadcast(rows, i + width), x, b)
        c = fma(broadcast(rows, i + 2 * width), x, c)
        d = fma(broadcast(rows, i + 3 * width), x, d)
        e = fma(broadcast(rows, i + 4 * width), x, e)
        f = fma(broadcast(rows, i + 5 * width), x, f)
    store(out, 0, a)
    store(out, 16, b)
    store(out, 32, c)
    store(out, 48, d)
    store(out, 64, e)
    store(out, 80, f)


@inlined
def _chains4(packed, base, rows, at, width, out):
    zero = splat(ZERO)
    a, b, c, d = zero, zero, zero, zero
    for k in range(width):
        x, i = load(packed, base + k * LANES), at + k
        a = fma(broadcast(rows, i), x, a)
        b = fma(broadcast(rows, i + width), x, b)
        c = fma(broadcast(rows, i + 2 * width), x, c)
        d = fma(broadcast(rows, i + 3 * width), x, d)
    store(out, 0, a)
    store(out, 16, b)
    store(out, 32, c)
    store(out, 48, d)


@inlined
def _chain(packed, base, rows, at, width, out):
    a = splat(ZERO)
    for k in range(width):
        a = fma(broadcast(rows, at + k), load(packed, base + k * LANES), a)
    store(out, 0, a)


@kernel
def _strip(packed, base, rows, width, row, end, out, lane_stride, row_stride, first, count, sums):
    """Rows `row` to `end` against one tile: out[lane, row] for its first `count` lanes."""
    while row < end:
        left = end - row
        if left >= 6 and left != 8:  # 8 is twice 4
            done = 6
            _chains6(packed, base, rows, row * width, width, sums)
        elif left >= 4:
            done = 4
            _chains4(packed, base, rows, row * width, width, sums)
        else:
            done = 1
            _chain(packed, base, rows, row * width, width, sums)
        if lane_stride == 1 and count == LANES:
            for i in range(done):
                store(out, (row + i) * row_stride + first, load(sums, i * LANES))
        else:
            for lane in range(count):
                at = (first + lane) * lane_stride + row * row_stride
                for i in range(done):
                    out[at + i * row_stride] = sums[i * LANES + lane]
        row += done


@kernel
def _widen(source, target, begin, end):
    at = begin
    line = np.empty(LANES, np.float32)
    while at + LANES <= end:
        store(target, at, load(source, at))
        at += LANES
    while at < end:
        store(line, 0, broadcast(source, at))
        target[at] = line[0]
        at += 1


@parallel_kernel
def product(lanes, num_lanes, rows, num_rows, width, out, lane_stride, row_stride, chunk):
    """out[lane * lane_stride + row * row_stride] = sum over k of lanes[lane, k] * rows[row, k], in float32.

    `lanes` and `rows` are flat, of any float kind that `simd` reads; a task is `chunk` rows against sixteen lanes.
    """
    tiles, parts = (num_lanes + LANES - 1) // LANES, (num_rows + chunk - 1) // chunk
    packed = np.empty(tiles * width * LANES, np.float32)
    for tile in prange(tiles):
        _pack(lanes, packed, tile, num_lanes, width)
    for job in prange(tiles * parts):
        tile, part = job // parts, job % parts
        sums = np.empty(6 * LANES, np.float32)
        _strip(
            packed, tile * width * LANES, rows, width, part * chunk, min(num_rows, (part + 1) * chunk),
            out, lane_stride, row_stride, tile * LANES, min(LANES, num_lanes - tile * LANES), sums,
        )  # fmt: skip


@parallel_kernel
def widen(source, target, chunk):
    """Any float kind to float32, number by number."""
    size = len(target)
    for part in prange((size + chunk - 1) // chunk):
        _widen(source, target, part * chunk, min(size, (part + 1) * chunk))
