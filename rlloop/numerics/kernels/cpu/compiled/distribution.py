"""The distribution of one row of logits: processed, measured, differentiated and sampled from.

A row's processed logits z are its logits, −inf where banned, over the temperature; then every token that top-k, top-p
or min-p drops becomes −inf too. With m = max(z), its masses are e = exp(z − m), and S is their sum. A dropped token's
mass is +0, so truncation leaves all other terms, and the tree that adds them, where they were.

Sums run over vocabulary blocks of 1024: sixteen lanes each, lanes halved pairwise, blocks added in order. A row is
made by one thread, from nothing but that row. Arithmetic is float32, but for the running masses of top-p and of the
draw, which are float64.
"""

from __future__ import annotations

import math

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.jit import kernel, parallel_kernel, take
from rlloop.numerics.kernels.cpu.compiled.random import uniform_kernel
from rlloop.numerics.kernels.cpu.compiled.simd import (
    EXP_LOW,
    LANES,
    add,
    exp,
    fma,
    load,
    maximum,
    reduce_max,
    reduce_sum,
    splat,
    store,
    sub,
)
from rlloop.numerics.random import SAMPLING

BLOCK = 1024
BUCKETS = 256
INFINITY = np.float32(np.inf)
LN2 = math.log(2)
PLAIN = (np.float32(1), np.int64(0), np.float32(1), np.float32(0))  # temperature 1, nothing truncated


@kernel
def padded(size):
    """The length of a row in scratch memory: whole lanes, so that no loop has a tail."""
    return (size + LANES - 1) // LANES * LANES


@kernel
def sum_of(values):
    """The float32 sum of a row."""
    total = np.float32(0)
    for begin in range(0, values.size, BLOCK):
        lanes = splat(np.float32(0))
        for i in range(begin, min(begin + BLOCK, values.size), LANES):
            lanes = add(lanes, load(values, i))
        total += reduce_sum(lanes)
    return total


@kernel
def weighted_sum(e, z, m):
    """The float32 sum of e (z − m), where a mass of 0 adds 0 whatever its z."""
    total = np.float32(0)
    for begin in range(0, e.size, BLOCK):
        lanes = splat(np.float32(0))
        for i in range(begin, min(begin + BLOCK, e.size), LANES):
            finite = maximum(sub(load(z, i), splat(m)), splat(EXP_LOW))
            lanes = fma(load(e, i), finite, lanes)
        total += reduce_sum(lanes)
    return total


@kernel
def block_mass(e, begin, end, lanes):
    """The float64 sum of one block of masses. `lanes` is scratch memory, [16] float64."""
    lanes[:] = 0.0
    for i in range(begin, end, LANES):
        for lane in range(LANES):
            lanes[lane] += e[i + lane]
    half = LANES // 2
    while half > 0:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


@kernel
def masses_of(e, lanes, blocks):
    """The float64 mass of each block, into `blocks`, and of the row."""
    total = 0.0
    for block, begin in enumerate(range(0, e.size, BLOCK)):
        blocks[block] = block_mass(e, begin, min(begin + BLOCK, e.size), lanes)
        total += blocks[block]
    return total


@kernel
def log(x):
    """Natural logarithm of a positive float32, rounded from a float64 series: the same bits whatever the C library."""
    fraction, exponent = math.frexp(np.float64(x))
    if fraction < 0.70710678118654752:
        fraction, exponent = fraction * 2, exponent - 1
    t = (fraction - 1) / (fraction + 1)  # log(fraction) = 2 artanh(t), |t| < 0.172
    square, series = t * t, 0.0
    for odd in range(21, 0, -2):
        series = series * square + 1.0 / odd
    return np.float32(exponent * LN2 + 2.0 * t * series)


@kernel
def scratch_for(size):
    """Scratch memory of a thread: z and e of a row, candidates, bucket weights, lanes, blocks."""
    length = padded(size)
    return (
        np.empty(length, np.float32),
        np.empty(length, np.float32),
        np.empty(size, np.int32),
        np.empty(BUCKETS, np.float64),
        np.empty(LANES, np.float64),
        np.empty(length // BLOCK + 1, np.float64),
    )


@kernel
def cut(z, e, limit, by_mass, candidates, weights):
    """The last token (value, id) that stays, when a token stays while those before it weigh less than `limit`.

    The order is total: value descending, then id ascending; −inf is no candidate. A token weighs one, or its mass. No
    sort: candidates are spread over buckets by value, and only the bucket into which the limit falls is looked at
    again, until what is left is a tie.
    """
    count = 0
    for i in range(candidates.size):
        if z[i] > -INFINITY:
            candidates[count] = i
            count += 1
    before = 0.0
    while True:
        high = low = z[candidates[0]]
        for c in range(1, count):
            high, low = max(high, z[candidates[c]]), min(low, z[candidates[c]])
        if high == low:
            break
        top, scale = np.float64(high), (BUCKETS - 1) / (np.float64(high) - np.float64(low))
        weights[:] = 0.0
        for c in range(count):
            i = candidates[c]
            weights[int((top - z[i]) * scale)] += np.float64(e[i]) if by_mass else 1.0
        bucket = 0
        while bucket < BUCKETS and before + weights[bucket] < limit:
            before += weights[bucket]
            bucket += 1
        if bucket == BUCKETS:  # all together weigh less than the limit
            return low, np.int64(z.size)
        kept = 0
        for c in range(count):
            i = candidates[c]
            if int((top - z[i]) * scale) == bucket:
                candidates[kept] = i
                kept += 1
        count = kept
    for c in range(count):  # equal values, ids ascending
        before += np.float64(e[candidates[c]]) if by_mass else 1.0
        if before >= limit:
            return high, np.int64(candidates[c])
    return high, np.int64(z.size)


@kernel
def drop_after(z, e, value, last):
    """Make the tokens after (value, last) in the total order impossible."""
    for i in range(z.size):
        stays = (z[i] > value) | ((z[i] == value) & (i <= last))
        e[i] = e[i] if stays else np.float32(0)
        z[i] = z[i] if stays else -INFINITY


@kernel
def process_row(logits, rule, banned, scratch):
    """Fill scratch with a row's z and e. Returns m and S; both NaN where the row holds no distribution.

    `rule` is (temperature, top_k, top_p, min_p), the temperature positive.
    """
    temperature, top_k, top_p, min_p = rule
    z, e, candidates, weights, lanes, blocks = scratch
    broken = False
    for i in range(logits.size):
        z[i] = logits[i] / temperature
        broken |= not (z[i] < INFINITY)  # NaN too
    z[logits.size :] = -INFINITY
    for token in banned:
        z[token] = -INFINITY
    tops = load(z, 0)
    for i in range(LANES, z.size, LANES):
        tops = maximum(tops, load(z, i))
    m = reduce_max(tops)
    if broken or m == -INFINITY:
        return np.float32(np.nan), np.float32(np.nan)
    for i in range(0, z.size, LANES):
        store(e, i, exp(sub(load(z, i), splat(m))))
    if 0 < top_k < logits.size:
        value, last = cut(z, e, np.float64(top_k), False, candidates, weights)
        drop_after(z, e, value, last)
    if top_p < 1:
        value, last = cut(z, e, top_p * masses_of(e, lanes, blocks), True, candidates, weights)
        drop_after(z, e, value, last)
    if min_p > 0:
        for i in range(z.size):
            z[i] = z[i] if e[i] >= min_p else -INFINITY
            e[i] = e[i] if e[i] >= min_p else np.float32(0)
    return m, sum_of(e)


@kernel
def draw(e, uniform, lanes, blocks):
    """The first token whose cumulative mass, in order of id, exceeds `uniform` times the whole."""
    limit, before, block = uniform * masses_of(e, lanes, blocks), 0.0, 0
    while before + blocks[block] <= limit:
        before += blocks[block]
        block += 1
    token = 0
    for i in range(block * BLOCK, min((block + 1) * BLOCK, e.size)):
        if e[i] > 0:
            token = i  # the last possible one of the block, if rounding leaves the limit just above their sum
            before += e[i]
            if before > limit:
                break
    return token


@kernel
def rule_of(row, processing):
    """A row's settings and banned tokens. A greedy row has the raw distribution, where nothing is banned."""
    settings, banned_start, banned_ids = processing
    temperature, top_k = np.float32(settings[row, 0]), np.int64(settings[row, 1])
    if temperature == 0:
        return PLAIN, banned_ids[:0]
    rule = (temperature, top_k, np.float32(settings[row, 2]), np.float32(settings[row, 3]))
    return rule, banned_ids[banned_start[row] : banned_start[row + 1]]


@kernel
def greedy(row, z, processing):
    """The lowest id among the largest values not banned, or −1 if all are. Overwrites z where banned."""
    _, banned_start, banned_ids = processing
    for token in banned_ids[banned_start[row] : banned_start[row + 1]]:
        z[token] = -INFINITY
    best, value = -1, -INFINITY
    for i in range(z.size):
        if z[i] > value:
            best, value = i, z[i]
    return best


@kernel
def drawn(row, total, processing, seeds, positions, scratch):
    """The token that the row's processed z and e give for its random number; −1 where they hold no distribution."""
    z, e, _, _, lanes, blocks = scratch
    if total != total:
        return -1
    if processing[0][row, 0] == 0:
        return greedy(row, z, processing)
    return draw(e, uniform_kernel(seeds[row], positions[row], SAMPLING), lanes, blocks)


@parallel_kernel
def score_rows(counter, logits, targets, processing, seeds, positions, logprobs, entropies, raw_logprobs, ids):
    """logits [T, V], targets [T] -> logprob of each target and entropy of its distribution, [T] each.

    Where there is room for them (else they are empty): the raw logprob of each target, and the token drawn.
    """
    scratch = scratch_for(logits.shape[1])
    z, e = scratch[0], scratch[1]
    while True:
        row = take(counter)
        if row >= len(logits):
            break
        rule, banned = rule_of(row, processing)
        m, total = process_row(logits[row], rule, banned, scratch)
        log_total = log(total)
        logprobs[row] = (z[targets[row]] - m) - log_total
        entropies[row] = log_total - weighted_sum(e, z, m) / total
        if ids.size > 0:
            ids[row] = drawn(row, total, processing, seeds, positions, scratch)
        if raw_logprobs.size > 0:
            raw_logprobs[row] = logprobs[row]
            if rule != PLAIN or banned.size > 0:
                m, total = process_row(logits[row], PLAIN, banned[:0], scratch)
                raw_logprobs[row] = (z[targets[row]] - m) - log(total)


@parallel_kernel
def score_rows_backward(counter, logits, targets, processing, entropies, grad_logprobs, grad_entropies):
    """Turn logits, in place, into the gradient that the two outputs of `score_rows` send to them."""
    scratch = scratch_for(logits.shape[1])
    z, e = scratch[0], scratch[1]
    while True:
        row = take(counter)
        if row >= len(logits):
            break
        rule, banned = rule_of(row, processing)
        m, total = process_row(logits[row], rule, banned, scratch)
        log_total, target = log(total), targets[row]
        by_logprob = grad_logprobs[row] if z[target] > -INFINITY else np.float32(0)
        by_entropy, entropy = grad_entropies[row], entropies[row]
        for i in range(logits.shape[1]):
            logp = (z[i] - m) - log_total
            p = e[i] / total
            gradient = -p * (by_logprob + by_entropy * (logp + entropy))
            logits[row, i] = gradient / rule[0] if e[i] > 0 else np.float32(0)
        logits[row, target] += by_logprob / rule[0]
        if total != total:
            logits[row] = total


@parallel_kernel
def sample_rows(counter, logits, processing, seeds, positions, ids, logprobs, raw_logprobs):
    """Draw one token a row; id −1 where a row holds no distribution."""
    scratch = scratch_for(logits.shape[1])
    z = scratch[0]
    while True:
        row = take(counter)
        if row >= len(logits):
            break
        rule, banned = rule_of(row, processing)
        m, total = process_row(logits[row], rule, banned, scratch)
        token = drawn(row, total, processing, seeds, positions, scratch)
        ids[row] = token
        if token < 0:
            continue
        logprobs[row] = (z[token] - m) - log(total)
        raw_logprobs[row] = logprobs[row]
        if rule != PLAIN or banned.size > 0:
            m, total = process_row(logits[row], PLAIN, banned[:0], scratch)
            raw_logprobs[row] = (z[token] - m) - log(total)
