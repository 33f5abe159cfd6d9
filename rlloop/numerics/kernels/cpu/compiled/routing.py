"""Routing of tokens to experts, and the weighted sum of the experts' outputs. Tokens are independent."""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.elementwise import get, put
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

ROWS = 16  # tokens of a task
ZERO, ONE = np.float32(0), np.float32(1)
MINUS_INFINITY = np.float32(-np.inf)


@kernel
def _softmax(logits, at, count, scores):
    """exp(x − top) over its sum, which is made in order of expert."""
    top, total = MINUS_INFINITY, ZERO
    for e in range(count):
        top = max(top, logits[at + e])
    for i in range(0, count, LANES):
        put(scores, at + i, count - i, exp(sub(get(logits, at + i, count - i), splat(top))))
    for e in range(count):
        total += scores[at + e]
    for e in range(count):
        scores[at + e] /= total


@kernel
def _sigmoid(logits, at, count, scores):
    for i in range(0, count, LANES):
        x = get(logits, at + i, count - i)
        put(scores, at + i, count - i, div(splat(ONE), add(splat(ONE), exp(sub(splat(ZERO), x)))))


@kernel
def _take_best(values, begin, end):
    """The index of the largest of values[begin:end], the lowest among equals; it becomes NaN, which is never taken."""
    best = begin
    while best < end - 1 and values[best] != values[best]:
        best += 1
    for e in range(best + 1, end):
        if values[e] > values[best]:
            best = e
    values[best] = np.float32(np.nan)
    return best


@kernel
def _keep_best_groups(values, count, groups, top_groups, worth):
    """−inf for every expert outside the groups that are worth most."""
    size = count // groups
    for g in range(groups):
        first, second = MINUS_INFINITY, MINUS_INFINITY
        for e in range(g * size, (g + 1) * size):
            if values[e] > first:
                first, second = values[e], first
            elif values[e] > second:
                second = values[e]
        worth[g] = first + second
    for _ in range(top_groups):
        _take_best(worth, 0, groups)
    for g in range(groups):
        if worth[g] == worth[g]:
            values[g * size : (g + 1) * size] = MINUS_INFINITY


@parallel_kernel
def route(
    counter, logits, bias, has_bias, count, top_k, sigmoid, groups, top_groups, normalise, epsilon, scale, replay,
    scores, chosen, weights,
):  # fmt: skip
    """`routing.Routing` over rows of `count` logits. `replay`: `chosen` is an input, and only weights are computed."""
    values, worth = np.empty(count, np.float32), np.empty(groups, np.float32)
    tokens = len(logits) // count
    begin = take(counter) * ROWS
    while begin < tokens:
        for t in range(begin, min(tokens, begin + ROWS)):
            at = t * count
            if sigmoid:
                _sigmoid(logits, at, count, scores)
            else:
                _softmax(logits, at, count, scores)
            if not replay:
                for e in range(count):
                    value = scores[at + e] + bias[e] if has_bias else scores[at + e]
                    values[e] = value if value == value else MINUS_INFINITY
                if groups > 1:
                    _keep_best_groups(values, count, groups, top_groups, worth)
                for s in range(top_k):
                    chosen[t * top_k + s] = _take_best(values, 0, count)
            total = ZERO
            for s in range(t * top_k, (t + 1) * top_k):
                weights[s] = scores[at + chosen[s]]
                total += weights[s]
            total += epsilon
            for s in range(t * top_k, (t + 1) * top_k):
                weight = weights[s] / total if normalise else weights[s]
                weights[s] = weight * scale
        begin = take(counter) * ROWS


@kernel
def _by_expert(chosen, at, top_k, order):
    """The slots of one token in ascending order of expert."""
    for s in range(top_k):
        index = s
        while index > 0 and chosen[at + order[index - 1]] > chosen[at + s]:
            order[index] = order[index - 1]
            index -= 1
        order[index] = s


@parallel_kernel
def combine(counter, slots, chosen, weights, shared, has_shared, each, width, top_k, out):
    """out = the slots' weighted sum in ascending order of expert, then `shared`.

    `each`: every product and every sum is rounded to what `out` holds; else only the end is.
    """
    order, line = np.empty(top_k, np.int64), np.empty(LANES, out.dtype)
    tokens = len(out) // width
    begin = take(counter) * ROWS
    while begin < tokens:
        for t in range(begin, min(tokens, begin + ROWS)):
            _by_expert(chosen, t * top_k, top_k, order)
            for i in range(0, width, LANES):
                left, total = width - i, splat(ZERO)
                for s in range(top_k):
                    slot = t * top_k + order[s]
                    product = mul(get(slots, slot * width + i, left), splat(weights[slot]))
                    if each:
                        store(line, 0, product)
                        total = add(total, load(line, 0))
                        store(line, 0, total)
                        total = load(line, 0)
                    else:
                        total = add(total, product)
                if has_shared:
                    total = add(total, get(shared, t * width + i, left))
                put(out, t * width + i, left, total)
        begin = take(counter) * ROWS


@parallel_kernel
def combine_backward(counter, slots, weights, grad, width, top_k, grad_slots, grad_weights):
    """Gradients of the weighted sum, with roundings taken as the identity."""
    tokens = len(grad) // width
    begin = take(counter) * ROWS
    while begin < tokens:
        for t in range(begin, min(tokens, begin + ROWS)):
            for slot in range(t * top_k, (t + 1) * top_k):
                lanes, weight = splat(ZERO), splat(weights[slot])
                for i in range(0, width, LANES):
                    left = width - i
                    slope = get(grad, t * width + i, left)
                    lanes = fma(slope, get(slots, slot * width + i, left), lanes)
                    put(grad_slots, slot * width + i, left, mul(slope, weight))
                grad_weights[slot] = reduce_sum(lanes)
        begin = take(counter) * ROWS
