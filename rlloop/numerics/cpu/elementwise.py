"""Norm, activation and rotary embedding: float32 inside, one rounding out. Rows are independent."""

from __future__ import annotations

import numpy as np
from numba import prange

from rlloop.numerics.cpu.jit import inlined, kernel, parallel_kernel
from rlloop.numerics.simd import (
    LANES,
    add,
    div,
    exp,
    fma,
    load,
    load_part,
    mul,
    reduce_sum,
    splat,
    store_part,
    sub,
)

BLOCK = 1024  # of a sum of squares
ZERO, ONE = np.float32(0), np.float32(1)


@kernel
def _sum_of_squares(x, begin, width):
    """Blocks of 1024, each in sixteen lanes and one tree, added in order."""
    total = ZERO
    for block in range(0, width, BLOCK):
        lanes = splat(ZERO)
        for i in range(block, min(width, block + BLOCK), LANES):
            part = load_part(x, begin + i, width - i) if width - i < LANES else load(x, begin + i)
            lanes = fma(part, part, lanes)
        total += reduce_sum(lanes)
    return total


@inlined
def _norm_part(stream, weight, out, at, i, count, scale):
    x = load_part(stream, at + i, count)
    store_part(out, at + i, count, mul(mul(x, splat(scale)), load_part(weight, i, count)))


@parallel_kernel
def rms_norm(x, residual, weight, eps, has_residual, stream, out, scales, width, chunk):
    """stream = x + residual, rounded to what it holds; out = stream * scale * weight, with scale = 1 / rms(stream)."""
    rows = len(scales)
    for part in prange((rows + chunk - 1) // chunk):
        for row in range(part * chunk, min(rows, (part + 1) * chunk)):
            at = row * width
            if has_residual:
                for i in range(0, width, LANES):
                    count = min(LANES, width - i)
                    store_part(
                        stream, at + i, count, add(load_part(x, at + i, count), load_part(residual, at + i, count))
                    )
            scale = ONE / np.sqrt(_sum_of_squares(stream, at, width) / np.float32(width) + eps)
            scales[row] = scale
            for i in range(0, width, LANES):
                _norm_part(stream, weight, out, at, i, min(LANES, width - i), scale)


@kernel
def _dot_part(a, b, i, j, width):
    lanes = splat(ZERO)
    for k in range(0, width, LANES):
        count = min(LANES, width - k)
        lanes = fma(load_part(a, i + k, count), load_part(b, j + k, count), lanes)
    return reduce_sum(lanes)


@inlined
def _silu(x):
    """x / (1 + e ** -x)."""
    return div(x, add(splat(ONE), exp(sub(splat(ZERO), x))))


@parallel_kernel
def silu_mul(gate, up, out, chunk):
    size = len(gate)
    for part in prange((size + chunk - 1) // chunk):
        end = min(size, (part + 1) * chunk)
        for i in range(part * chunk, end, LANES):
            count = min(LANES, end - i)
            store_part(out, i, count, mul(_silu(load_part(gate, i, count)), load_part(up, i, count)))


@parallel_kernel
def silu_mul_backward(gate, up, grad, grad_gate, grad_up, chunk):
    """With s = sigmoid(gate): d silu = s (1 + gate (1 - s))."""
    size = len(gate)
    for part in prange((size + chunk - 1) // chunk):
        end = min(size, (part + 1) * chunk)
        for i in range(part * chunk, end, LANES):
            count = min(LANES, end - i)
            g, u, d = load_part(gate, i, count), load_part(up, i, count), load_part(grad, i, count)
            one = splat(ONE)
            sigmoid = div(one, add(one, exp(sub(splat(ZERO), g))))
            slope = mul(sigmoid, fma(g, sub(one, sigmoid), one))
            store_part(grad_gate, i, count, mul(mul(d, u), slope))
            store_part(grad_up, i, count, mul(d, mul(g, sigmoid)))


@parallel_kernel
def rope(x, positions, cos, sin, sign, out, heads, half, chunk):
    """Each pair (x[i], x[i + half]) turned by its position's angle; `sign` -1 turns back."""
    rows = len(positions)
    for part in prange((rows + chunk - 1) // chunk):
        for row in range(part * chunk, min(rows, (part + 1) * chunk)):
            table = positions[row] * half
            for head in range(heads):
                at = (row * heads + head) * 2 * half
                for i in range(0, half, LANES):
                    count = min(LANES, half - i)
                    c = load_part(cos, table + i, count)
                    s = mul(load_part(sin, table + i, count), splat(sign))
                    low, high = load_part(x, at + i, count), load_part(x, at + half + i, count)
                    store_part(out, at + i, count, sub(mul(low, c), mul(high, s)))
                    store_part(out, at + half + i, count, add(mul(high, c), mul(low, s)))
