"""The loading warpgroups of `backward_by_query` and `backward_by_key`: what a block owns, and other tiles, in a ring.

A block is 128 queries of one head, or 128 keys; a warpgroup that multiplies has 64 of them. Tiles are of 64, and so are
the multiples of which shared prefixes are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from rlloop.numerics.kernels.triton.prefill_loads import LOADERS, WORKERS, order, place

TILE = gl.constexpr(64)
BLOCK = gl.constexpr(WORKERS * TILE)
STAGES = gl.constexpr(4)  # tiles on their way
OWNED = gl.constexpr(2 * WORKERS * LOADERS + 1)  # arrivals: two tiles a warpgroup, and what the block is


@gluon.jit
def _fetch(described, memory, step, column, token, tile, rows, full, into, W: gl.constexpr):
    """Rows `tile` to `tile` + TILE of a sequence of that many rows from `token` on; zeros from its end on."""
    if tile + TILE <= rows:
        mbarrier.expect(full, TILE * W * 2)
        mbarrier.arrive(full, count=LOADERS - 1)
        tma.async_copy_global_to_shared(described, [token + tile, column], full, into)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
        row = tile + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
        d = gl.arange(0, W, gl.SliceLayout(0, LAYOUT))
        at = memory + column + ((token + row).to(gl.int64) * step)[:, None] + d[None, :]
        async_copy.async_copy_global_to_shared(into, at, (row < rows)[:, None] & (d >= 0)[None, :])
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def bring_queries(
    q, k, v, grad, q_rows, k_rows, v_rows, grad_rows, query_start, context, prefixes, taken, sequences, tokens, tasks,
    tiles, orders, bars, HEADS: gl.constexpr, GROUPS: gl.constexpr, W: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """For `backward_by_query`: a block's queries and their outputs' gradients, then keys and values."""
    q_tiles, grad_tiles, k_tiles, v_tiles = tiles
    owned_full, owned_empty, k_full, v_full, k_empty, v_empty = bars
    done = 0
    count = 0
    task = gl.program_id(0)
    while task < tasks:
        block = tokens // BLOCK + sequences - 1 - task // HEADS  # a sequence's end first
        head = task % HEADS
        begin, rows, token, sequence = place(block, query_start, sequences, 1, BLOCK)
        if begin < rows:
            before = 0
            prefix = token
            if SHARED:
                before += gl.load(context + sequence).to(gl.int32)
                prefix = gl.load(prefixes + sequence).to(gl.int32)
            mbarrier.wait(owned_empty.index(0), done & 1 ^ 1)
            order(orders, 0, rows, begin, token, before, head)
            mbarrier.arrive(owned_full.index(0), count=1)
            for worker in gl.static_range(WORKERS):
                at = begin + worker * TILE
                _fetch(q_rows, q, HEADS * W, head * W, token, at, rows, owned_full.index(0), q_tiles.index(worker), W)
                _fetch(
                    grad_rows, grad, HEADS * W, head * W, token, at, rows, owned_full.index(0),
                    grad_tiles.index(worker), W,
                )  # fmt: skip
            done += 1
            column = head // (HEADS // GROUPS) * W
            for tile in range(0, before + gl.minimum(begin + BLOCK, rows), TILE):
                stage = count % STAGES
                phase = (count // STAGES & 1) ^ 1
                first = prefix if tile < before else token - before
                mbarrier.wait(k_empty.index(stage), phase)
                _fetch(
                    k_rows, k, GROUPS * W, column, first, tile, before + rows, k_full.index(stage),
                    k_tiles.index(stage), W,
                )  # fmt: skip
                mbarrier.wait(v_empty.index(stage), phase)
                _fetch(
                    v_rows, v, GROUPS * W, column, first, tile, before + rows, v_full.index(stage),
                    v_tiles.index(stage), W,
                )  # fmt: skip
                count += 1
        task = gl.num_programs(0) + gl.atomic_add(taken, 1)
    mbarrier.wait(owned_empty.index(0), done & 1 ^ 1)
    order(orders, 0, 0, 0, 0, 0, 0)
    mbarrier.arrive(owned_full.index(0), count=OWNED)


@gluon.jit
def bring_keys(
    q, k, v, grad, q_rows, k_rows, v_rows, grad_rows, query_start, readers, statistics, taken, sequences, tokens, tasks,
    tiles, orders, bars, HEADS: gl.constexpr, GROUPS: gl.constexpr, W: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """For `backward_by_key`: a block's keys and values, then for each head the queries that read them, their outputs'
    gradients, and their statistics. Flat tokens up to `readers` read a sequence's keys."""
    q_tiles, grad_tiles, k_tiles, v_tiles, numbers = tiles
    owned_full, owned_empty, full, empty = bars
    SHARE: gl.constexpr = HEADS // GROUPS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 2 * TILE, ONE)
    done = 0
    count = 0
    task = gl.program_id(0)
    while task < tasks:
        group = task % GROUPS
        begin, rows, token, sequence = place(task // GROUPS, query_start, sequences, 1, BLOCK)
        if begin < rows:
            end = rows
            if SHARED:
                end = gl.load(readers + sequence).to(gl.int32) - token
            mbarrier.wait(owned_empty.index(0), done & 1 ^ 1)
            order(orders, 0, rows, begin, token, end, group)
            mbarrier.arrive(owned_full.index(0), count=1)
            for worker in gl.static_range(WORKERS):
                at = begin + worker * TILE
                _fetch(k_rows, k, GROUPS * W, group * W, token, at, rows, owned_full.index(0), k_tiles.index(worker), W)
                _fetch(v_rows, v, GROUPS * W, group * W, token, at, rows, owned_full.index(0), v_tiles.index(worker), W)
            done += 1
            for head in range(group * SHARE, group * SHARE + SHARE):
                of = statistics + (lane // TILE * HEADS + head).to(gl.int64) * tokens + token + lane % TILE
                for tile in range(begin, end, TILE):
                    stage = count % STAGES
                    mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
                    brought = full.index(stage)
                    _fetch(q_rows, q, HEADS * W, head * W, token, tile, end, brought, q_tiles.index(stage), W)
                    _fetch(grad_rows, grad, HEADS * W, head * W, token, tile, end, brought, grad_tiles.index(stage), W)
                    async_copy.async_copy_global_to_shared(numbers.index(stage), of + tile, tile + lane % TILE < end)
                    async_copy.mbarrier_arrive(brought, increment_count=False)
                    count += 1
        task = gl.num_programs(0) + gl.atomic_add(taken, 1)
    mbarrier.wait(owned_empty.index(0), done & 1 ^ 1)
    order(orders, 0, 0, 0, 0, 0, 0)
    mbarrier.arrive(owned_full.index(0), count=OWNED)
