"""Causal attention over ragged sequences: one kernel for decode, prefill, chunked prefill and training.

A query at position p reads keys 0 to p in tiles of 64 at absolute positions, with an online softmax in float32. Per
tile: each score is one chain over the width, times the scale; the masses' sum has one fixed tree over the tile's 64
places; and each output number continues one chain over ascending keys. So a query's bits depend on itself and those
keys alone: not on the queries beside it, nor on where the keys lie. `backward` is in `attention_backward`.

Not `causal` (an image), every query of a sequence reads all of its keys, in the same tiles and chains.

With a `split` (whole tiles; 0 is none) the softmax begins anew every so many keys, and each part joins those before it
in ascending order, as in kernels that give each part of a long context to another core, however many there are.
"""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.jit import inlined, kernel, parallel_kernel, take
from rlloop.numerics.kernels.cpu.compiled.simd import (
    LANES,
    add,
    div,
    exp,
    load,
    load_up_to,
    maximum,
    mul,
    prefetch,
    reduce_max,
    reduce_sum,
    select_less,
    splat,
    store,
    sub,
)
from rlloop.numerics.kernels.cpu.compiled.tiles import add_products, narrow, pack_rows, widen

TILE = 64
TOGETHER = 4  # neighbouring queries that read the same values at once
FETCHED = 128  # past tokens at most that are loaded ahead
ROWS = 128  # queries of a task at most: they share the packing of the keys
MINUS_INFINITY = np.float32(-np.inf)
PLACES = np.arange(LANES).astype(np.float32)


@kernel
def padded(width):
    return (width + LANES - 1) // LANES * LANES


@kernel
def scaled_and_masked(scores, at, scale, low, count):
    """Scores of one query and one tile times the scale, −inf before `low` and from `count` on, in place. Returns the
    largest. Whole sixteens past `count` are not touched."""
    highest = splat(MINUS_INFINITY)
    for i in range(0, count, LANES):
        values = mul(load(scores, at + i), splat(scale))
        if count < i + LANES:
            values = select_less(load(PLACES, 0), splat(np.float32(count - i)), values, splat(MINUS_INFINITY))
        if low > i:
            values = select_less(load(PLACES, 0), splat(np.float32(low - i)), splat(MINUS_INFINITY), values)
        store(scores, at + i, values)
        highest = maximum(highest, values)
    return reduce_max(highest)


@kernel
def _masses(scores, at, count, top):
    """exp(scores - top) of one query and `count` keys of a tile, in place. Returns their sum; past them it is +0."""
    total = splat(np.float32(0))
    for i in range(0, count, LANES):
        mass = exp(sub(load(scores, at + i), splat(top)))
        store(scores, at + i, mass)
        total = add(total, mass)
    return reduce_sum(total)


@kernel
def _scale(values, at, width, factor):
    for i in range(at, at + width, LANES):
        store(values, i, mul(load(values, i), splat(factor)))


@kernel
def _fade(top, highest, line):
    """exp(top - highest): the factor of the sums so far when the largest score grows."""
    store(line, 0, exp(splat(top - highest)))
    return line[0]


@kernel
def join(tops, totals, sums, r, chunk, v_wide, line):
    """Joins a query's part of the softmax, at r, with the parts before it, which lie `chunk` queries further on."""
    highest = max(tops[chunk + r], tops[r])
    earlier, fade = _fade(tops[chunk + r], highest, line), _fade(tops[r], highest, line)
    tops[r] = highest
    totals[r] = totals[chunk + r] * earlier + totals[r] * fade
    for i in range(r * v_wide, (r + 1) * v_wide, LANES):
        before = mul(load(sums, chunk * v_wide + i), splat(earlier))
        store(sums, i, add(before, mul(load(sums, i), splat(fade))))


@kernel
def begin_part(tops, totals, sums, r, chunk, v_wide):
    tops[chunk + r], totals[chunk + r] = tops[r], totals[r]
    tops[r], totals[r] = MINUS_INFINITY, np.float32(0)
    for i in range(r * v_wide, (r + 1) * v_wide, LANES):
        store(sums, chunk * v_wide + i, load(sums, i))
        store(sums, i, splat(np.float32(0)))


@kernel
def _tile(
    q, k_packed, v_packed, width, wide, v_wide, span, first, num_rows, lows, counts, scale, scores, tops, totals, sums,
    line,
):  # fmt: skip
    """One tile of keys, packed in `span` lanes, for the queries `first` to num_rows of a task; query r attends to
    lows[r] up to counts[r]."""
    tiles, count = span // LANES, num_rows - first
    add_products(k_packed, 0, tiles, q, first * wide, wide, 1, count, width, scores, first * span, True)
    for r in range(first, num_rows):
        highest = max(tops[r], scaled_and_masked(scores, r * span, scale, lows[r], counts[r]))
        fade = _fade(tops[r], highest, line)
        tops[r] = highest
        totals[r] = totals[r] * fade + _masses(scores, r * span, counts[r], highest)
        if fade != np.float32(1):
            _scale(sums, r * v_wide, v_wide, fade)
    r, tiles = first, v_wide // LANES
    while r < num_rows:  # several queries at once for the keys that all attend to, then each alone
        end, shared = min(num_rows, r + TOGETHER), counts[r]
        while end < num_rows and counts[end] == shared:
            end += 1
        add_products(v_packed, 0, tiles, scores, r * span, span, 1, end - r, shared, sums, r * v_wide, False)
        for row in range(r, end):
            if counts[row] > shared:
                at, more = row * span + shared, counts[row] - shared
                add_products(
                    v_packed, shared * v_wide, tiles, scores, at, span, 1, 1, more, sums, row * v_wide, False
                )  # fmt: skip
        r = end


@inlined
def _fetch(k, v, v_step, at, width):
    """Begins to load a key and a value of the next sequence. All at once they would only wait for each other."""
    step = 64 // k.itemsize  # a cache line
    for i in range(at * width, (at + 1) * width, step):
        prefetch(k, i)
    for i in range(at * v_step, (at + 1) * v_step, step):
        prefetch(v, i)


@parallel_kernel
def forward(
    counter, q, k, v, v_step, query_start, context, block_start, blocks, block_size, first_task, chunk, heads, groups,
    width, v_width, scale, split, window, causal, sinks, out, lse,
):  # fmt: skip
    """The layout's arrays are flat. Sequence s has the tasks first_task[s] to first_task[s + 1]: one for each `chunk`
    of its queries (each of a token's heads that share a key-value head counts) and each key-value head. Values lie
    `v_step` apart. `sinks` has a number for each head, or none."""
    share, wide, v_wide = heads // groups, padded(width), padded(v_width)
    queries, sums = np.empty(chunk * wide, np.float32), np.empty(2 * chunk * v_wide, np.float32)
    scores = np.empty(chunk * TILE, np.float32)
    k_packed, v_packed = np.empty(wide * TILE, np.float32), np.empty(v_wide * TILE, np.float32)
    tops, totals = np.empty(2 * chunk, np.float32), np.empty(2 * chunk, np.float32)
    lows, counts, starts = np.zeros(chunk, np.int64), np.empty(chunk, np.int64), np.empty(TILE, np.int64)
    line = np.empty(LANES, np.float32)
    tasks, sequence = first_task[-1], len(first_task) - 2
    task = take(counter)
    while task < tasks:
        item = tasks - 1 - task  # last task first: the later queries of a sequence have more to read
        while first_task[sequence] > item:
            sequence -= 1
        chunk_index, group = (item - first_task[sequence]) // groups, (item - first_task[sequence]) % groups
        token, offset = query_start[sequence], context[sequence]
        ahead = min(context[sequence - 1], FETCHED) if sequence > 0 else 0
        begin = chunk_index * chunk
        num_rows = min(chunk, (query_start[sequence + 1] - token) * share - begin)
        for r in range(num_rows):
            row = (token + (begin + r) // share) * heads + group * share + (begin + r) % share
            widen(q, row * width, width, queries, r * wide)
            tops[r], totals[r] = MINUS_INFINITY, np.float32(0)
            if len(sinks) > 0:  # the sink counts as a first key whose value is 0
                tops[r], totals[r] = sinks[group * share + (begin + r) % share], np.float32(1)
        for i in range(num_rows * v_wide):
            sums[i] = np.float32(0)
        end_token = query_start[sequence + 1] - 1 - token
        last = offset + ((begin + num_rows - 1) // share if causal else end_token)  # position of the last key
        lowest = max(0, offset + begin // share - window + 1) if window > 0 else 0
        for tile in range(lowest // TILE * TILE, last + 1, TILE):
            keys = min(TILE, last + 1 - tile)
            block, within = sequence * blocks + tile // block_size, tile % block_size
            for j in range(keys):
                if within == block_size:
                    block, within = block + 1, 0
                slot, within = block_start[block] + within, within + 1
                starts[j] = (slot * groups + group) * width
                if tile + j < ahead:
                    place = (sequence - 1) * blocks + (tile + j) // block_size
                    _fetch(k, v, v_step, (block_start[place] + (tile + j) % block_size) * groups + group, width)
                place = (slot * groups + group) * v_step
                for i in range(0, v_width, LANES):
                    store(v_packed, j * v_wide + i, load_up_to(v, place + i, v_width - i))
            span = padded(keys)
            for j in range(keys, span):  # the last key stands in for those past it: their scores are masked
                starts[j] = starts[keys - 1]
            for lane in range(0, span, LANES):
                pack_rows(k, starts, lane, 0, width, k_packed, lane, span)
            first = max(0, (tile - offset) * share - begin) if causal else 0
            if split > 0 and tile > 0 and tile % split == 0:
                for r in range(first, num_rows):
                    if tile > split:
                        join(tops, totals, sums, r, chunk, v_wide, line)
                    begin_part(tops, totals, sums, r, chunk, v_wide)
            end = num_rows
            if window > 0:
                end = min(num_rows, (tile + TILE + window - 1 - offset) * share - begin)
            for r in range(first, end):
                position = offset + (begin + r) // share if causal else last
                counts[r] = min(TILE, position - tile + 1)
                lows[r] = max(0, position - window + 1 - tile) if window > 0 else 0
            _tile(
                queries, k_packed, v_packed, width, wide, v_wide, span, first, end, lows, counts, scale, scores, tops,
                totals, sums, line,
            )  # fmt: skip
        for r in range(num_rows):
            row = (token + (begin + r) // share) * heads + group * share + (begin + r) % share
            if 0 < split <= offset + (begin + r) // share:
                join(tops, totals, sums, r, chunk, v_wide, line)
            for i in range(r * v_wide, (r + 1) * v_wide, LANES):
                store(sums, i, div(load(sums, i), splat(totals[r])))
            narrow(sums, r * v_wide, v_width, out, row * v_width)
            lse[row] = tops[r] + np.float32(np.log(totals[r]))
        task = take(counter)


def plan(counts: np.ndarray, heads: int, groups: int, threads: int) -> tuple[np.ndarray, int]:
    """(first_task, chunk) for `forward`, of sequences with so many query tokens."""
    share = heads // groups
    rows = counts * share
    chunk = ROWS
    if threads > 1:  # enough tasks to share out evenly, yet heads stay together unless threads would idle
        least = share if len(rows) * groups >= threads else 1
        chunk = min(ROWS, max(least, int(rows.sum()) * groups // (4 * threads)))
    first_task = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(-(-rows // chunk) * groups, out=first_task[1:])
    return first_task, chunk
