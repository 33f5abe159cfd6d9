"""Causal attention over ragged sequences: one kernel for decode, prefill, chunked prefill and training.

A query at position p reads keys 0 to p in tiles of 64 at absolute positions, with an online softmax in float32. What a
query does depends on nothing but itself and those keys, so how many queries stand beside it, and where the keys lie,
cannot matter.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from rlloop.numerics.cpu.jit import kernel, parallel_kernel
from rlloop.numerics.simd import (
    LANES,
    add,
    broadcast,
    exp,
    fma,
    load,
    load_part,
    maximum,
    mul,
    reduce_max,
    reduce_sum,
    splat,
    store,
    store_part,
    sub,
)

TILE = 64
ZERO = np.float32(0)
MINUS_INFINITY = np.float32(-np.inf)


@kernel
def _dot(a, i, b, j, width):
    """Sixteen lanes along the width, then the tree."""
    lanes = splat(ZERO)
    whole = width - width % LANES
    for d in range(0, whole, LANES):
        lanes = fma(load(a, i + d), load(b, j + d), lanes)
    if whole < width:
        lanes = fma(load_part(a, i + whole, width - whole), load_part(b, j + whole, width - whole), lanes)
    return reduce_sum(lanes)


@kernel
def _slots(block_start, block, sequence_blocks, tile, count, slots):
    for j in range(count):
        position = tile + j
        slots[j] = block_start[sequence_blocks + position // block] + position % block


@kernel
def _scores(q, at, k, slots, count, stride, offset, width, scale, scores):
    """scores[j] = q . k[j] * scale for the tile's first `count` keys, −inf for the rest; returns the largest."""
    for j in range(count):
        scores[j] = _dot(q, at, k, slots[j] * stride + offset, width) * scale
    for j in range(count, TILE):
        scores[j] = MINUS_INFINITY
    return reduce_max(maximum(maximum(load(scores, 0), load(scores, 16)), maximum(load(scores, 32), load(scores, 48))))


@kernel
def _masses(scores, top):
    """scores = exp(scores - top) in place; returns their sum."""
    total = splat(ZERO)
    for j in range(0, TILE, LANES):
        mass = exp(sub(load(scores, j), splat(top)))
        store(scores, j, mass)
        total = add(total, mass)
    return reduce_sum(total)


@kernel
def _exp(x, line):
    store(line, 0, exp(splat(x)))
    return line[0]


@kernel
def _query(
    q, k, v, block_start, block, blocks_at, position, head, group, heads, groups, width, v_width, scale, row,
    out, lse, scores, slots, sums, line,
):  # fmt: skip
    at = (row * heads + head) * width
    top, total = MINUS_INFINITY, ZERO
    for tile in range(0, position + 1, TILE):
        count = min(TILE, position + 1 - tile)
        _slots(block_start, block, blocks_at, tile, count, slots)
        highest = max(top, _scores(q, at, k, slots, count, groups * width, group * width, width, scale, scores))
        fade = _exp(top - highest, line)  # 0 at the first tile, whose sums are 0 already
        top = highest
        total = total * fade + _masses(scores, top)
        for d in range(0, v_width, LANES):
            lanes = mul(load(sums, d), splat(fade)) if tile else splat(ZERO)
            left = v_width - d
            if left >= LANES:
                for j in range(count):
                    lanes = fma(splat(scores[j]), load(v, (slots[j] * groups + group) * v_width + d), lanes)
            else:
                for j in range(count):
                    lanes = fma(splat(scores[j]), load_part(v, (slots[j] * groups + group) * v_width + d, left), lanes)
            store(sums, d, lanes)
    scale_out = splat(np.float32(1) / total)
    for d in range(0, v_width, LANES):
        count = min(LANES, v_width - d)
        store_part(out, (row * heads + head) * v_width + d, count, mul(load(sums, d), scale_out))
    lse[row * heads + head] = top + np.float32(np.log(total))


@parallel_kernel
def forward(
    q, k, v, rows, sequences, positions, block_start, block, blocks, heads, groups, width, v_width, scale, out, lse,
    parts,
):  # fmt: skip
    """Query `rows[i]` stands at `positions[i]` of `sequences[i]`. Part p takes queries p, p + parts, ...: even work."""
    queries = len(rows)
    for part in prange(parts):
        scores, slots = np.empty(TILE, np.float32), np.empty(TILE, np.int64)
        sums, line = np.empty(v_width + LANES, np.float32), np.empty(LANES, np.float32)
        for item in range(part, queries * groups, parts):
            i, group = item // groups, item % groups
            share = heads // groups
            for head in range(group * share, (group + 1) * share):
                _query(
                    q, k, v, block_start, block, sequences[i] * blocks, positions[i], head, group, heads, groups,
                    width, v_width, scale, rows[i], out, lse, scores, slots, sums, line,
                )  # fmt: skip


@kernel
def _turn(rows, first, count, stride, offset, width, columns):
    """columns[d * TILE + j] = rows[(first + j) * stride + offset + d]; 0 beyond `count`."""
    for d in range(width):
        for j in range(count):
            columns[d * TILE + j] = rows[(first + j) * stride + offset + d]
        for j in range(count, TILE):
            columns[d * TILE + j] = ZERO


@kernel
def _turn_back(columns, first, count, stride, offset, width, rows):
    for j in range(count):
        for d in range(width):
            rows[(first + j) * stride + offset + d] = columns[d * TILE + j]


@kernel
def _products(x, at, columns, width, out):
    """out[j] = x . column j, for the whole tile: two times two chains, so that none waits for another."""
    for j in range(0, TILE, 2 * LANES):
        low, high, low_odd, high_odd = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for d in range(0, width - 1, 2):
            even, odd = broadcast(x, at + d), broadcast(x, at + d + 1)
            low = fma(even, load(columns, d * TILE + j), low)
            high = fma(even, load(columns, d * TILE + j + LANES), high)
            low_odd = fma(odd, load(columns, (d + 1) * TILE + j), low_odd)
            high_odd = fma(odd, load(columns, (d + 1) * TILE + j + LANES), high_odd)
        if width % 2:
            even = broadcast(x, at + width - 1)
            low = fma(even, load(columns, (width - 1) * TILE + j), low)
            high = fma(even, load(columns, (width - 1) * TILE + j + LANES), high)
        store(out, j, add(low, low_odd))
        store(out, j + LANES, add(high, high_odd))


@kernel
def _spread(factors, seen, x, at, width, columns):
    """columns[d, j] += x[at + d] * factors[j], for j up to `seen` rounded up to whole lanes."""
    for j in range(0, seen, LANES):
        mine = load(factors, j)
        for d in range(width):
            store(columns, d * TILE + j, fma(broadcast(x, at + d), mine, load(columns, d * TILE + j)))


@kernel
def _gather(factors, seen, rows, first, stride, offset, width, out, at):
    """out[at:] += sum of factors[j] * row j."""
    for d in range(0, width, LANES):
        part = min(LANES, width - d)
        total = load_part(out, at + d, part)
        for j in range(seen):
            total = fma(broadcast(factors, j), load_part(rows, (first + j) * stride + offset + d, part), total)
        store_part(out, at + d, part, total)


@parallel_kernel
def backward(
    q, k, v, out, lse, grad, starts, heads, groups, width, v_width, scale, grad_q, grad_k, grad_v
):  # fmt: skip
    """Whole sequences, keys and values contiguous; all arrays float32, the gradients zero at entry.

    A task is one sequence's share of one key-value head: nothing else writes to its rows of the gradients. With p the
    softmax recomputed from `lse`: dv_j += p_ij do_i, ds_ij = p_ij (do_i . v_j - do_i . o_i), dq_i += ds_ij k_j scale,
    dk_j += ds_ij q_i scale, over ascending tiles, i, heads and j. Keys and values of a tile are turned, so that lanes
    run along j and no sum across lanes is needed.
    """
    share = heads // groups
    for task in prange((len(starts) - 1) * groups):
        sequence, group = task // groups, task % groups
        begin, end = starts[sequence], starts[sequence + 1]
        masses, slopes = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
        keys, values = np.empty(width * TILE, np.float32), np.empty(v_width * TILE, np.float32)
        to_keys, to_values = np.empty(width * TILE, np.float32), np.empty(v_width * TILE, np.float32)
        stride, offset, v_stride, v_offset = groups * width, group * width, groups * v_width, group * v_width
        for tile in range(begin, end, TILE):
            count = min(TILE, end - tile)
            _turn(k, tile, count, stride, offset, width, keys)
            _turn(v, tile, count, v_stride, v_offset, v_width, values)
            to_keys[:], to_values[:] = ZERO, ZERO
            for i in range(tile, end):
                seen = min(count, i + 1 - tile)
                for head in range(group * share, (group + 1) * share):
                    at, v_at = (i * heads + head) * width, (i * heads + head) * v_width
                    delta, low = splat(_dot(grad, v_at, out, v_at, v_width)), splat(lse[i * heads + head])
                    _products(q, at, keys, width, masses)
                    _products(grad, v_at, values, v_width, slopes)
                    for j in range(0, seen, LANES):
                        mass = exp(sub(mul(load(masses, j), splat(scale)), low))
                        store(masses, j, mass)
                        store(slopes, j, mul(mul(mass, sub(load(slopes, j), delta)), splat(scale)))
                    masses[seen:], slopes[seen:] = ZERO, ZERO
                    _spread(slopes, seen, q, at, width, to_keys)
                    _spread(masses, seen, grad, v_at, v_width, to_values)
                    _gather(slopes, seen, k, tile, stride, offset, width, grad_q, at)
            _turn_back(to_keys, tile, count, stride, offset, width, grad_k)
            _turn_back(to_values, tile, count, v_stride, v_offset, v_width, grad_v)
