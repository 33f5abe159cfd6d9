"""The lightning indexer's selection, and attention over it. One head of keys that all query heads share.

`select` scores every past position of a query: per head one chain over the width, times the scale, negative ones to 0;
then one chain over the heads, in order. Attention then is that of `attention`, tile by tile of 64, over the selected
positions in ascending order, and splits by places among those: where every position is selected, it has the same bits.
"""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.attention import MINUS_INFINITY, TILE, _tile, begin_part, join, padded
from rlloop.numerics.kernels.cpu.compiled.attention_backward import BLOCK, _add_to_keys, _dot, _masses_and_slopes
from rlloop.numerics.kernels.cpu.compiled.jit import kernel, parallel_kernel, take
from rlloop.numerics.kernels.cpu.compiled.simd import (
    LANES,
    add,
    div,
    fma,
    load,
    mul,
    reduce_sum,
    select_less,
    splat,
    store,
)
from rlloop.numerics.kernels.cpu.compiled.tiles import add_products, narrow, pack_rows, widen

QUERIES = 16  # of a task of the indexer: they share the packing of the keys
ZERO = np.float32(0)


@kernel
def _sequence_of(starts, token):
    sequence = 0
    while starts[sequence + 1] <= token:
        sequence += 1
    return sequence


@kernel
def _largest(values, count, how_many, out, at):
    """The places of the `how_many` largest of values[:count], the lowest among equals, ascending; then −1."""
    for i in range(count):
        values[i] = values[i] + ZERO if values[i] == values[i] else MINUS_INFINITY  # −0 becomes +0
    if count <= how_many:
        for i in range(how_many):
            out[at + i] = i if i < count else -1
        return
    edge = np.partition(values[:count], count - how_many)[count - how_many]
    ties = how_many
    for i in range(count):
        if values[i] > edge:
            ties -= 1
    for i in range(count):
        tied = values[i] == edge and ties > 0
        if tied:
            ties -= 1
        if tied or values[i] > edge:
            out[at] = i
            at += 1


@parallel_kernel
def select(
    counter, q, k, weights, query_start, context, block_start, blocks, block_size, first_task, heads, width, scale,
    how_many, selected,
):  # fmt: skip
    """Sequence s has the tasks first_task[s] to first_task[s + 1], one for each QUERIES of its queries."""
    wide = padded(width)
    queries, scores = np.empty(QUERIES * heads * wide, np.float32), np.empty(QUERIES * heads * TILE, np.float32)
    packed, starts = np.empty(wide * TILE, np.float32), np.empty(TILE, np.int64)
    longest = 0
    for s in range(len(context)):
        longest = max(longest, context[s] + query_start[s + 1] - query_start[s])
    room = (longest + TILE - 1) // TILE * TILE
    totals = np.empty(QUERIES * room, np.float32)
    tasks = first_task[-1]
    task = take(counter)
    while task < tasks:
        sequence = _sequence_of(first_task, task)
        begin = (task - first_task[sequence]) * QUERIES
        first, offset = query_start[sequence] + begin, context[sequence] + begin
        count = min(QUERIES, query_start[sequence + 1] - first)
        for row in range(count * heads):
            widen(q, (first * heads + row) * width, width, queries, row * wide)
        last = offset + count - 1
        for tile in range(0, last + 1, TILE):
            keys = min(TILE, last + 1 - tile)
            span = padded(keys)
            for j in range(span):
                position = tile + min(j, keys - 1)
                slot = block_start[sequence * blocks + position // block_size] + position % block_size
                starts[j] = slot * width
            for lane in range(0, span, LANES):
                pack_rows(k, starts, lane, 0, width, packed, lane, span)
            add_products(packed, 0, span // LANES, queries, 0, wide, 1, count * heads, width, scores, 0, True)
            for r in range(count):
                for i in range(0, span, LANES):
                    total = splat(ZERO)
                    for h in range(heads):
                        score = mul(load(scores, (r * heads + h) * span + i), splat(scale))
                        score = select_less(score, splat(ZERO), splat(ZERO), score)  # NaN stays
                        total = fma(splat(weights[(first + r) * heads + h]), score, total)
                    store(totals, r * room + tile + i, total)
        for r in range(count):
            _largest(totals[r * room : (r + 1) * room], offset + r + 1, how_many, selected, (first + r) * how_many)
        task = take(counter)


@kernel
def _count_of(selected, at, how_many):
    count = 0
    while count < how_many and selected[at + count] >= 0:
        count += 1
    return count


@parallel_kernel
def forward(
    counter, q, k, v, v_step, selected, how_many, query_start, block_start, blocks, block_size, heads, width, v_width,
    scale, split, out, lse,
):  # fmt: skip
    """A task is a query, with all its heads."""
    wide, v_wide = padded(width), padded(v_width)
    queries, sums = np.empty(heads * wide, np.float32), np.empty(2 * heads * v_wide, np.float32)
    scores = np.empty(heads * TILE, np.float32)
    k_packed, v_packed = np.empty(wide * TILE, np.float32), np.empty(v_wide * TILE, np.float32)
    tops, totals = np.empty(2 * heads, np.float32), np.empty(2 * heads, np.float32)
    lows, counts, starts = np.zeros(heads, np.int64), np.empty(heads, np.int64), np.empty(TILE, np.int64)
    line = np.empty(LANES, np.float32)
    tokens = len(lse) // heads
    token = take(counter)
    while token < tokens:
        sequence = _sequence_of(query_start, token)
        seen = _count_of(selected, token * how_many, how_many)
        for r in range(heads):
            widen(q, (token * heads + r) * width, width, queries, r * wide)
            tops[r], totals[r] = MINUS_INFINITY, ZERO
        sums[:] = ZERO
        for tile in range(0, seen, TILE):
            keys = min(TILE, seen - tile)
            counts[:] = keys
            if split > 0 and tile > 0 and tile % split == 0:
                for r in range(heads):
                    if tile > split:
                        join(tops, totals, sums, r, heads, v_wide, line)
                    begin_part(tops, totals, sums, r, heads, v_wide)
            span = padded(keys)
            for j in range(span):
                position = selected[token * how_many + tile + min(j, keys - 1)]
                slot = block_start[sequence * blocks + position // block_size] + position % block_size
                starts[j] = slot * width
                if j < keys:
                    widen(v, slot * v_step, v_width, v_packed, j * v_wide)
            for lane in range(0, span, LANES):
                pack_rows(k, starts, lane, 0, width, k_packed, lane, span)
            _tile(
                queries, k_packed, v_packed, width, wide, v_wide, span, 0, heads, lows, counts, scale, scores, tops,
                totals, sums, line,
            )  # fmt: skip
        for r in range(heads):
            if 0 < split < seen:
                join(tops, totals, sums, r, heads, v_wide, line)
            for i in range(r * v_wide, (r + 1) * v_wide, LANES):
                store(sums, i, div(load(sums, i), splat(totals[r])))
            narrow(sums, r * v_wide, v_width, out, (token * heads + r) * v_width)
            lse[token * heads + r] = tops[r] + np.float32(np.log(totals[r]))
        token = take(counter)


@kernel
def _add_rows(tile, keys, wide, selected, at, sums):
    for j in range(keys):
        for i in range(0, wide, LANES):
            to = selected[at + j] * wide + i
            store(sums, to, add(load(sums, to), load(tile, j * wide + i)))


@parallel_kernel
def backward(
    counter, q, k, v, selected, how_many, out, lse, grad, query_start, heads, width, v_width, scale, grad_q, grad_k,
    grad_v,
):  # fmt: skip
    """A task is a sequence: its queries in turn, each with blocks of its heads."""
    wide, v_wide = padded(width), padded(v_width)
    longest = 0
    for s in range(len(query_start) - 1):
        longest = max(longest, query_start[s + 1] - query_start[s])
    k_rows, v_rows = np.empty(longest * wide, np.float32), np.empty(longest * v_wide, np.float32)
    k_sums, v_sums = np.empty(longest * wide, np.float32), np.empty(longest * v_wide, np.float32)
    k_packed, v_packed = np.empty(TILE * wide, np.float32), np.empty(TILE * v_wide, np.float32)
    k_tile, v_tile = np.empty(TILE * wide, np.float32), np.empty(TILE * v_wide, np.float32)
    queries, q_sums = np.empty(BLOCK * wide, np.float32), np.empty(BLOCK * wide, np.float32)
    grads, outs = np.empty(BLOCK * v_wide, np.float32), np.empty(BLOCK * v_wide, np.float32)
    masses, slopes = np.empty(BLOCK * TILE, np.float32), np.empty(BLOCK * TILE, np.float32)
    turned = np.empty(BLOCK * TILE, np.float32)
    tops, deltas = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    unseen, visible, starts = np.zeros(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(TILE, np.int64)
    sequence = take(counter)
    while sequence < len(query_start) - 1:
        begin, count = query_start[sequence], query_start[sequence + 1] - query_start[sequence]
        for j in range(count):
            widen(k, (begin + j) * width, width, k_rows, j * wide)
            widen(v, (begin + j) * v_width, v_width, v_rows, j * v_wide)
        k_sums[: count * wide] = ZERO
        v_sums[: count * v_wide] = ZERO
        for token in range(begin, begin + count):
            at = token * how_many
            seen = _count_of(selected, at, how_many)
            for head in range(0, heads, BLOCK):
                num_rows = min(BLOCK, heads - head)
                for r in range(num_rows):
                    row = token * heads + head + r
                    widen(q, row * width, width, queries, r * wide)
                    widen(grad, row * v_width, v_width, grads, r * v_wide)
                    widen(out, row * v_width, v_width, outs, r * v_wide)
                    tops[r], deltas[r] = lse[row], _dot(grads, outs, r * v_wide, v_wide)
                q_sums[: num_rows * wide] = ZERO
                for tile in range(0, seen, TILE):
                    keys = min(TILE, seen - tile)
                    visible[:num_rows] = keys
                    for j in range(TILE):
                        starts[j] = selected[at + tile + min(j, keys - 1)] * wide
                    for j in range(keys):
                        k_tile[j * wide : (j + 1) * wide] = k_rows[starts[j] : starts[j] + wide]
                    for lane in range(0, TILE, LANES):
                        pack_rows(k_rows, starts, lane, 0, wide, k_packed, lane, TILE)
                    for j in range(TILE):
                        starts[j] = starts[j] // wide * v_wide
                    for lane in range(0, TILE, LANES):
                        pack_rows(v_rows, starts, lane, 0, v_wide, v_packed, lane, TILE)
                    add_products(k_packed, 0, TILE // LANES, queries, 0, wide, 1, num_rows, wide, masses, 0, True)
                    add_products(v_packed, 0, TILE // LANES, grads, 0, v_wide, 1, num_rows, v_wide, slopes, 0, True)
                    _masses_and_slopes(masses, slopes, num_rows, TILE, unseen, visible, tops, deltas, scale)
                    add_products(k_tile, 0, wide // LANES, slopes, 0, TILE, 1, num_rows, keys, q_sums, 0, False)
                    k_tile[: keys * wide] = ZERO
                    v_tile[: keys * v_wide] = ZERO
                    _add_to_keys(slopes, num_rows, TILE, queries, wide, turned, starts, k_tile, 0, keys)
                    _add_to_keys(masses, num_rows, TILE, grads, v_wide, turned, starts, v_tile, 0, keys)
                    _add_rows(k_tile, keys, wide, selected, at + tile, k_sums)
                    _add_rows(v_tile, keys, v_wide, selected, at + tile, v_sums)
                for r in range(num_rows):
                    narrow(q_sums, r * wide, width, grad_q, (token * heads + head + r) * width)
        for j in range(count):
            narrow(k_sums, j * wide, width, grad_k, (begin + j) * width)
            narrow(v_sums, j * v_wide, v_width, grad_v, (begin + j) * v_width)
        sequence = take(counter)


@parallel_kernel
def layer_norm(counter, x, weight, bias, eps, out, width):
    """(x − mean) / sqrt(variance + eps) * weight + bias; sums in sixteen lanes and one tree."""
    line = np.empty(padded(width), np.float32)
    row = take(counter)
    while row < len(out) // width:
        widen(x, row * width, width, line, 0)
        total = splat(ZERO)
        for i in range(0, width, LANES):
            total = add(total, load(line, i))
        mean = reduce_sum(total) / np.float32(width)
        for i in range(width):
            line[i] -= mean
        total = splat(ZERO)
        for i in range(0, width, LANES):
            total = fma(load(line, i), load(line, i), total)
        scale = np.float32(1) / np.sqrt(reduce_sum(total) / np.float32(width) + eps)
        for i in range(width):
            line[i] = line[i] * scale * weight[i] + bias[i]
        narrow(line, 0, width, out, row * width)
        row = take(counter)
