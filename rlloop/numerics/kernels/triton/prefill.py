"""Attention of many queries on Hopper: one warpgroup of a program brings tiles, the others multiply.

Also of towers, where every query reads all keys of its sequence; their heads may be narrower than a tile.

The arithmetic is that of `attention_tiles`, operation for operation and with a query's scores in the same registers, so
bits agree. Only the synchronisation differs: keys and values arrive by the tensor memory accelerator in a ring of
tiles, a tile's scores are made together with the sums of the one before it, and a warpgroup's softmax runs while the
tensor cores work for the other. Programs stay, and take the next block of queries whenever they are done with one.
Blocks with a row whose masses sum to more than the limit get a flag: `attention` has them computed anew.
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
from rlloop.numerics.kernels.triton.prefill_sums import SEGMENT, limited, settle, settled
from rlloop.numerics.kernels.triton.segments import limit

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # how tiles lie
WIDTHS = (64, 128)
LEAST_PAGE = 8  # rows: the accelerator's swizzle repeats itself after so many
REGISTERS = gl.constexpr(240)  # of a thread that multiplies
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
def _scores(queries, tiles, bars, count, S: gl.constexpr):
    """Begins to multiply the queries with tile `count` of keys."""
    _queries, k_tiles, _values = tiles
    _q_full, _q_empty, k_full, _v_full, _k_empty, _v_empty = bars
    stage = count % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    zeros = gl.zeros((ROWS, TILE), gl.float32, S)
    return warpgroup_mma(queries, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _sums(masses, sums, tiles, bars, count, continues):
    """Begins to add the values of tile `count`."""
    _queries, _keys, v_tiles = tiles
    _q_full, _q_empty, _k_full, v_full, _k_empty, _v_empty = bars
    stage = count % STAGES
    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
    return warpgroup_mma(masses, v_tiles.index(stage), sums, use_acc=continues, is_async=True)


@gluon.jit
def _softmax(
    scores, top, total, offset, begin, last, tile, starts, scale, MASKED: gl.constexpr, SHARE: gl.constexpr,
    CAUSAL: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """(what masses are relative to, their total, masses) of a tile, which is two of the contract's: each is summed for
    itself. `starts`: a segment begins here, and the first of them says what its masses are relative to."""
    HALF: gl.constexpr = TILE // 2
    if MASKED:
        key = tile + gl.arange(0, TILE, gl.SliceLayout(0, S))
        position = _positions(offset, begin, last, SHARE, CAUSAL, S)
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    if starts:
        highest, _other = gl.split(gl.max(gl.reshape(scores, (ROWS, 2, HALF)), 2))
        top = gl.convert_layout(highest, gl.SliceLayout(1, S)) * scale
        total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, S))
    masses = gl.exp2(gl.fma(scores, gl.full(scores.shape, scale, gl.float32, S), -top[:, None]))
    first, second = gl.split(gl.sum(gl.reshape(masses, (ROWS, 2, HALF)), 2))
    total = total + gl.convert_layout(first, gl.SliceLayout(1, S)) + gl.convert_layout(second, gl.SliceLayout(1, S))
    return top, total, masses


@gluon.jit
def _positions(offset, begin, last, SHARE: gl.constexpr, CAUSAL: gl.constexpr, S: gl.constexpr):
    """The last key that each row reads."""
    row = begin + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    return offset + row // SHARE if CAUSAL else last + row * 0


@gluon.jit
def _step(
    queries, masses, part, sums, kept, offset, begin, last, tile, scale, tiles, bars, count, MASKED: gl.constexpr,
    JOINS: gl.constexpr, LIMIT: gl.constexpr, SHARE: gl.constexpr, CAUSAL: gl.constexpr, S: gl.constexpr,
    A: gl.constexpr, P: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One tile of keys, while the values of the one before it, whose masses are given, are added."""
    _q_full, _q_empty, _k_full, v_full, k_empty, v_empty = bars
    top, total = part
    masses = gl.convert_layout(masses.to(DTYPE), P)
    scores = _scores(queries, tiles, bars, count, S)
    adding = _sums(masses, sums, tiles, bars, count - 1, (tile - TILE) % SEGMENT != 0 if JOINS else True)
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(k_empty.index(count % STAGES), count=1)
    starts = tile % SEGMENT == 0 if JOINS else False
    top, total, following = _softmax(
        scores, top, total, offset, begin, last, tile, starts, scale, MASKED, SHARE, CAUSAL, S
    )
    mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
    sums, masses = warpgroup_mma_wait(0, [adding, masses])
    mbarrier.arrive(v_empty.index((count - 1) % STAGES), count=1)
    if JOINS:  # noqa: SIM102
        if tile % SEGMENT == 0:
            settle(part, sums, kept, tile, S, A, LIMIT)
    return following, (top, total), sums


@gluon.jit
def _multiply(
    out, lse, flags, scale, tiles, orders, bars, kept, WORKER: gl.constexpr, HEADS: gl.constexpr, GROUPS: gl.constexpr,
    WIDTH: gl.constexpr, W: gl.constexpr, JOINS: gl.constexpr, LIMIT: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup. `JOINS`: a context may be longer than a segment. Not `CAUSAL`: the mask takes every
    query for its sequence's last."""
    SHARE: gl.constexpr = HEADS // GROUPS
    DTYPE: gl.constexpr = out.dtype.element_ty
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    q_tiles, _keys, _values = tiles
    q_full, q_empty, k_full, v_full, k_empty, v_empty = bars
    done = 0
    count = 0
    queue_slot = 0
    mbarrier.wait(q_full.index(queue_slot), 0)
    rows = ordered(orders, queue_slot, 0)
    while rows > 0:
        begin = ordered(orders, queue_slot, 1)
        token = ordered(orders, queue_slot, 2)
        offset = ordered(orders, queue_slot, 3)
        block = ordered(orders, queue_slot, 4)
        group = block % GROUPS
        last = last_key(begin, rows, offset, SHARE, CAUSAL)
        begin += WORKER * ROWS
        if begin < rows:
            fence_async_shared()
            queries = q_tiles.index(queue_slot * WORKERS + WORKER)
            first = offset + begin // SHARE
            if not CAUSAL:
                first = last
            top = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S))
            total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, S))
            sums = gl.zeros((ROWS, W), gl.float32, A)
            n = last // TILE + 1
            scores = _scores(queries, tiles, bars, count, S)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_empty.index(count % STAGES), count=1)
            top, total, masses = _softmax(
                scores, top, total, offset, begin, last, 0, True, scale, True, SHARE, CAUSAL, S
            )
            part = (top, total)
            # Tiles that every query sees whole need no mask.
            whole_tiles = gl.minimum(gl.maximum((first + 1) // TILE, 1), n)
            for at in range(1, whole_tiles):
                masses, part, sums = _step(
                    queries, masses, part, sums, kept, offset, begin, last, at * TILE, scale, tiles, bars,
                    count + at, False, JOINS, LIMIT, SHARE, CAUSAL, S, A, P, DTYPE,
                )  # fmt: skip
            for at in range(whole_tiles, n):
                masses, part, sums = _step(
                    queries, masses, part, sums, kept, offset, begin, last, at * TILE, scale, tiles, bars,
                    count + at, True, JOINS, LIMIT, SHARE, CAUSAL, S, A, P, DTYPE,
                )  # fmt: skip
            count += n
            mbarrier.arrive(q_empty.index(queue_slot), count=1)
            masses = gl.convert_layout(masses.to(DTYPE), P)
            adding = _sums(masses, sums, tiles, bars, count - 1, (n - 1) * TILE % SEGMENT != 0 if JOINS else True)
            sums, masses = warpgroup_mma_wait(0, [adding, masses])
            mbarrier.arrive(v_empty.index((count - 1) % STAGES), count=1)
            top, total = part
            row = begin + gl.arange(0, ROWS, gl.SliceLayout(1, S))
            if JOINS:
                position = _positions(offset, begin, last, SHARE, CAUSAL, S)
                part, sums = settled((top, total), sums, kept, position, last, S, A, LIMIT)
                top, total = part
            else:
                total = limited(total, LIMIT)
            gl.store(flags + 1 + block + row * 0, row * 0 + 1, (row < rows) & ~(total < float("inf")))
            output = divided(sums, gl.convert_layout(total, gl.SliceLayout(1, A))).to(DTYPE)
            at = (token + row // SHARE).to(gl.int64) * HEADS + group * SHARE + row % SHARE
            gl.store(lse + at, (top + gl.log2(total)) * 0.6931471805599453, row < rows)
            # Straight from registers: shared memory is full.
            stored = begin + gl.arange(0, ROWS, gl.SliceLayout(1, A))
            at = (token + stored // SHARE).to(gl.int64) * HEADS + group * SHARE + stored % SHARE
            d = gl.arange(0, W, gl.SliceLayout(0, A))
            gl.store(out + at[:, None] * WIDTH + d[None, :], output, (stored < rows)[:, None] & (d < WIDTH)[None, :])
        else:  # no rows for this warpgroup
            mbarrier.arrive(q_empty.index(queue_slot), count=1)
            for _ in range(0, last + 1, TILE):
                stage = count % STAGES
                mbarrier.wait(k_full.index(stage), count // STAGES & 1)
                mbarrier.wait(v_full.index(stage), count // STAGES & 1)
                mbarrier.arrive(k_empty.index(stage), count=1)
                mbarrier.arrive(v_empty.index(stage), count=1)
                count += 1
        done += 1
        queue_slot = done % QUEUE
        mbarrier.wait(q_full.index(queue_slot), done // QUEUE & 1)
        rows = ordered(orders, queue_slot, 0)


@gluon.jit
def barriers(N: gl.constexpr, ARRIVE: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=ARRIVE)
    return bars


@gluon.jit(do_not_specialize=["sequences", "tokens", "blocks", "tasks"])
def _prefill(
    q, k, v, k_described, v_described, v_step, query_start, context, block_start, out, lse, memory, flags, sequences,
    tokens, blocks, tasks, scale, HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, W: gl.constexpr,
    BOX: gl.constexpr, JOINS: gl.constexpr, LIMIT: gl.constexpr, CAUSAL: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """`flags`: the number of tasks taken beside those that programs begin with, then for each block of queries and
    key-value head whether it is to be computed anew. `memory`: room for sums."""
    DTYPE: gl.constexpr = q.dtype.element_ty
    tiles = (
        gl.allocate_shared_memory(DTYPE, [WORKERS * QUEUE, ROWS, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE, W], SWIZZLED),
    )
    orders = gl.allocate_shared_memory(gl.int32, [QUEUE * FIELDS, 1], mbarrier.MBarrierLayout())
    bars = (
        barriers(QUEUE, LOADERS + 1), barriers(QUEUE, WORKERS), barriers(STAGES, LOADERS),
        barriers(STAGES, LOADERS), barriers(STAGES, WORKERS), barriers(STAGES, WORKERS),
    )  # fmt: skip
    kept = memory.to(gl.int64) + gl.program_id(0).to(gl.int64) * (WORKERS * ROWS * (W + 2) * 4)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                bring,
                (
                    q, k, v, k_described, v_described, v_step, query_start, context, block_start, flags, sequences,
                    tokens, blocks, tasks, tiles, orders, bars, HEADS, GROUPS, WIDTH, W, BOX, CAUSAL, PAGE,
                ),
            ),
            (
                _multiply,
                (
                    out, lse, flags, scale, tiles, orders, bars, kept, 0, HEADS, GROUPS, WIDTH, W, JOINS, LIMIT,
                    CAUSAL,
                ),
            ),
            (
                _multiply,
                (
                    out, lse, flags, scale, tiles, orders, bars, kept + ROWS * (W + 2) * 4, 1, HEADS, GROUPS, WIDTH, W,
                    JOINS, LIMIT, CAUSAL,
                ),
            ),
        ],
        [4, 4], [REGISTERS, REGISTERS],
    )  # fmt: skip


def run(
    q: Tensor, k: Tensor, v: Tensor, v_step: int, query_start: Tensor, context: Tensor, block_start: Tensor,
    block_size: int, scale: float, out: Tensor, lse: Tensor, causal: bool = True,
) -> tuple[Tensor, int]:  # fmt: skip
    """Fills `out` and `lse`, for what `takes` says yes to. Tensors as `attention.attention` hands them to a kernel;
    `scale` is for powers of two.

    (flags, their number n): flags[1 + i] is 1 for the block i // G of 128 queries of key-value head i % G whose
    results are not to be used, since some segment's total exceeds its limit."""
    (tokens, heads, width), groups = q.shape, k.shape[1]
    sequences, blocks = block_start.shape
    tile_width = power_of_two(width)
    box = min(TILE.value, block_size) if blocks > 1 else TILE.value
    k_described, v_described = (
        TensorDescriptor(x, [x.shape[0], groups * width], [step, 1], [box, tile_width], SWIZZLED.value)
        for x, step in ((k, groups * width), (v, v_step))
    )
    tasks = (tokens * (heads // groups) // (WORKERS.value * ROWS.value) + sequences) * groups
    flags = q.new_zeros(1 + tasks, dtype=torch.int32)
    programs, joins = min(tasks, processors(q.device)), blocks * block_size > SEGMENT.value
    memory = q.new_empty(programs * WORKERS.value * ROWS.value * (tile_width + 2) if joins else 1, dtype=torch.float32)
    _prefill[(programs,)](
        q, k, v, k_described, v_described, v_step, query_start, context, block_start, out, lse, memory, flags,
        sequences, tokens, blocks, tasks, scale, HEADS=heads, GROUPS=groups, WIDTH=width, W=tile_width, BOX=box,
        JOINS=joins, LIMIT=limit(q.dtype), CAUSAL=causal, PAGE=block_size if blocks > 1 else 0, num_warps=4,
        maxnreg=REGISTERS_EACH, **EXACT,
    )  # fmt: skip
    return flags, tasks
