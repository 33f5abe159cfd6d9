"""Gradients of attention, from its output and log-sum-exp, over whole sequences whose keys are the flat tokens.

With p the softmax recomputed from the log-sum-exp: dv_j = sum of p_ij do_i; ds_ij = p_ij (do_i . v_j - do_i . o_i)
scale; dq_i = sum of ds_ij k_j; dk_j = sum of ds_ij q_i. A task is one family's share of one key-value head, and
nothing else writes to its rows of the gradients, so their bits depend on no thread. Inside, a block of queries meets a
tile of keys at a time, and every sum is made by the products of `tiles`, in ascending order: the sums of a prefix go on
over the queries of the sequences that read it, in turn.
"""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.attention import PLACES, TILE, padded
from rlloop.numerics.kernels.cpu.compiled.jit import kernel, parallel_kernel, take
from rlloop.numerics.kernels.cpu.compiled.simd import (
    LANES,
    exp,
    fma,
    load,
    mul,
    reduce_sum,
    select_less,
    splat,
    store,
    sub,
)
from rlloop.numerics.kernels.cpu.compiled.tiles import add_products, narrow, pack_rows, widen

BLOCK = 64  # queries (a token's heads that share a key-value head count each) that meet a tile at a time


@kernel
def _pack_heads(source, first, begin, end, group, groups, width, wide, rows, packed, starts):
    """One head of the tokens at positions `begin`, where a tile begins, up to `end` of a sequence whose position 0 is
    token `first`: to rows [end, wide] and, by tiles of 64 tokens, to packed [tiles, wide, 64]; the last tile [wide,
    span], for whole sixteens of its tokens."""
    for j in range(begin, end):
        widen(source, ((first + j) * groups + group) * width, width, rows, j * wide)
    for tile in range(begin, end, TILE):
        span = padded(min(TILE, end - tile))
        for lane in range(span):
            starts[lane] = min(tile + lane, end - 1) * wide
        for lane in range(0, span, LANES):
            pack_rows(rows, starts, lane, 0, wide, packed, tile * wide + lane, span)


@kernel
def _dot(a, b, at, width):
    lanes = splat(np.float32(0))
    for i in range(at, at + width, LANES):
        lanes = fma(load(a, i), load(b, i), lanes)
    return reduce_sum(lanes)


@kernel
def _masses_and_slopes(masses, slopes, num_rows, span, unseen, seen, lse, deltas, scale):
    """Scores become masses p, and do . v becomes ds, in place; +0 for masked keys."""
    zero = splat(np.float32(0))
    for r in range(num_rows):
        for i in range(0, span, LANES):
            at, left = r * span + i, splat(np.float32(seen[r] - i))
            p = exp(sub(mul(load(masses, at), splat(scale)), splat(lse[r])))
            slope = mul(mul(p, sub(load(slopes, at), splat(deltas[r]))), splat(scale))
            if unseen[r] > i:
                before = splat(np.float32(unseen[r] - i))
                p = select_less(load(PLACES, 0), before, zero, p)
                slope = select_less(load(PLACES, 0), before, zero, slope)
            store(masses, at, select_less(load(PLACES, 0), left, p, zero))
            store(slopes, at, select_less(load(PLACES, 0), left, slope, zero))


@kernel
def _add_to_keys(factors, num_rows, span, rows, wide, turned, starts, sums, at, keys):
    """sums[at:][j] += factors[r, j] rows[r] over ascending r, for `keys` keys of a tile in `span` lanes."""
    for lane in range(0, num_rows, LANES):
        for i in range(LANES):
            starts[i] = min(lane + i, num_rows - 1) * span
        pack_rows(factors, starts, 0, 0, span, turned, lane, BLOCK)
    add_products(rows, 0, wide // LANES, turned, 0, BLOCK, 1, keys, num_rows, sums, at, False)


@kernel
def _narrow_heads(sums, begin, end, first, group, groups, width, wide, out):
    """Positions `begin` up to `end` of sums [end, wide] to one head of a sequence whose position 0 is token `first`."""
    for j in range(begin, end):
        narrow(sums, j * wide, width, out, ((first + j) * groups + group) * width)


@parallel_kernel
def backward(
    counter, q, k, v, out, lse, grad, query_start, families, heads, groups, width, v_width, scale, window, causal,
    grad_q, grad_k, grad_v,
):  # fmt: skip
    """`families` are those of `layout.AttentionLayout`."""
    share, wide, v_wide = heads // groups, padded(width), padded(v_width)
    longest = 0
    for family in range(len(families) - 1):
        first = families[family]
        prefix, longer = query_start[first + 1] - query_start[first], 0
        for s in range(first + 1, families[family + 1]):
            longer = max(longer, query_start[s + 1] - query_start[s])
        longest = max(longest, prefix + longer)
    room = (longest + TILE - 1) // TILE * TILE
    k_rows, v_rows = np.empty(room * wide, np.float32), np.empty(room * v_wide, np.float32)
    k_packed, v_packed = np.empty(room * wide, np.float32), np.empty(room * v_wide, np.float32)
    k_sums, v_sums = np.empty(room * wide, np.float32), np.empty(room * v_wide, np.float32)
    queries, q_sums = np.empty(BLOCK * wide, np.float32), np.empty(BLOCK * wide, np.float32)
    grads, outs = np.empty(BLOCK * v_wide, np.float32), np.empty(BLOCK * v_wide, np.float32)
    masses, slopes = np.empty(BLOCK * TILE, np.float32), np.empty(BLOCK * TILE, np.float32)
    turned = np.empty(BLOCK * TILE, np.float32)
    tops, deltas = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    unseen, seen, starts = np.zeros(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(TILE, np.int64)
    task = take(counter)
    while task < (len(families) - 1) * groups:
        first, group = families[task // groups], task % groups
        prefix = query_start[first + 1] - query_start[first]
        for sequence in range(first, families[task // groups + 1]):
            before = prefix if sequence > first else 0
            token = query_start[sequence] - before  # of position 0, if the prefix stood there
            count = query_start[sequence + 1] - token
            _pack_heads(k, token, before, count, group, groups, width, wide, k_rows, k_packed, starts)
            _pack_heads(v, token, before, count, group, groups, v_width, v_wide, v_rows, v_packed, starts)
            k_sums[before * wide : count * wide] = np.float32(0)
            v_sums[before * v_wide : count * v_wide] = np.float32(0)
            for begin in range(before * share, count * share, BLOCK):
                num_rows = min(BLOCK, count * share - begin)
                for r in range(num_rows):
                    row = (token + (begin + r) // share) * heads + group * share + (begin + r) % share
                    widen(q, row * width, width, queries, r * wide)
                    widen(grad, row * v_width, v_width, grads, r * v_wide)
                    widen(out, row * v_width, v_width, outs, r * v_wide)
                    tops[r], deltas[r] = lse[row], _dot(grads, outs, r * v_wide, v_wide)
                q_sums[: num_rows * wide] = np.float32(0)
                last = (begin + num_rows - 1) // share if causal else count - 1
                lowest = max(0, begin // share - window + 1) if window > 0 else 0
                for tile in range(lowest // TILE * TILE, last + 1, TILE):
                    keys, span = min(TILE, last + 1 - tile), padded(min(TILE, count - tile))
                    for r in range(num_rows):
                        seen[r] = ((begin + r) // share if causal else last) - tile + 1
                        unseen[r] = seen[r] - window if window > 0 else 0
                    add_products(
                        k_packed, tile * wide, span // LANES, queries, 0, wide, 1, num_rows, wide, masses, 0, True
                    )  # fmt: skip
                    add_products(
                        v_packed, tile * v_wide, span // LANES, grads, 0, v_wide, 1, num_rows, v_wide, slopes, 0, True
                    )  # fmt: skip
                    _masses_and_slopes(masses, slopes, num_rows, span, unseen, seen, tops, deltas, scale)
                    add_products(
                        k_rows, tile * wide, wide // LANES, slopes, 0, span, 1, num_rows, keys, q_sums, 0, False
                    )  # fmt: skip
                    _add_to_keys(slopes, num_rows, span, queries, wide, turned, starts, k_sums, tile * wide, keys)
                    _add_to_keys(masses, num_rows, span, grads, v_wide, turned, starts, v_sums, tile * v_wide, keys)
                for r in range(num_rows):
                    row = (token + (begin + r) // share) * heads + group * share + (begin + r) % share
                    narrow(q_sums, r * wide, width, grad_q, row * width)
            if sequence > first:
                _narrow_heads(k_sums, before, count, token, group, groups, width, wide, grad_k)
                _narrow_heads(v_sums, before, count, token, group, groups, v_width, v_wide, grad_v)
        _narrow_heads(k_sums, 0, prefix, query_start[first], group, groups, width, wide, grad_k)
        _narrow_heads(v_sums, 0, prefix, query_start[first], group, groups, v_width, v_wide, grad_v)
        task = take(counter)
