"""Attention of many queries on Hopper: one warpgroup of a program brings tiles, the others multiply.

Also of towers, where every query reads all keys of its sequence; their heads may be narrower than a tile.

The arithmetic is `attention._tile`'s and `attention._join`'s, operation for operation and with a query's scores in the
same registers, so bits agree. Only the synchronisation differs: keys and values arrive by the tensor memory
accelerator in a ring of tiles, a tile's scores are made together with the sums of the one before it, and a
warpgroup's softmax runs while the tensor cores work for the other. Programs stay, and take the next block of queries
whenever they are done with one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlloop.numerics.kernels.triton import segments
from rlloop.numerics.kernels.triton.decode import divided
from rlloop.numerics.kernels.triton.launch import ALIGNMENT, EXACT, power_of_two, processors
from rlloop.numerics.kernels.triton.prefill_loads import (
    FIELDS,
    LOADERS,
    QUEUE,
    ROWS,
    STAGES,
    TILE,
    WORKERS,
    bring,
    last_key,
    ordered,
)

SEGMENT = gl.constexpr(segments.SEGMENT)
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # how tiles lie
WIDTHS = (64, 128)
LEAST_PAGE = 8  # rows: the accelerator's swizzle repeats itself after so many
REGISTERS = gl.constexpr(224)  # of a thread that multiplies
REGISTERS_EACH = 168  # when the program starts
PARKED = gl.constexpr(False)  # sums of earlier segments wait in memory
HELD = gl.constexpr(False)  # queries stay in registers
BRIDGED = gl.constexpr(False)  # a segment's first scores are made together with the last sums of the one before it
PAIRS = gl.constexpr(False)  # scores of 128 keys at once (TILE 128), everything else by 64 as ever
EARLY = gl.constexpr(False)  # exponentials before the wait for sums
TURNS = gl.constexpr(0)  # warpgroups multiply in turn; the next may when: 1 products are begun, 2 scores, 3 sums are there
FULL = False  # takes attention of towers: compiled, and not run on a GPU yet (tests/gpu/test_gpu_images.py turns it on)


def takes(q: Tensor, k: Tensor, v: Tensor, v_step: int, blocks: int, block_size: int, causal: bool = True) -> bool:
    """True if `run` supports these tensors."""
    pages, width = blocks == 1 or (block_size >= LEAST_PAGE and block_size & (block_size - 1) == 0), q.shape[2]
    narrower = not causal and width % 8 == 0 and WIDTHS[0] < width < WIDTHS[1]
    widths = width == k.shape[2] == v.shape[2] and (width in WIDTHS or narrower)
    return (causal or FULL) and q.element_size() == 2 and widths and v_step % ALIGNMENT == 0 and pages


@gluon.jit
def _scores(queries, tiles, bars, count, COPIED: gl.constexpr, S: gl.constexpr):
    """Begins to multiply the queries with tile `count` of keys. `COPIED`: threads may have written it."""
    _queries, k_tiles, _values = tiles
    _q_full, _q_empty, k_full, _v_full, _empty, _turns = bars
    stage = count % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    if COPIED:
        fence_async_shared()
    zeros = gl.zeros((ROWS, TILE), gl.float32, S)  # S: as many columns as a tile has keys
    return warpgroup_mma(queries, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _sums(masses, sums, tiles, bars, count, COPIED: gl.constexpr):
    """Begins to add the values of tile `count`."""
    _queries, _keys, v_tiles = tiles
    if not EARLY:
        _values_there(bars, count)
    if COPIED:
        fence_async_shared()
    return warpgroup_mma(masses, v_tiles.index(count % STAGES), sums, is_async=True)


@gluon.jit
def _values_there(bars, count):
    _q_full, _q_empty, _k_full, v_full, _empty, _turns = bars
    mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)


@gluon.jit
def _await_turn(bars, count, WORKER: gl.constexpr):
    _q_full, _q_empty, _k_full, _v_full, _empty, turns = bars
    if TURNS > 0:
        mbarrier.wait(turns.index(WORKER), count & 1 if WORKER > 0 else count & 1 ^ 1)


@gluon.jit
def _end_turn(bars, WORKER: gl.constexpr, WHEN: gl.constexpr):
    _q_full, _q_empty, _k_full, _v_full, _empty, turns = bars
    if TURNS == WHEN:
        mbarrier.arrive(turns.index((WORKER + 1) % WORKERS), count=1)


@gluon.jit
def _softmax(
    scores, top, total, position, tile, scale, MASKED: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """(top, total, fade of what there is, masses to multiply)."""
    if MASKED:
        key = tile + gl.arange(0, scores.shape[1], gl.SliceLayout(0, S))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    highest = gl.maximum(top, gl.max(scores, 1) * scale)
    masses = gl.exp2(gl.fma(scores, gl.full(scores.shape, scale, gl.float32, S), -highest[:, None]))
    fade = gl.exp2(top - highest)
    total = gl.fma(total, fade, gl.sum(masses, 1))
    return highest, total, fade, gl.convert_layout(masses.to(DTYPE), P)


@gluon.jit
def _tile(
    queries, masses, top, total, sums, position, tile, scale, tiles, bars, count, WORKER: gl.constexpr,
    FRESH: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr, A: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """One tile of keys, while the values of the one before it, whose masses are given, are added."""
    _q_full, _q_empty, _k_full, _v_full, empty, _turns = bars
    _await_turn(bars, count, WORKER)
    scores = _scores(queries, tiles, bars, count, MASKED, S)
    adding = _sums(masses, sums, tiles, bars, count - 1, MASKED)
    _end_turn(bars, WORKER, 1)
    scores = warpgroup_mma_wait(1, [scores])
    _end_turn(bars, WORKER, 2)
    top, total, fade, following = _softmax(scores, top, total, position, tile, scale, MASKED, S, P, masses.dtype)
    if EARLY:
        _values_there(bars, count)
    sums, masses = warpgroup_mma_wait(0, [adding, masses])
    _end_turn(bars, WORKER, 3)
    mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
    if not FRESH:
        sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, A))[:, None]
    return following, top, total, sums


@gluon.jit
def _first_tile(
    queries, position, tile, scale, tiles, bars, count, WORKER: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """(masses, top, total)"""
    top = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, S))
    _await_turn(bars, count, WORKER)
    scores = _scores(queries, tiles, bars, count, True, S)
    _end_turn(bars, WORKER, 1)
    scores = warpgroup_mma_wait(0, [scores])
    _end_turn(bars, WORKER, 2)
    _end_turn(bars, WORKER, 3)
    top, total, _fade, masses = _softmax(scores, top, total, position, tile, scale, True, S, P, DTYPE)
    if EARLY:
        _values_there(bars, count)
    return masses, top, total


@gluon.jit
def _halves(scores, S: gl.constexpr):
    HALF: gl.constexpr = TILE // 2
    left, right = gl.split(gl.permute(gl.reshape(scores, (ROWS, 2, HALF)), (0, 2, 1)))
    return gl.convert_layout(left, S), gl.convert_layout(right, S)


@gluon.jit
def _half_sums(masses, sums, tiles, bars, count, PART: gl.constexpr, COPIED: gl.constexpr):
    HALF: gl.constexpr = TILE // 2
    _queries, _keys, v_tiles = tiles
    if PART == 0:
        _values_there(bars, count)
        if COPIED:
            fence_async_shared()
    values = v_tiles.index(count % STAGES).slice(PART * HALF, HALF, dim=0)
    return warpgroup_mma(masses, values, sums, is_async=True)


@gluon.jit
def _first_pair(
    queries, position, tile, scale, tiles, bars, count, WORKER: gl.constexpr, S: gl.constexpr, S2: gl.constexpr,
    P: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    top = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, S))
    scores = warpgroup_mma_wait(0, [_scores(queries, tiles, bars, count, True, S2)])
    left, right = _halves(scores, S)
    top, total, _fade, masses = _softmax(left, top, total, position, tile, scale, True, S, P, DTYPE)
    top, total, fade, more = _softmax(right, top, total, position, tile + TILE // 2, scale, True, S, P, DTYPE)
    return masses, more, fade, top, total


@gluon.jit
def _pair(
    queries, masses, more, more_fade, top, total, sums, position, tile, scale, tiles, bars, count, MASKED: gl.constexpr,
    S: gl.constexpr, S2: gl.constexpr, A: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Two tiles of 64 keys, while the values of the two before them are added."""
    _q_full, _q_empty, _k_full, _v_full, empty, _turns = bars
    scores = _scores(queries, tiles, bars, count, MASKED, S2)
    adding = _half_sums(masses, sums, tiles, bars, count - 1, 0, MASKED)
    scores = warpgroup_mma_wait(1, [scores])
    left, right = _halves(scores, S)
    top, total, fade, following = _softmax(left, top, total, position, tile, scale, MASKED, S, P, masses.dtype)
    sums, masses = warpgroup_mma_wait(0, [adding, masses])
    sums = sums * gl.convert_layout(more_fade, gl.SliceLayout(1, A))[:, None]
    adding = _half_sums(more, sums, tiles, bars, count - 1, 1, MASKED)
    top, total, more_fade, after = _softmax(
        right, top, total, position, tile + TILE // 2, scale, MASKED, S, P, masses.dtype
    )
    sums, more = warpgroup_mma_wait(0, [adding, more])
    mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, A))[:, None]
    return following, after, more_fade, top, total, sums


@gluon.jit
def _parking(parked, WORKER: gl.constexpr, W: gl.constexpr, A: gl.constexpr):
    """Where a warpgroup keeps sums: a thread's pairs of numbers so that a warp's lie side by side."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, A))[:, None]
    column = gl.arange(0, W, gl.SliceLayout(0, A))[None, :]
    thread = (row // 16 * 8 + row % 8) * 4 + column // 2 % 4
    at = ((column // 8 * 2 + row // 8 % 2) * 128 + thread) * 2 + column % 2
    at = (gl.program_id(0) * WORKERS + WORKER) * (ROWS * W) + at
    return parked + gl.max_contiguous(gl.multiple_of(at, [1, 2]), [1, 2])


@gluon.jit
def _spread(x, shape: gl.constexpr, A: gl.constexpr):
    """A number for each row, across a tile."""
    return gl.convert_layout(x, gl.SliceLayout(1, A))[:, None] + gl.zeros(shape, x.dtype, A)


@gluon.jit
def _multiply(
    out, lse, parked, scale, tiles, orders, bars, WORKER: gl.constexpr, HEADS: gl.constexpr, GROUPS: gl.constexpr,
    WIDTH: gl.constexpr, W: gl.constexpr, JOINS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup. `JOINS`: a context may be longer than a segment. Not `CAUSAL`: the mask takes every
    query for its sequence's last."""
    SHARE: gl.constexpr = HEADS // GROUPS
    DTYPE: gl.constexpr = out.dtype.element_ty
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE // 2 if PAIRS else TILE, 16])
    S2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    # To store, four neighbours trade numbers, so that each has 16 bytes of a row.
    WHOLE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32]] + ([[0, 64]] if W == 128 else []) + [[8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, W],
    )  # fmt: skip
    q_tiles, _keys, _values = tiles
    q_full, q_empty, k_full, v_full, empty, _turns = bars
    at_parked = _parking(parked, WORKER, W, A)
    done = 0
    count = 0
    queue_slot = 0
    mbarrier.wait(q_full.index(queue_slot), 0)
    rows = ordered(orders, queue_slot, 0)
    while rows > 0:
        begin = ordered(orders, queue_slot, 1)
        token = ordered(orders, queue_slot, 2)
        offset = ordered(orders, queue_slot, 3)
        group = ordered(orders, queue_slot, 4)
        last = last_key(begin, rows, offset, SHARE, CAUSAL)
        begin += WORKER * ROWS
        if begin < rows:
            fence_async_shared()
            queries = q_tiles.index(queue_slot * WORKERS + WORKER)
            if HELD:
                queries = queries.load(gl.DotOperandLayout(0, S, 2))
                mbarrier.arrive(q_empty.index(queue_slot), count=1)
            first = offset + begin // SHARE
            row = begin + gl.arange(0, ROWS, gl.SliceLayout(1, S))
            position = offset + row // SHARE
            if not CAUSAL:
                first = last
                position = last + row * 0
            top = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S))
            total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, S))
            sums = gl.zeros((ROWS, W), gl.float32, A)
            if BRIDGED:
                masses, part_top, part_total = _first_tile(
                    queries, position, 0, scale, tiles, bars, count, WORKER, S, P, DTYPE
                )
                count += 1
            for segment in range(0, last + 1, SEGMENT if JOINS else 1 << 30):
                end = gl.minimum(segment + SEGMENT, last + 1) if JOINS else last + 1
                part_sums = gl.zeros((ROWS, W), gl.float32, A)
                if PAIRS:
                    masses, more, more_fade, part_top, part_total = _first_pair(
                        queries, position, segment, scale, tiles, bars, count, WORKER, S, S2, P, DTYPE
                    )
                    count += 1
                elif not BRIDGED:
                    masses, part_top, part_total = _first_tile(
                        queries, position, segment, scale, tiles, bars, count, WORKER, S, P, DTYPE
                    )
                    count += 1
                # Tiles that every query sees whole need no mask.
                masked = segment + gl.maximum(gl.minimum(first + 1, end) - segment, 0) // TILE * TILE
                if PAIRS:
                    for tile in range(segment + TILE, masked, TILE):
                        masses, more, more_fade, part_top, part_total, part_sums = _pair(
                            queries, masses, more, more_fade, part_top, part_total, part_sums, position, tile, scale,
                            tiles, bars, count, False, S, S2, A, P,
                        )  # fmt: skip
                        count += 1
                    for tile in range(gl.maximum(masked, segment + TILE), end, TILE):
                        masses, more, more_fade, part_top, part_total, part_sums = _pair(
                            queries, masses, more, more_fade, part_top, part_total, part_sums, position, tile, scale,
                            tiles, bars, count, True, S, S2, A, P,
                        )  # fmt: skip
                        count += 1
                else:
                    for tile in range(segment + TILE, masked, TILE):
                        masses, part_top, part_total, part_sums = _tile(
                            queries, masses, part_top, part_total, part_sums, position, tile, scale, tiles, bars, count,
                            WORKER, False, False, S, A, P,
                        )  # fmt: skip
                        count += 1
                    for tile in range(gl.maximum(masked, segment + TILE), end, TILE):
                        masses, part_top, part_total, part_sums = _tile(
                            queries, masses, part_top, part_total, part_sums, position, tile, scale, tiles, bars, count,
                            WORKER, False, True, S, A, P,
                        )  # fmt: skip
                        count += 1
                if BRIDGED:
                    next_top = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S))
                    next_total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, S))
                if BRIDGED and JOINS and segment + SEGMENT <= last:  # the next segment's first tile meanwhile
                    masses, next_top, next_total, part_sums = _tile(
                        queries, masses, next_top, next_total, part_sums, position, segment + SEGMENT, scale, tiles, bars,
                        count, WORKER, True, True, S, A, P,
                    )  # fmt: skip
                    count += 1
                elif PAIRS:
                    adding = _half_sums(masses, part_sums, tiles, bars, count - 1, 0, True)
                    part_sums, masses = warpgroup_mma_wait(0, [adding, masses])
                    part_sums = part_sums * gl.convert_layout(more_fade, gl.SliceLayout(1, A))[:, None]
                    adding = _half_sums(more, part_sums, tiles, bars, count - 1, 1, True)
                    part_sums, more = warpgroup_mma_wait(0, [adding, more])
                    mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
                else:
                    adding = _sums(masses, part_sums, tiles, bars, count - 1, True)
                    part_sums, masses = warpgroup_mma_wait(0, [adding, masses])
                    mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
                if JOINS and PARKED:
                    if segment > 0:
                        before = gl.load(at_parked)
                        highest = gl.maximum(top, part_top)
                        fade = gl.exp2(top - highest)
                        part_fade = gl.exp2(part_top - highest)
                        kept = position < segment  # queries that come before this segment keep what they have
                        total = gl.where(kept, total, gl.fma(total, fade, part_total * part_fade))
                        top = gl.where(kept, top, highest)
                        new = part_sums * _spread(part_fade, before.shape, A)
                        new = gl.fma(before, _spread(fade, before.shape, A), new)
                        sums = gl.where(gl.convert_layout(kept, gl.SliceLayout(1, A))[:, None], before, new)
                    else:
                        top = part_top
                        total = part_total
                        sums = part_sums
                    if segment + SEGMENT <= last:
                        gl.store(at_parked, sums)
                elif JOINS:  # queries that come before this segment keep what they have
                    highest = gl.maximum(top, part_top)
                    fade = gl.exp2(top - highest)
                    part_fade = gl.exp2(part_top - highest)
                    kept = position < segment
                    new = gl.where(segment == 0, part_total, gl.fma(total, fade, part_total * part_fade))
                    total = gl.where(kept, total, new)
                    top = gl.where(kept, top, gl.where(segment == 0, part_top, highest))
                    fade = _spread(fade, sums.shape, A)
                    new = gl.fma(sums, fade, part_sums * _spread(part_fade, sums.shape, A))
                    new = gl.where(segment == 0, part_sums, new)
                    sums = gl.where(gl.convert_layout(kept, gl.SliceLayout(1, A))[:, None], sums, new)
                else:
                    top = part_top
                    total = part_total
                    sums = part_sums
                if BRIDGED:
                    part_top, part_total = next_top, next_total
            if not HELD:
                mbarrier.arrive(q_empty.index(queue_slot), count=1)
            output = divided(sums, gl.convert_layout(total, gl.SliceLayout(1, A))).to(DTYPE)
            at = (token + row // SHARE).to(gl.int64) * HEADS + group * SHARE + row % SHARE
            gl.store(lse + at, (top + gl.log2(total)) * 0.6931471805599453, row < rows)
            stored = begin + gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE))
            at = (token + stored // SHARE).to(gl.int64) * HEADS + group * SHARE + stored % SHARE
            d = gl.arange(0, W, gl.SliceLayout(0, WHOLE))
            gl.store(
                out + at[:, None] * WIDTH + d[None, :], gl.convert_layout(output, WHOLE),
                (stored < rows)[:, None] & (d < WIDTH)[None, :],
            )  # fmt: skip
        else:  # no rows for this warpgroup
            mbarrier.arrive(q_empty.index(queue_slot), count=1)
            for _ in range(0, last + 1, TILE):
                _await_turn(bars, count, WORKER)
                _end_turn(bars, WORKER, TURNS)
                stage = count % STAGES
                mbarrier.wait(k_full.index(stage), count // STAGES & 1)
                mbarrier.wait(v_full.index(stage), count // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                count += 1
        done += 1
        queue_slot = done % QUEUE
        mbarrier.wait(q_full.index(queue_slot), done // QUEUE & 1)
        rows = ordered(orders, queue_slot, 0)


@gluon.jit
def _barriers(N: gl.constexpr, ARRIVE: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=ARRIVE)
    return bars


@gluon.jit(do_not_specialize=["sequences", "tokens", "blocks", "block_size", "tasks"])
def _prefill(
    q, k, v, k_described, v_described, v_step, query_start, context, block_start, out, lse, parked, counter, sequences,
    tokens, blocks, block_size, tasks, scale, HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, W: gl.constexpr,
    BOX: gl.constexpr, JOINS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype.element_ty
    tiles = (
        gl.allocate_shared_memory(DTYPE, [WORKERS * QUEUE, ROWS, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE, W], SWIZZLED),
    )
    orders = gl.allocate_shared_memory(gl.int32, [QUEUE * FIELDS, 1], mbarrier.MBarrierLayout())
    bars = (
        _barriers(QUEUE, LOADERS + 1), _barriers(QUEUE, WORKERS), _barriers(STAGES, LOADERS),
        _barriers(STAGES, LOADERS), _barriers(STAGES, WORKERS), _barriers(WORKERS, 1),
    )  # fmt: skip
    fence_async_shared()
    if WORKERS == 3:
        gl.warp_specialize(
            [
                (
                    bring,
                    (
                        q, k, v, k_described, v_described, v_step, query_start, context, block_start, counter, sequences,
                        tokens, blocks, block_size, tasks, tiles, orders, bars, HEADS, GROUPS, WIDTH, W, BOX, CAUSAL,
                    ),
                ),
                (_multiply, (out, lse, parked, scale, tiles, orders, bars, 0, HEADS, GROUPS, WIDTH, W, JOINS, CAUSAL)),
                (_multiply, (out, lse, parked, scale, tiles, orders, bars, 1, HEADS, GROUPS, WIDTH, W, JOINS, CAUSAL)),
                (_multiply, (out, lse, parked, scale, tiles, orders, bars, 2, HEADS, GROUPS, WIDTH, W, JOINS, CAUSAL)),
            ],
            [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    bring,
                    (
                        q, k, v, k_described, v_described, v_step, query_start, context, block_start, counter, sequences,
                        tokens, blocks, block_size, tasks, tiles, orders, bars, HEADS, GROUPS, WIDTH, W, BOX, CAUSAL,
                    ),
                ),
                (_multiply, (out, lse, parked, scale, tiles, orders, bars, 0, HEADS, GROUPS, WIDTH, W, JOINS, CAUSAL)),
                (_multiply, (out, lse, parked, scale, tiles, orders, bars, 1, HEADS, GROUPS, WIDTH, W, JOINS, CAUSAL)),
            ],
            [4, 4], [REGISTERS, REGISTERS],
        )  # fmt: skip


def run(
    q: Tensor, k: Tensor, v: Tensor, v_step: int, query_start: Tensor, context: Tensor, block_start: Tensor,
    block_size: int, scale: float, out: Tensor, lse: Tensor, causal: bool = True,
) -> None:  # fmt: skip
    """Fills `out` and `lse`, for what `takes` says yes to. Tensors as `attention.attention` hands them to a kernel;
    `scale` is for powers of two."""
    (tokens, heads, width), groups = q.shape, k.shape[1]
    sequences, blocks = block_start.shape
    tile_width = power_of_two(width)
    box = min(TILE.value, block_size) if blocks > 1 else TILE.value
    k_described, v_described = (
        TensorDescriptor(x, [len(x), groups * width], [step, 1], [box, tile_width], SWIZZLED.value)
        for x, step in ((k, groups * width), (v, v_step))
    )
    tasks = (tokens * (heads // groups) // (WORKERS.value * ROWS.value) + sequences) * groups
    counter = q.new_zeros(1, dtype=torch.int32)
    programs, joins = min(tasks, processors(q.device)), blocks * block_size > SEGMENT.value
    parked = lse.new_empty(programs * WORKERS.value * ROWS.value, tile_width) if joins and PARKED.value else lse
    _prefill[(programs,)](
        q, k, v, k_described, v_described, v_step, query_start, context, block_start, out, lse, parked, counter,
        sequences, tokens, blocks, block_size, tasks, scale, HEADS=heads, GROUPS=groups, WIDTH=width, W=tile_width,
        BOX=box, JOINS=joins, CAUSAL=causal, num_warps=4, maxnreg=REGISTERS_EACH, **EXACT,
    )  # fmt: skip
