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
from rlloop.numerics.kernels.triton.decode import divided, moved
from rlloop.numerics.kernels.triton.launch import ALIGNMENT, EXACT, power_of_two, processors
from rlloop.numerics.kernels.triton.prefill_loads import (
    FIELDS,
    KEY_STAGES,
    LOADERS,
    QUEUE,
    ROWS,
    TILE,
    VALUE_STAGES,
    WORKERS,
    bring,
    last_key,
    ordered,
)

SEGMENT = gl.constexpr(segments.SEGMENT)
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # how tiles lie
WIDTHS = (64, 128)
LEAST_PAGE = 8  # rows: the accelerator's swizzle repeats itself after so many
REGISTERS = gl.constexpr(240)  # of a thread that multiplies
REGISTERS_EACH = 168  # when the program starts
FULL = False  # takes attention of towers: compiled, and not run on a GPU yet (tests/gpu/test_gpu_images.py turns it on)


def takes(q: Tensor, k: Tensor, v: Tensor, v_step: int, blocks: int, block_size: int, causal: bool = True) -> bool:
    """True if `run` supports these tensors."""
    pages, width = blocks == 1 or (block_size >= LEAST_PAGE and block_size & (block_size - 1) == 0), q.shape[2]
    narrower = not causal and width % 8 == 0 and WIDTHS[0] < width < WIDTHS[1]
    widths = width == k.shape[2] == v.shape[2] and (width in WIDTHS or narrower)
    return (causal or FULL) and q.element_size() == 2 and widths and v_step % ALIGNMENT == 0 and pages


@gluon.jit
def _scores(queries, tiles, bars, count, S: gl.constexpr):
    """Begins to multiply the queries with tile `count` of keys."""
    _queries, k_tiles, _values = tiles
    _keys_come(bars, count)
    zeros = gl.zeros((ROWS, TILE), gl.float32, S)
    return warpgroup_mma(queries, k_tiles.index(count % KEY_STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _keys_come(bars, count):
    """Waits for the keys of tile `count`."""
    _q_full, _q_empty, k_full, _v_full, _empty = bars
    mbarrier.wait(k_full.index(count % KEY_STAGES), count // KEY_STAGES & 1)


@gluon.jit
def _sums(masses, sums, tiles, count):
    """Begins to add the values of tile `count`, which have come (`_values_come`)."""
    _queries, _keys, v_tiles = tiles
    return warpgroup_mma(masses, v_tiles.index(count % VALUE_STAGES), sums, is_async=True)


@gluon.jit
def _values_come(bars, count):
    """Waits for the values of tile `count`. It also keeps the exponentials in front of it in the compiled program, which
    otherwise waits for products first."""
    _q_full, _q_empty, _k_full, v_full, _empty = bars
    mbarrier.wait(v_full.index(count % VALUE_STAGES), count // VALUE_STAGES & 1)


@gluon.jit
def _softmax(
    scores, top, total, position, tile, scale, MASKED: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """(top, total, fade of what there is, masses to multiply)."""
    if MASKED:
        key = tile + gl.arange(0, TILE, gl.SliceLayout(0, S))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    highest = moved(top, gl.max(scores, 1) * scale)
    masses = gl.exp2(gl.fma(scores, gl.full(scores.shape, scale, gl.float32, S), -highest[:, None]))
    fade = gl.exp2(top - highest)
    total = gl.fma(total, fade, gl.sum(masses, 1))
    return highest, total, fade, gl.convert_layout(masses.to(DTYPE), P)


FADE = {
    n: (
        "{.reg .pred moved, other; setp.neu.f32 moved, $%d, 0f3F800000; setp.neu.f32 other, $%d, 0f3F800000;"
        " or.pred moved, moved, other; vote.sync.any.pred moved, moved, 0xffffffff; @!moved bra.uni KEPT; %s KEPT: }"
        % (2 * n, 2 * n + 2, " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))),
        ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n),
    )
    for n in (32, 64)
}  # a thread's n sums times the fades of its two rows, unless all fades of the warp are 1
FADE_32 = gl.constexpr(FADE[32])
FADE_64 = gl.constexpr(FADE[64])


@gluon.jit
def _faded(sums, fade, A: gl.constexpr):
    """sums * fade, skipped by warps whose rows' references have not moved: then fades are 1."""
    ASM: gl.constexpr = FADE_32 if sums.shape[1] == 64 else FADE_64
    return gl.inline_asm_elementwise(
        ASM[0], ASM[1], [sums, _spread(fade, sums.shape, A)], gl.float32, is_pure=True, pack=sums.shape[1] // 2
    )


@gluon.jit
def _step(
    queries, scores, masses, part, whole, sums, parked, position, tile, scale, tiles, bars, count, AHEAD: gl.constexpr,
    MAY_START: gl.constexpr, MASKED: gl.constexpr, JOINS: gl.constexpr, S: gl.constexpr, A: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """The softmax of a tile whose scores are being made, while the values of the one before it, whose masses are
    given, are added, and (AHEAD) the scores of the next one begin to be made."""
    _q_full, _q_empty, _k_full, _v_full, empty = bars
    top, total = part
    adding = _sums(masses, sums, tiles, count - 1)
    if AHEAD:
        ahead = _scores(queries, tiles, bars, count + 1, S)
        _keys_come(bars, count + 1)
        if not MAY_START or not MASKED:
            scores = warpgroup_mma_wait(2, [scores])
    else:
        ahead = scores
        scores = warpgroup_mma_wait(1, [scores])
    starts = tile % SEGMENT == 0
    begin_top = top
    begin_total = total
    if JOINS and MAY_START:
        begin_top = gl.where(starts, float("-inf"), top)
        begin_total = gl.where(starts, 0.0, total)
    new_top, new_total, fade, following = _softmax(
        scores, begin_top, begin_total, position, tile, scale, MASKED, S, P, masses.dtype
    )
    _values_come(bars, count)
    if AHEAD and MAY_START:
        sums, masses, ahead = warpgroup_mma_wait(0, [adding, masses, ahead])
    else:
        sums, masses = warpgroup_mma_wait(1 if AHEAD else 0, [adding, masses])
    mbarrier.arrive(empty.index(count % KEY_STAGES), count=1)
    if JOINS and MAY_START:
        if starts:
            whole, sums = _join(part, whole, sums, parked, position, tile - SEGMENT, A)
            parked.store(sums)
            sums = gl.zeros(sums.shape, gl.float32, A)
        else:
            sums = _faded(sums, fade, A)
    else:
        sums = _faded(sums, fade, A)
    return ahead, following, (new_top, new_total), whole, sums


@gluon.jit
def _join(part, whole, sums, parked, position, segment, A: gl.constexpr):
    """A segment's part of the softmax with those of the segments before it, whose sums are parked."""
    top, total = part
    if segment > 0:
        whole_top, whole_total = whole
        before = parked.load(A)
        highest = gl.maximum(whole_top, top)
        fade = gl.exp2(whole_top - highest)
        part_fade = gl.exp2(top - highest)
        kept = position < segment  # queries that come before this segment keep what they have
        total = gl.where(kept, whole_total, gl.fma(whole_total, fade, total * part_fade))
        top = gl.where(kept, whole_top, highest)
        new = gl.fma(before, _spread(fade, before.shape, A), sums * _spread(part_fade, before.shape, A))
        sums = gl.where(gl.convert_layout(kept, gl.SliceLayout(1, A))[:, None], before, new)
    return (top, total), sums


@gluon.jit
def _spread(x, shape: gl.constexpr, A: gl.constexpr):
    """A number for each row, across a tile."""
    return gl.convert_layout(x, gl.SliceLayout(1, A))[:, None] + gl.zeros(shape, x.dtype, A)


@gluon.jit
def _multiply(
    out, lse, scale, tiles, orders, bars, parked, HEADS: gl.constexpr, GROUPS: gl.constexpr,
    WORKER: gl.constexpr, WIDTH: gl.constexpr, W: gl.constexpr, JOINS: gl.constexpr, CAUSAL: gl.constexpr,
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
            queries = q_tiles.index(queue_slot * WORKERS + WORKER).load(gl.DotOperandLayout(0, S, 2))
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
            n = last // TILE + 1
            scores = _scores(queries, tiles, bars, count, S)
            even = _scores(queries, tiles, bars, count + gl.minimum(n - 1, 1), S)  # of a single tile: twice
            scores = warpgroup_mma_wait(1, [scores])
            top, total, _fade, masses = _softmax(scores, top, total, position, 0, scale, True, S, P, DTYPE)
            _values_come(bars, count)
            mbarrier.arrive(empty.index(count % KEY_STAGES), count=1)
            part = (top, total)
            whole = (top, total)
            # Tiles that every query sees whole need no mask. By pairs, since each has scores of its own.
            pairs = gl.maximum(gl.minimum((first + 1) // TILE, n - 1) - 1, 0) // 2
            even = warpgroup_mma_wait(0, [even])
            for pair in range(pairs):
                tile = (2 * pair + 1) * TILE
                odd, masses, part, whole, sums = _step(
                    queries, even, masses, part, whole, sums, parked, position, tile, scale, tiles, bars,
                    count + 2 * pair + 1, True, False, False, JOINS, S, A, P,
                )  # fmt: skip
                even, masses, part, whole, sums = _step(
                    queries, odd, masses, part, whole, sums, parked, position, tile + TILE, scale, tiles, bars,
                    count + 2 * pair + 2, True, True, False, JOINS, S, A, P,
                )  # fmt: skip
            scores = even
            for at in range(2 * pairs + 1, n - 1):
                scores, masses, part, whole, sums = _step(
                    queries, scores, masses, part, whole, sums, parked, position, at * TILE, scale, tiles, bars,
                    count + at, True, True, True, JOINS, S, A, P,
                )  # fmt: skip
            if n > 1:
                _none, masses, part, whole, sums = _step(
                    queries, scores, masses, part, whole, sums, parked, position, (n - 1) * TILE, scale, tiles, bars,
                    count + n - 1, False, True, True, JOINS, S, A, P,
                )  # fmt: skip
            count += n
            adding = _sums(masses, sums, tiles, count - 1)
            sums, masses = warpgroup_mma_wait(0, [adding, masses])
            if JOINS:
                part, sums = _join(part, whole, sums, parked, position, last // SEGMENT * SEGMENT, A)
            top, total = part
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
                stage = count % KEY_STAGES
                mbarrier.wait(k_full.index(stage), count // KEY_STAGES & 1)
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


@gluon.jit(do_not_specialize=["sequences", "tokens", "blocks", "tasks"])
def _prefill(
    q, k, v, k_described, v_described, v_step, query_start, context, block_start, out, lse, counter, sequences, tokens,
    blocks, tasks, scale, HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, W: gl.constexpr,
    BOX: gl.constexpr, JOINS: gl.constexpr, CAUSAL: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype.element_ty
    tiles = (
        gl.allocate_shared_memory(DTYPE, [WORKERS * QUEUE, ROWS, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [KEY_STAGES, TILE, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [VALUE_STAGES, TILE, W], SWIZZLED),
    )
    orders = gl.allocate_shared_memory(gl.int32, [QUEUE * FIELDS, 1], mbarrier.MBarrierLayout())
    bars = (
        _barriers(QUEUE, LOADERS + 1), _barriers(QUEUE, WORKERS), _barriers(KEY_STAGES, 1),
        _barriers(VALUE_STAGES, 1), _barriers(KEY_STAGES, WORKERS),
    )  # fmt: skip
    PARKING: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    PARKED: gl.constexpr = ROWS if JOINS else 16
    parked = (
        gl.allocate_shared_memory(gl.float32, [PARKED, W], PARKING),
        gl.allocate_shared_memory(gl.float32, [PARKED, W], PARKING),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                bring,
                (
                    q, k, v, k_described, v_described, v_step, query_start, context, block_start, counter, sequences,
                    tokens, blocks, tasks, tiles, orders, bars, HEADS, GROUPS, WIDTH, W, BOX, CAUSAL, PAGE,
                ),
            ),
            (_multiply, (out, lse, scale, tiles, orders, bars, parked[0], HEADS, GROUPS, 0, WIDTH, W, JOINS, CAUSAL)),
            (_multiply, (out, lse, scale, tiles, orders, bars, parked[1], HEADS, GROUPS, 1, WIDTH, W, JOINS, CAUSAL)),
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
        tokens, blocks, tasks, scale, HEADS=heads, GROUPS=groups, WIDTH=width, W=tile_width,
        BOX=box, JOINS=blocks * block_size > SEGMENT.value, CAUSAL=causal, PAGE=block_size if blocks > 1 else 0, num_warps=4, maxnreg=REGISTERS_EACH, **EXACT,
    )  # fmt: skip
