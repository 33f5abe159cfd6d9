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
HELD = gl.constexpr(False)
NOMAX = gl.constexpr(False)
TURNS = gl.constexpr(0)  # 1: the other may when products are begun, 2: when scores are there
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


FADE = {
    n: (
        "{.reg .pred moved, other; setp.neu.f32 moved, $%d, 0f3F800000; setp.neu.f32 other, $%d, 0f3F800000;"
        " or.pred moved, moved, other; vote.sync.any.pred moved, moved, 0xffffffff; @!moved bra.uni KEPT; %s KEPT: }"
        % (2 * n, 2 * n + 2, " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))),
        ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n),
    )
    for n in (32, 64)
}  # a thread's n sums times the fades of its two rows, unless all fades of the warp are 1


def _kept(n):
    """Assembly that stores, adds and loads a thread's n sums: (to, (assembly, constraints))."""
    nothing = n // 4  # registers of the results that an operation must have: bytes
    fours = [range(i, i + 4) for i in range(0, n, 4)]
    place = "{.reg .b64 at; mov.b64 at, $%d; "
    where = [f"[at + {512 * i * 4}]" for i in range(len(fours))]
    of = lambda name, each: "{" + ", ".join(name % i for i in each) + "}"
    store = place % (nothing + n) + " ".join(
        f"st.relaxed.gpu.global.v4.f32 {at}, {of('$%d', [nothing + i for i in each])};" for at, each in zip(where, fours)
    ) + "}"
    load = place % n + " ".join(
        f"ld.relaxed.gpu.global.v4.f32 {of('$%d', each)}, {at};" for at, each in zip(where, fours)
    ) + "}"
    share, fade, base = nothing + n, nothing + 2 * n, nothing + 3 * n
    add = (
        place % base
        + f".reg .pred moved, other; .reg .f32 t<{n}>, b<4>; "
        + " ".join(f"mul.f32 t{i}, ${nothing + i}, ${share + i};" for i in range(n))
        + f" setp.neu.f32 moved, ${fade}, 0f3F800000; setp.neu.f32 other, ${fade + 2}, 0f3F800000;"
        " or.pred moved, moved, other; vote.sync.any.pred moved, moved, 0xffffffff; @moved bra.uni MOVED; "
        + " ".join(f"red.relaxed.gpu.global.add.v4.f32 {at}, {of('t%d', each)};" for at, each in zip(where, fours))
        + " bra.uni DONE; MOVED: "
        + " ".join(
            f"ld.relaxed.gpu.global.v4.f32 {{b0, b1, b2, b3}}, {at}; "
            + " ".join(f"mul.f32 b{j}, b{j}, ${fade + i}; add.ftz.f32 b{j}, b{j}, t{i};" for j, i in enumerate(each))
            + f" st.relaxed.gpu.global.v4.f32 {at}, {{b0, b1, b2, b3}};"
            for at, each in zip(where, fours)
        )
        + " DONE: }"
    )
    none = ["=r"] * nothing
    return {
        "store": (store, ",".join([*none, *["f"] * n, *["l"] * n])),
        "load": (load, ",".join([*["=f"] * n, *["l"] * n])),
        "add": (add, ",".join([*none, *["f"] * (3 * n), *["l"] * n])),
    }


FADE_32 = gl.constexpr(FADE[32])
FADE_64 = gl.constexpr(FADE[64])
STORE_32 = gl.constexpr(_kept(32)["store"])
STORE_64 = gl.constexpr(_kept(64)["store"])
LOAD_32 = gl.constexpr(_kept(32)["load"])
LOAD_64 = gl.constexpr(_kept(64)["load"])
ADD_32 = gl.constexpr(_kept(32)["add"])
ADD_64 = gl.constexpr(_kept(64)["add"])



@gluon.jit
def _faded(sums, fade, A: gl.constexpr):
    """sums * fade, skipped by warps whose rows' references have not moved: then fades are 1."""
    ASM: gl.constexpr = FADE_64 if sums.shape[1] == 128 else FADE_32
    return gl.inline_asm_elementwise(
        ASM[0], ASM[1], [sums, _spread(fade, sums.shape, A)], gl.float32, is_pure=True, pack=sums.shape[1] // 2
    )


@gluon.jit
def _await_turn(bars, count, WORKER: gl.constexpr):
    if TURNS > 0:
        mbarrier.wait(bars[6].index(WORKER), count & 1 if WORKER > 0 else count & 1 ^ 1)


@gluon.jit
def _end_turn(bars, WORKER: gl.constexpr, WHEN: gl.constexpr):
    if TURNS == WHEN:
        mbarrier.arrive(bars[6].index(1 - WORKER), count=1)


@gluon.jit
def _scores(queries, tiles, bars, count, S: gl.constexpr):
    """Begins to multiply the queries with tile `count` of keys."""
    _queries, k_tiles, _values = tiles
    _q_full, _q_empty, k_full, _v_full, _k_empty, _v_empty, _turns = bars
    stage = count % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    zeros = gl.zeros((ROWS, TILE), gl.float32, S)
    return warpgroup_mma(queries, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _sums(masses, sums, tiles, bars, count, continues):
    """Begins to add the values of tile `count`."""
    _queries, _keys, v_tiles = tiles
    _q_full, _q_empty, _k_full, v_full, _k_empty, _v_empty, _turns = bars
    stage = count % STAGES
    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
    return warpgroup_mma(masses, v_tiles.index(stage), sums, use_acc=continues, is_async=True)


@gluon.jit
def _softmax(
    scores, top, total, position, tile, scale, MASKED: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """(top, total, fade of what there is, masses to multiply)."""
    if MASKED:
        key = tile + gl.arange(0, TILE, gl.SliceLayout(0, S))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    if NOMAX and not MASKED:
        highest = gl.where(top == float('-inf'), scale * 0.0, top)
    else:
        highest = moved(top, gl.max(scores, 1) * scale)
    masses = gl.exp2(gl.fma(scores, gl.full(scores.shape, scale, gl.float32, S), -highest[:, None]))
    fade = gl.exp2(top - highest)
    total = gl.fma(total, fade, gl.sum(masses, 1))
    return highest, total, fade, masses


@gluon.jit
def _weights(part, whole):
    """(part of both, factor of the sums before, factor of the part's)"""
    top, total = part
    whole_top, whole_total = whole
    highest = moved(whole_top, top)
    fade = gl.exp2(whole_top - highest)
    part_fade = gl.exp2(top - highest)
    total = whole_total * fade + total * part_fade
    return (highest, total), fade, part_fade


@gluon.jit
def _settle(part, whole, sums, parked, tile, A: gl.constexpr):
    """At a segment's first tile: the segment before it joins those before that."""
    PACK: gl.constexpr = sums.shape[1] // 2
    if tile > SEGMENT:
        ADD: gl.constexpr = ADD_64 if PACK == 64 else ADD_32
        whole, fade, part_fade = _weights(part, whole)
        gl.inline_asm_elementwise(
            ADD[0], ADD[1], [sums, _spread(part_fade, sums.shape, A), _spread(fade, sums.shape, A), parked], gl.int8,
            is_pure=False, pack=PACK,
        )
    else:
        STORE: gl.constexpr = STORE_64 if PACK == 64 else STORE_32
        whole = part
        gl.inline_asm_elementwise(STORE[0], STORE[1], [sums, parked], gl.int8, is_pure=False, pack=PACK)
    return whole


@gluon.jit
def _settled(part, whole, sums, parked, position, last, A: gl.constexpr):
    """The last segment's part with those before it."""
    segment = last // SEGMENT * SEGMENT
    if segment > 0:
        PACK: gl.constexpr = sums.shape[1] // 2
        LOAD: gl.constexpr = LOAD_64 if PACK == 64 else LOAD_32
        before = gl.inline_asm_elementwise(
            LOAD[0], LOAD[1], [parked], gl.float32, is_pure=False, pack=PACK
        )
        both, fade, part_fade = _weights(part, whole)
        new = before * _spread(fade, sums.shape, A)
        more = sums * _spread(part_fade, sums.shape, A)
        new = gl.inline_asm_elementwise("add.ftz.f32 $0, $1, $2;", "=f,f,f", [new, more], gl.float32, is_pure=True, pack=1)
        kept = position < segment  # queries that come before this segment
        sums = gl.where(gl.convert_layout(kept, gl.SliceLayout(1, A))[:, None], before, new)
        part = (gl.where(kept, whole[0], both[0]), gl.where(kept, whole[1], both[1]))
    return part, sums


@gluon.jit
def _step(
    queries, masses, part, whole, sums, parked, position, tile, scale, tiles, bars, count, MASKED: gl.constexpr,
    JOINS: gl.constexpr, S: gl.constexpr, A: gl.constexpr, P: gl.constexpr, DTYPE: gl.constexpr,
    WORKER: gl.constexpr,
):  # fmt: skip
    """One tile of keys, while the values of the one before it, whose masses are given, are added."""
    _q_full, _q_empty, _k_full, v_full, k_empty, v_empty, _turns = bars
    top, total = part
    masses = gl.convert_layout(masses.to(DTYPE), P)
    _await_turn(bars, count, WORKER)
    scores = _scores(queries, tiles, bars, count, S)
    adding = _sums(masses, sums, tiles, bars, count - 1, (tile - TILE) % SEGMENT != 0 if JOINS else True)
    _end_turn(bars, WORKER, 1)
    scores = warpgroup_mma_wait(1, [scores])
    _end_turn(bars, WORKER, 2)
    mbarrier.arrive(k_empty.index(count % STAGES), count=1)
    starts = tile % SEGMENT == 0
    begin_top = top
    begin_total = total
    if JOINS:
        begin_top = gl.where(starts, float("-inf"), top)
        begin_total = gl.where(starts, 0.0, total)
    new_top, new_total, fade, following = _softmax(
        scores, begin_top, begin_total, position, tile, scale, MASKED, S, P, DTYPE
    )
    mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
    sums, masses = warpgroup_mma_wait(0, [adding, masses])
    mbarrier.arrive(v_empty.index((count - 1) % STAGES), count=1)
    if JOINS:
        if starts:
            whole = _settle(part, whole, sums, parked, tile, A)
        else:
            sums = _faded(sums, fade, A)
    else:
        sums = _faded(sums, fade, A)
    return following, (new_top, new_total), whole, sums


@gluon.jit
def _spread(x, shape: gl.constexpr, A: gl.constexpr):
    """A number for each row, across a tile."""
    return gl.convert_layout(x, gl.SliceLayout(1, A))[:, None] + gl.zeros(shape, x.dtype, A)


@gluon.jit
def _multiply(
    out, lse, scale, tiles, orders, bars, parked, WORKER: gl.constexpr, HEADS: gl.constexpr, GROUPS: gl.constexpr,
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
    q_full, q_empty, k_full, v_full, k_empty, v_empty, _turns = bars
    down = gl.arange(0, ROWS, gl.SliceLayout(1, A))[:, None]
    along = gl.arange(0, W, gl.SliceLayout(0, A))[None, :]
    thread = down // 16 * 32 + down % 8 * 4 + along % 8 // 2
    parked = parked + thread.to(gl.int64) * 16
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
            if HELD:
                queries = q_tiles.index(queue_slot * WORKERS + WORKER).load(gl.DotOperandLayout(0, S, 2))
                mbarrier.arrive(q_empty.index(queue_slot), count=1)
            else:
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
            n = last // TILE + 1
            _await_turn(bars, count, WORKER)
            scores = _scores(queries, tiles, bars, count, S)
            _end_turn(bars, WORKER, 1)
            scores = warpgroup_mma_wait(0, [scores])
            _end_turn(bars, WORKER, 2)
            mbarrier.arrive(k_empty.index(count % STAGES), count=1)
            top, total, _fade, masses = _softmax(scores, top, total, position, 0, scale, True, S, P, DTYPE)
            part = (top, total)
            whole = (top, total)
            # Tiles that every query sees whole need no mask.
            whole_tiles = gl.minimum(gl.maximum((first + 1) // TILE, 1), n)
            for at in range(1, whole_tiles):
                masses, part, whole, sums = _step(
                    queries, masses, part, whole, sums, parked, position, at * TILE, scale, tiles, bars, count + at,
                    False, JOINS, S, A, P, DTYPE, WORKER,
                )  # fmt: skip
            for at in range(whole_tiles, n):
                masses, part, whole, sums = _step(
                    queries, masses, part, whole, sums, parked, position, at * TILE, scale, tiles, bars, count + at,
                    True, JOINS, S, A, P, DTYPE, WORKER,
                )  # fmt: skip
            count += n
            if not HELD:
                mbarrier.arrive(q_empty.index(queue_slot), count=1)
            masses = gl.convert_layout(masses.to(DTYPE), P)
            adding = _sums(masses, sums, tiles, bars, count - 1, (n - 1) * TILE % SEGMENT != 0 if JOINS else True)
            sums, masses = warpgroup_mma_wait(0, [adding, masses])
            mbarrier.arrive(v_empty.index((count - 1) % STAGES), count=1)
            if JOINS:
                part, sums = _settled(part, whole, sums, parked, position, last, A)
            top, total = part
            output = divided(sums, gl.convert_layout(total, gl.SliceLayout(1, A))).to(DTYPE)
            at = (token + row // SHARE).to(gl.int64) * HEADS + group * SHARE + row % SHARE
            gl.store(lse + at, (top + gl.log2(total)) * 0.6931471805599453, row < rows)
            FORM: gl.constexpr = A if STAGES > 2 else WHOLE  # straight from registers, where shared memory is full
            stored = begin + gl.arange(0, ROWS, gl.SliceLayout(1, FORM))
            at = (token + stored // SHARE).to(gl.int64) * HEADS + group * SHARE + stored % SHARE
            d = gl.arange(0, W, gl.SliceLayout(0, FORM))
            gl.store(
                out + at[:, None] * WIDTH + d[None, :], gl.convert_layout(output, FORM),
                (stored < rows)[:, None] & (d < WIDTH)[None, :],
            )  # fmt: skip
        else:  # no rows for this warpgroup
            mbarrier.arrive(q_empty.index(queue_slot), count=1)
            for _ in range(0, last + 1, TILE):
                stage = count % STAGES
                mbarrier.wait(k_full.index(stage), count // STAGES & 1)
                mbarrier.wait(v_full.index(stage), count // STAGES & 1)
                mbarrier.arrive(k_empty.index(stage), count=1)
                mbarrier.arrive(v_empty.index(stage), count=1)
                _await_turn(bars, count, WORKER)
                _end_turn(bars, WORKER, TURNS)
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
    q, k, v, k_described, v_described, v_step, query_start, context, block_start, out, lse, scratch, counter, sequences, tokens,
    blocks, tasks, scale, HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, W: gl.constexpr,
    BOX: gl.constexpr, JOINS: gl.constexpr, CAUSAL: gl.constexpr, PAGE: gl.constexpr,
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
        _barriers(STAGES, LOADERS), _barriers(STAGES, WORKERS), _barriers(STAGES, WORKERS), _barriers(WORKERS, 1),
    )  # fmt: skip
    parked = scratch.to(gl.int64) + gl.program_id(0).to(gl.int64) * (WORKERS * ROWS * W * 4)
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
            (_multiply, (out, lse, scale, tiles, orders, bars, parked, 0, HEADS, GROUPS, WIDTH, W, JOINS, CAUSAL)),
            (_multiply, (out, lse, scale, tiles, orders, bars, parked + ROWS * W * 4, 1, HEADS, GROUPS, WIDTH, W, JOINS, CAUSAL)),
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
    scratch = q.new_empty(programs * WORKERS.value * ROWS.value * tile_width if joins else 1, dtype=torch.float32)
    _prefill[(programs,)](
        q, k, v, k_described, v_described, v_step, query_start, context, block_start, out, lse, scratch, counter, sequences,
        tokens, blocks, tasks, scale, HEADS=heads, GROUPS=groups, WIDTH=width, W=tile_width,
        BOX=box, JOINS=joins, CAUSAL=causal,
        PAGE=block_size if blocks > 1 else 0, num_warps=4, maxnreg=REGISTERS_EACH, **EXACT,
    )  # fmt: skip
