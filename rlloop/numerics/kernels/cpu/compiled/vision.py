"""GELU, and the gradient of a layer norm: float32 inside, one rounding out. Rows and numbers are independent."""

from __future__ import annotations

import math

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.attention import padded
from rlloop.numerics.kernels.cpu.compiled.elementwise import NUMBERS, ONE, ROWS, ZERO, get, put
from rlloop.numerics.kernels.cpu.compiled.jit import kernel, parallel_kernel, take
from rlloop.numerics.kernels.cpu.compiled.simd import (
    LANES,
    add,
    div,
    exp,
    fma,
    load,
    mul,
    reduce_sum,
    splat,
    store,
    sub,
)
from rlloop.numerics.kernels.cpu.compiled.tiles import narrow, widen

SLOPE, CUBE = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
HALF_ROOT, DENSITY = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)


@kernel
def _sigmoid(x):
    """Of 2 sqrt(2 / pi) (x + 0.044715 x^3): half of 1 + tanh of half of that."""
    inner = mul(mul(splat(SLOPE), x), fma(mul(x, x), splat(CUBE), splat(ONE)))
    return div(splat(ONE), add(splat(ONE), exp(sub(splat(ZERO), inner))))


@parallel_kernel
def gelu_tanh(counter, x, out):
    begin = take(counter) * NUMBERS
    while begin < len(x):
        end = min(len(x), begin + NUMBERS)
        for i in range(begin, end, LANES):
            number = get(x, i, end - i)
            put(out, i, end - i, mul(number, _sigmoid(number)))
        begin = take(counter) * NUMBERS


@parallel_kernel
def gelu_tanh_backward(counter, x, grad, grad_x):
    """With s the sigmoid and u its argument, the slope is s + x s (1 - s) u'."""
    begin = take(counter) * NUMBERS
    while begin < len(x):
        end = min(len(x), begin + NUMBERS)
        for i in range(begin, end, LANES):
            number = get(x, i, end - i)
            share = _sigmoid(number)
            inner = mul(splat(SLOPE), fma(mul(number, number), splat(np.float32(3) * CUBE), splat(ONE)))
            slope = fma(mul(mul(number, share), sub(splat(ONE), share)), inner, share)
            put(grad_x, i, end - i, mul(get(grad, i, end - i), slope))
        begin = take(counter) * NUMBERS


@parallel_kernel
def gelu_erf(counter, x, out):
    """x (1 + erf(x / sqrt 2)) / 2 in float64, number by number."""
    line = np.empty(LANES, np.float32)
    begin = take(counter) * NUMBERS
    while begin < len(x):
        end = min(len(x), begin + NUMBERS)
        for i in range(begin, end, LANES):
            store(line, 0, get(x, i, end - i))
            for j in range(LANES):
                number = np.float64(line[j])
                line[j] = np.float32(0.5 * number * (1.0 + math.erf(number * HALF_ROOT)))
            put(out, i, end - i, load(line, 0))
        begin = take(counter) * NUMBERS


@parallel_kernel
def gelu_erf_backward(counter, x, grad, grad_x):
    line = np.empty(LANES, np.float32)
    begin = take(counter) * NUMBERS
    while begin < len(x):
        end = min(len(x), begin + NUMBERS)
        for i in range(begin, end, LANES):
            store(line, 0, get(x, i, end - i))
            for j in range(LANES):
                number = np.float64(line[j])
                share = 0.5 * (1.0 + math.erf(number * HALF_ROOT))
                line[j] = np.float32(share + number * DENSITY * math.exp(-0.5 * number * number))
            put(grad_x, i, end - i, mul(get(grad, i, end - i), load(line, 0)))
        begin = take(counter) * NUMBERS


@parallel_kernel
def layer_norm_backward(counter, x, weight, grad, eps, grad_x, weight_parts, bias_parts, width):
    """grad_x = scale (g - mean(g) - n mean(g n)), with n the normed row, scale = 1 / its deviation and g = grad *
    weight; the parts [blocks, width] are the sums of grad n and of grad over each block of ROWS rows."""
    wide = padded(width)
    line, slopes = np.empty(wide, np.float32), np.empty(wide, np.float32)
    rows = len(grad_x) // width
    block = take(counter)
    while block * ROWS < rows:
        sums = block * width
        weight_parts[sums : sums + width] = ZERO
        bias_parts[sums : sums + width] = ZERO
        for row in range(block * ROWS, min(rows, (block + 1) * ROWS)):
            at = row * width
            widen(x, at, width, line, 0)
            widen(grad, at, width, slopes, 0)
            total = splat(ZERO)
            for i in range(0, width, LANES):
                total = add(total, load(line, i))
            mean = reduce_sum(total) / np.float32(width)
            for i in range(width):
                line[i] -= mean
            total = splat(ZERO)
            for i in range(0, width, LANES):
                total = fma(load(line, i), load(line, i), total)
            scale = ONE / np.sqrt(reduce_sum(total) / np.float32(width) + eps)
            for i in range(width):
                line[i] *= scale
                weight_parts[sums + i] += slopes[i] * line[i]
                bias_parts[sums + i] += slopes[i]
                slopes[i] *= weight[i]
            total, product = splat(ZERO), splat(ZERO)
            for i in range(0, width, LANES):
                total = add(total, load(slopes, i))
                product = fma(load(slopes, i), load(line, i), product)
            shift, turn = reduce_sum(total) / np.float32(width), reduce_sum(product) / np.float32(width)
            for i in range(width):
                slopes[i] = (slopes[i] - shift - line[i] * turn) * scale
            narrow(slopes, 0, width, grad_x, at)
        block = take(counter)
