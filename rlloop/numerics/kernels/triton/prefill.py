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
TOWER_ROWS = 1 << 16  # queries times heads, from which on towers' attention is faster here; measured on an H200


def takes(q: Tensor, k: Tensor, v: Tensor, v_step: int, blocks: int, block_size: int, causal: bool = True) -> bool:
    """True if `run` supports these tensors."""
    pages, width = blocks == 1 or (block_size >= LEAST_PAGE and block_size & (block_size - 1) == 0), q.shape[2]
    narrower = not causal and width % 8 == 0 and WIDTHS[0] < width < WIDTHS[1]
    widths = width == k.shape[2] == v.shape[2] and (width in WIDTHS or narrower)
    many = causal or len(q) * q.shape[1] >= TOWER_ROWS
    return many and q.element_size() == 2 and widths and v_step % ALIGNMENT == 0 and pages


@gluon.jit
def _scores(queries, tiles, bars, count, COPIED: gl.constexpr, S: gl.constexpr):
    """Begins to multiply the queries with tile `count` of keys. `COPIED`: threads may have written it."""
    _queries, k_tiles, _values = tiles
    _q_full, _q_empty, k_full, _v_full, _empty = bars
    stage = count % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    if COPIED:
        fence_async_shared()
    zeros = gl.zeros((ROWS, TILE), gl.float32, S)
    return warpgroup_mma(queries, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _sums(masses, sums, tiles, bars, count, COPIED: gl.constexpr):
    """Begins to add the values of tile `count`."""
    _queries, _keys, v_tiles = tiles
    _q_full, _q_empty, _k_full, v_full, _empty = bars
    stage = count % STAGES
    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
    if COPIED:
        fence_async_shared()
    return warpgroup_mma(masses, v_tiles.index(stage), sums, is_async=True)


@gluon.jit
def _softmax(
    scores, top, total, position, tile, scale, MASKED: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """(top, total, fade of what there is, masses to multiply)."""
    if MASKED:
        key = tile + gl.arange(0, TILE, gl.SliceLayout(0, S))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    highest = gl.maximum(top, gl.max(scores, 1) * scale)
    masses = gl.exp2(gl.fma(scores, gl.full(scores.shape, scale, gl.float32, S), -highest[:, None]))
    fade = gl.exp2(top - highest)
    total = gl.fma(total, fade, gl.sum(masses, 1))
    return highest, total, fade, gl.convert_layout(masses.to(DTYPE), P)


@gluon.jit
def _tile(
    queries, masses, top, total, sums, position, tile, scale, tiles, bars, count, MASKED: gl.constexpr,
    S: gl.constexpr, A: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """One tile of keys, while the values of the one before it, whose masses are given, are added."""
    _q_full, _q_empty, _k_full, _v_full, empty = bars
    scores = _scores(queries, tiles, bars, count, MASKED, S)
    adding = _sums(masses, sums, tiles, bars, count - 1, MASKED)
    scores = warpgroup_mma_wait(1, [scores])
    top, total, fade, following = _softmax(scores, top, total, position, tile, scale, MASKED, S, P, masses.dtype)
    sums, masses = warpgroup_mma_wait(0, [adding, masses])
    mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
    return following, top, total, sums * gl.convert_layout(fade, gl.SliceLayout(1, A))[:, None]


@gluon.jit
def _spread(x, shape: gl.constexpr, A: gl.constexpr):
    """A number for each row, across a tile."""
    return gl.convert_layout(x, gl.SliceLayout(1, A))[:, None] + gl.zeros(shape, x.dtype, A)


@gluon.jit
def _multiply(
    out, lse, scale, tiles, orders, bars, WORKER: gl.constexpr, HEADS: gl.constexpr, GROUPS: gl.constexpr,
    WIDTH: gl.constexpr, W: gl.constexpr, JOINS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup. `JOINS`: a context may be longer than a segment. Not `CAUSAL`: the mask takes every
    query for its sequence's last."""
    SHARE: gl.constexpr = HEADS // GROUPS
    DTYPE: gl.constexpr = out.dtype.element_ty
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    # To store, four neighbours trade numbers, so that each has 16 bytes of a row.
    WHOLE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32]] + ([[0, 64]] if W == 128 else []) + [[8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, W],
    )  # fmt: skip
    q_tiles, _keys, _values = tiles
    q_full, q_empty, k_full, v_full, empty = bars
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
            first = offset + begin // SHARE
            row = begin + gl.arange(0, ROWS, gl.SliceLayout(1, S))
            position = offset + row // SHARE
            if not CAUSAL:
                first = last
                position = last + row * 0
            top = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S))
            total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, S))
            sums = gl.zeros((ROWS, W), gl.float32, A)
            for segment in range(0, last + 1, SEGMENT if JOINS else 1 << 30):
                end = gl.minimum(segment + SEGMENT, last + 1) if JOINS else last + 1
                part_top = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S))
                part_total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, S))
                part_sums = gl.zeros((ROWS, W), gl.float32, A)
                scores = warpgroup_mma_wait(0, [_scores(queries, tiles, bars, count, True, S)])
                part_top, part_total, _fade, masses = _softmax(
                    scores, part_top, part_total, position, segment, scale, True, S, P, DTYPE
                )
                count += 1
                # Tiles that every query sees whole need no mask.
                masked = segment + gl.maximum(gl.minimum(first + 1, end) - segment, 0) // TILE * TILE
                for tile in range(segment + TILE, masked, TILE):
                    masses, part_top, part_total, part_sums = _tile(
                        queries, masses, part_top, part_total, part_sums, position, tile, scale, tiles, bars, count,
                        False, S, A, P,
                    )  # fmt: skip
                    count += 1
                for tile in range(gl.maximum(masked, segment + TILE), end, TILE):
                    masses, part_top, part_total, part_sums = _tile(
                        queries, masses, part_top, part_total, part_sums, position, tile, scale, tiles, bars, count,
                        True, S, A, P,
                    )  # fmt: skip
                    count += 1
                adding = _sums(masses, part_sums, tiles, bars, count - 1, True)
                part_sums, masses = warpgroup_mma_wait(0, [adding, masses])
                mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
                if JOINS:  # queries that come before this segment keep what they have
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
    q, k, v, k_described, v_described, v_step, query_start, context, block_start, out, lse, counter, sequences, tokens,
    blocks, block_size, tasks, scale, HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, W: gl.constexpr,
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
        _barriers(STAGES, LOADERS), _barriers(STAGES, WORKERS),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                bring,
                (
                    q, k, v, k_described, v_described, v_step, query_start, context, block_start, counter, sequences,
                    tokens, blocks, block_size, tasks, tiles, orders, bars, HEADS, GROUPS, WIDTH, W, BOX, CAUSAL,
                ),
            ),
            (_multiply, (out, lse, scale, tiles, orders, bars, 0, HEADS, GROUPS, WIDTH, W, JOINS, CAUSAL)),
            (_multiply, (out, lse, scale, tiles, orders, bars, 1, HEADS, GROUPS, WIDTH, W, JOINS, CAUSAL)),
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
    programs = min(tasks, processors(q.device))
    _prefill[(programs,)](
        q, k, v, k_described, v_described, v_step, query_start, context, block_start, out, lse, counter, sequences,
        tokens, blocks, block_size, tasks, scale, HEADS=heads, GROUPS=groups, WIDTH=width, W=tile_width,
        BOX=box, JOINS=blocks * block_size > SEGMENT.value, CAUSAL=causal, num_warps=4, maxnreg=REGISTERS_EACH, **EXACT,
    )  # fmt: skip
