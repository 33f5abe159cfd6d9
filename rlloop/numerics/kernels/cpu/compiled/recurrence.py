"""Recurrent layers: a short convolution, and a state that every token decays and writes to.

One token after the other, everywhere. Training, prefill and decode run this very loop, so neither where a sequence is
cut nor its neighbours in the batch change a bit: only a state crosses a cut, and it is kept in float32. Tasks are
sequences times heads (or blocks of channels). Inside, columns of a state are independent of each other.
"""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.distribution import log
from rlloop.numerics.kernels.cpu.compiled.jit import kernel, parallel_kernel, take
from rlloop.numerics.kernels.cpu.compiled.simd import LANES, exp, splat, store

CHANNELS = 256  # of a task of the convolution
SPAN = 32  # tokens between the states that the backward pass keeps
ROWS = 16  # tokens of a task of the gates
ZERO, ONE = np.float32(0), np.float32(1)


@parallel_kernel
def convolution(
    counter, x, weight, bias, has_bias, query_start, context, rows, states, has_states, channels, width, out
):  # fmt: skip
    """out[t] = sum over j, oldest first, of weight[j] * x[t - width + 1 + j], then + bias; per channel.

    weight [width, channels]; states [rows, width - 1, channels] hold the last inputs of a sequence, newest last.
    """
    blocks, kept = (channels + CHANNELS - 1) // CHANNELS, width - 1
    task = take(counter)
    while task < (len(query_start) - 1) * blocks:
        s, begin = task // blocks, task % blocks * CHANNELS
        end = min(channels, begin + CHANNELS)
        first, last = query_start[s], query_start[s + 1]
        store_at = rows[s] * kept * channels if has_states else 0
        for t in range(first, last):
            at = t * channels
            for c in range(begin, end):
                out[at + c] = ZERO
            for j in range(width):
                source = t - kept + j
                if source >= first:
                    for c in range(begin, end):
                        out[at + c] += weight[j * channels + c] * x[source * channels + c]
                elif has_states and context[s] - (first - source) >= 0:
                    past = store_at + (kept - (first - source)) * channels
                    for c in range(begin, end):
                        out[at + c] += weight[j * channels + c] * states[past + c]
            if has_bias:
                for c in range(begin, end):
                    out[at + c] += bias[c]
        if has_states:
            for m in range(kept):
                source = last - kept + m
                if source >= first:
                    for c in range(begin, end):
                        states[store_at + m * channels + c] = x[source * channels + c]
                else:
                    for c in range(begin, end):
                        states[store_at + m * channels + c] = states[store_at + (m + last - first) * channels + c]
        task = take(counter)


@kernel
def _exp(x, line):
    store(line, 0, exp(splat(x)))
    return line[0]


@parallel_kernel
def gates(counter, a, rate, bias, floor, heads, decay, step):
    """step = max(softplus(a + bias), floor); decay = exp(-exp(rate) step)."""
    line = np.empty(LANES, np.float32)
    tokens = len(a) // heads
    begin = take(counter) * ROWS
    while begin < tokens:
        for t in range(begin, min(tokens, begin + ROWS)):
            for h in range(heads):
                x = a[t * heads + h] + bias[h]
                soft = max(x, ZERO) + log(ONE + _exp(-abs(x), line))
                step[t * heads + h] = max(soft, floor)
                decay[t * heads + h] = _exp(-_exp(rate[h], line) * step[t * heads + h], line)
        begin = take(counter) * ROWS


@kernel
def _write(state, key, key_at, value, value_at, key_width, width, decay, beta, corrects, read, written):
    """state = decay state + key written, with written = beta (value - read) and read = key . decay state; or, where
    nothing is corrected, written = beta value. All sums go over ascending places of the key."""
    for j in range(width):
        read[j] = ZERO
    for i in range(key_width):
        factor = key[key_at + i]
        for j in range(width):
            faded = state[i * width + j] * decay
            state[i * width + j] = faded
            read[j] += faded * factor
    for j in range(width):
        written[j] = (value[value_at + j] - read[j]) * beta if corrects else value[value_at + j] * beta
    for i in range(key_width):
        factor = key[key_at + i]
        for j in range(width):
            state[i * width + j] += factor * written[j]


@parallel_kernel
def scan(
    counter, q, k, v, decay, beta, corrects, query_start, context, rows, states, has_states, groups, heads, key_width,
    width, out,
):  # fmt: skip
    """out = query . state, after the state was faded and written to. States [rows, heads, key_width, width]."""
    share, size = heads // groups, key_width * width
    state = np.empty(size, np.float32)
    read, written = np.empty(width, np.float32), np.empty(width, np.float32)
    task = take(counter)
    while task < (len(query_start) - 1) * heads:
        s, h = task // heads, task % heads
        store_at = (rows[s] * heads + h) * size if has_states else 0
        resumed = has_states and context[s] > 0
        for i in range(size):
            state[i] = states[store_at + i] if resumed else ZERO
        for t in range(query_start[s], query_start[s + 1]):
            key_at, at, gate = (t * groups + h // share) * key_width, (t * heads + h) * width, t * heads + h
            _write(state, k, key_at, v, at, key_width, width, decay[gate], beta[gate], corrects, read, written)
            for j in range(width):
                out[at + j] = ZERO
            for i in range(key_width):
                factor = q[key_at + i]
                for j in range(width):
                    out[at + j] += state[i * width + j] * factor
        if has_states:
            for i in range(size):
                states[store_at + i] = state[i]
        task = take(counter)


@kernel
def _dot(a, a_at, b, b_at, count):
    total = ZERO
    for i in range(count):
        total += a[a_at + i] * b[b_at + i]
    return total


@kernel
def _step_back(
    before, state, slope, q, k, v, key_at, at, gate, decay, beta, corrects, key_width, width, read, written, slopes,
    grad, grad_q, grad_k, grad_v, grad_decay, grad_beta,
):  # fmt: skip
    """One token of the backward pass. `slope`: gradient of `state`, after the token; then of the one before it."""
    for i in range(key_width):
        grad_q[key_at + i] += _dot(state, i * width, grad, at, width)
        factor = q[key_at + i]
        for j in range(width):
            slope[i * width + j] += factor * grad[at + j]
    for j in range(width):
        slopes[j] = ZERO  # of what was written
    for i in range(key_width):
        factor = k[key_at + i]
        for j in range(width):
            slopes[j] += slope[i * width + j] * factor
        grad_k[key_at + i] += _dot(slope, i * width, written, 0, width)
    total = ZERO
    for j in range(width):
        total += slopes[j] * (v[at + j] - read[j] if corrects else v[at + j])
        grad_v[at + j] = slopes[j] * beta
    grad_beta[gate] = total
    if corrects:
        for i in range(key_width):
            factor = k[key_at + i]
            grad_k[key_at + i] -= decay * _dot(before, i * width, grad_v, at, width)
            for j in range(width):
                slope[i * width + j] -= factor * grad_v[at + j]
    grad_decay[gate] = _dot(slope, 0, before, 0, key_width * width)
    for i in range(key_width * width):
        slope[i] *= decay


@parallel_kernel
def scan_backward(
    counter, q, k, v, decay, beta, corrects, query_start, groups, heads, key_width, width, grad, begun, has_begun,
    of_states, has_slopes, grad_q, grad_k, grad_v, grad_decay, grad_beta,
):  # fmt: skip
    """A task is a sequence's share of one key head: the heads that read it come in order. States are kept at every
    SPAN tokens and made again in between. grad_q and grad_k start at 0. begun and of_states [S, heads, key_width,
    width]: states that sequences begin with, and gradients of those that they end with, then of those begun."""
    share, size, longest = heads // groups, key_width * width, 0
    for s in range(len(query_start) - 1):
        longest = max(longest, query_start[s + 1] - query_start[s])
    marks = np.empty((longest + SPAN - 1) // SPAN * size, np.float32)
    span_states = np.empty(SPAN * size, np.float32)
    state, slope = np.empty(size, np.float32), np.empty(size, np.float32)
    read, written, slopes = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    task = take(counter)
    while task < (len(query_start) - 1) * groups:
        s, g = task // groups, task % groups
        first, count = query_start[s], query_start[s + 1] - query_start[s]
        for h in range(g * share, (g + 1) * share):
            state_at = (s * heads + h) * size
            for i in range(size):
                state[i] = begun[state_at + i] if has_begun else ZERO
                slope[i] = of_states[state_at + i] if has_slopes else ZERO
            for n in range(count):
                if n % SPAN == 0:
                    marks[n // SPAN * size : (n // SPAN + 1) * size] = state
                t = first + n
                key_at, at, gate = (t * groups + g) * key_width, (t * heads + h) * width, t * heads + h
                _write(state, k, key_at, v, at, key_width, width, decay[gate], beta[gate], corrects, read, written)
            for span in range((count - 1) // SPAN, -1, -1):
                begin, end = span * SPAN, min(count, (span + 1) * SPAN)
                state[:] = marks[span * size : (span + 1) * size]
                for n in range(begin, end):
                    span_states[(n - begin) * size : (n - begin + 1) * size] = state
                    t = first + n
                    key_at, at, gate = (t * groups + g) * key_width, (t * heads + h) * width, t * heads + h
                    _write(state, k, key_at, v, at, key_width, width, decay[gate], beta[gate], corrects, read, written)
                for n in range(end - 1, begin - 1, -1):
                    t, before = first + n, span_states[(n - begin) * size : (n - begin + 1) * size]
                    key_at, at, gate = (t * groups + g) * key_width, (t * heads + h) * width, t * heads + h
                    state[:] = before
                    _write(state, k, key_at, v, at, key_width, width, decay[gate], beta[gate], corrects, read, written)
                    _step_back(
                        before, state, slope, q, k, v, key_at, at, gate, decay[gate], beta[gate], corrects, key_width,
                        width, read, written, slopes, grad, grad_q, grad_k, grad_v, grad_decay, grad_beta,
                    )  # fmt: skip
            if has_slopes:
                of_states[state_at : state_at + size] = slope
        task = take(counter)
