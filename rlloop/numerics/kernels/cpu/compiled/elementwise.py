"""Norm, activation and rotary embedding: float32 inside, one rounding out. Rows are independent."""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.jit import kernel, parallel_kernel, take
from rlloop.numerics.kernels.cpu.compiled.simd import (
    LANES,
    add,
    div,
    exp,
    fma,
    load_up_to,
    mul,
    reduce_sum,
    splat,
    store_up_to,
    sub,
)

BLOCK = 1024  # numbers of a sum of squares that sixteen lanes add up
ROWS = 64  # a task of the norm has so many; the gradient of its weight adds up such blocks, in order
NUMBERS = 1 << 14  # a task of the other kernels has so many
ZERO, ONE = np.float32(0), np.float32(1)


get, put = load_up_to, store_up_to


@kernel
def mean_square(x, at, width):
    """Blocks of 1024, each in sixteen lanes and one tree, added in order; over the width."""
    total = ZERO
    for block in range(0, width, BLOCK):
        lanes = splat(ZERO)
        for i in range(block, min(width, block + BLOCK), LANES):
            vector = get(x, at + i, width - i)
            lanes = fma(vector, vector, lanes)
        total += reduce_sum(lanes)
    return total / np.float32(width)


@parallel_kernel
def rms_norm(counter, x, residual, weight, eps, has_residual, stream, out, scales, width):
    """stream = x + residual, rounded to what it holds (stream is x where there is no residual);
    out = stream * scale * weight, with scale = 1 / rms(stream)."""
    begin = take(counter) * ROWS
    while begin < len(scales):
        for row in range(begin, min(len(scales), begin + ROWS)):
            at = row * width
            if has_residual:
                for i in range(0, width, LANES):
                    put(stream, at + i, width - i, add(get(x, at + i, width - i), get(residual, at + i, width - i)))
            scale = ONE / np.sqrt(mean_square(stream, at, width) + eps)
            scales[row] = scale
            for i in range(0, width, LANES):
                normed = mul(get(stream, at + i, width - i), splat(scale))
                put(out, at + i, width - i, mul(normed, get(weight, i, width - i)))
        begin = take(counter) * ROWS


@parallel_kernel
def rms_norm_backward(
    counter, stream, weight, scales, grad, grad_stream, has_grad_stream, grad_x, weight_parts, width
):  # fmt: skip
    """grad_x = scale (g - n mean(g n)) + grad_stream, with n the normed stream and g = grad * weight;
    weight_parts [blocks, width] = the sum of grad * n over each block of ROWS rows."""
    block = take(counter)
    while block * ROWS < len(scales):
        sums = block * width
        weight_parts[sums : sums + width] = ZERO
        for row in range(block * ROWS, min(len(scales), (block + 1) * ROWS)):
            at, scale, lanes = row * width, splat(scales[row]), splat(ZERO)
            for i in range(0, width, LANES):
                left = width - i
                normed, slope = mul(get(stream, at + i, left), scale), get(grad, at + i, left)
                lanes = fma(mul(slope, get(weight, i, left)), normed, lanes)
                put(weight_parts, sums + i, left, fma(slope, normed, get(weight_parts, sums + i, left)))
            mean = splat(-reduce_sum(lanes) / np.float32(width))
            for i in range(0, width, LANES):
                left = width - i
                normed = mul(get(stream, at + i, left), scale)
                slope = mul(get(grad, at + i, left), get(weight, i, left))
                total = mul(fma(normed, mean, slope), scale)
                if has_grad_stream:
                    total = add(total, get(grad_stream, at + i, left))
                put(grad_x, at + i, left, total)
        block = take(counter)


@kernel
def silu_times(x, y):
    return mul(div(x, add(splat(ONE), exp(sub(splat(ZERO), x)))), y)


@parallel_kernel
def silu_mul(counter, gate, up, out):
    begin = take(counter) * NUMBERS
    while begin < len(gate):
        end = min(len(gate), begin + NUMBERS)
        for i in range(begin, end, LANES):
            put(out, i, end - i, silu_times(get(gate, i, end - i), get(up, i, end - i)))
        begin = take(counter) * NUMBERS


@parallel_kernel
def silu_mul_backward(counter, gate, up, grad, grad_gate, grad_up):
    """With s = sigmoid(gate), the slope of silu is s (1 + gate (1 - s))."""
    begin = take(counter) * NUMBERS
    while begin < len(gate):
        end = min(len(gate), begin + NUMBERS)
        for i in range(begin, end, LANES):
            x, y, slope = get(gate, i, end - i), get(up, i, end - i), get(grad, i, end - i)
            sigmoid = div(splat(ONE), add(splat(ONE), exp(sub(splat(ZERO), x))))
            silu_slope = mul(sigmoid, fma(x, sub(splat(ONE), sigmoid), splat(ONE)))
            put(grad_gate, i, end - i, mul(mul(slope, y), silu_slope))
            put(grad_up, i, end - i, mul(slope, mul(x, sigmoid)))
        begin = take(counter) * NUMBERS


@parallel_kernel
def sigmoid_mul(counter, gate, up, out):
    begin = take(counter) * NUMBERS
    while begin < len(gate):
        end = min(len(gate), begin + NUMBERS)
        for i in range(begin, end, LANES):
            gates = add(splat(ONE), exp(sub(splat(ZERO), get(gate, i, end - i))))
            put(out, i, end - i, div(get(up, i, end - i), gates))
        begin = take(counter) * NUMBERS


@parallel_kernel
def rope(counter, x, positions, cos, sin, sign, out, heads, half):
    """Each pair (x[i], x[i + half]) turned by its position's angle; `sign` -1 turns back."""
    row = take(counter)
    while row < len(positions):
        table = positions[row] * half
        for i in range(0, half, LANES):
            left = half - i
            c, s = get(cos, table + i, left), mul(get(sin, table + i, left), splat(sign))
            for low_at in range(row * heads * 2 * half + i, (row + 1) * heads * 2 * half, 2 * half):
                low, high = get(x, low_at, left), get(x, low_at + half, left)
                put(out, low_at, left, sub(mul(low, c), mul(high, s)))
                put(out, low_at + half, left, add(mul(high, c), mul(low, s)))
        row = take(counter)
