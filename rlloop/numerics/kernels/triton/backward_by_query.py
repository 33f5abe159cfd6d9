"""Gradients of attention by its queries, on Hopper: one warpgroup of a program brings tiles, two multiply.

A warpgroup has 64 queries of one head. While a tile's gradients by scores are added to the sums, the next tile's scores
are made, and the products of the outputs' gradients with its values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rlloop.numerics.kernels.triton.backward_loads import BLOCK, OWNED, STAGES, TILE, bring_queries
from rlloop.numerics.kernels.triton.prefill import REGISTERS, SWIZZLED, barriers
from rlloop.numerics.kernels.triton.prefill_loads import FIELDS, LOADERS, WORKERS, ordered


@gluon.jit
def _step(
    queries, grads, by_score, sums, log_total, delta, position, tile, scale, tiles, bars, count, FIRST: gl.constexpr,
    MASKED: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """(gradients by the scores of a tile of keys, sums of dq), while the tile before it, whose gradients by scores are
    given, is added to the sums. `FIRST`: there is none."""
    _queries, _grads, k_tiles, v_tiles = tiles
    _owned_full, _owned_empty, k_full, v_full, k_empty, v_empty = bars
    stage = count % STAGES
    phase = count // STAGES & 1
    before = (count - 1) % STAGES
    zeros = gl.zeros((TILE, TILE), gl.float32, S)
    mbarrier.wait(k_full.index(stage), phase)
    if MASKED:
        fence_async_shared()  # a sequence's last keys are copied, which is no bulk copy
    scores = warpgroup_mma(queries, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    if MASKED:
        fence_async_shared()
    by_mass = warpgroup_mma(grads, v_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if FIRST:
        adding = sums
        scores = warpgroup_mma_wait(1, [scores])
    else:
        adding = warpgroup_mma(by_score, k_tiles.index(before), sums, is_async=True)
        scores = warpgroup_mma_wait(2, [scores])
    masses = gl.exp2(gl.fma(scores, gl.full(scores.shape, scale, gl.float32, S), -log_total[:, None]))
    if MASKED:
        key = tile + gl.arange(0, TILE, gl.SliceLayout(0, S))
        masses = gl.where(key[None, :] <= position[:, None], masses, 0.0)
    by_mass = warpgroup_mma_wait(0 if FIRST else 1, [by_mass])
    mbarrier.arrive(v_empty.index(stage), count=1)
    following = masses * (by_mass - delta[:, None])
    if not FIRST:
        adding, by_score = warpgroup_mma_wait(0, [adding, by_score])
        mbarrier.arrive(k_empty.index(before), count=1)
    # Only now, since registers that a product reads must not change while one is under way.
    return gl.convert_layout(following.to(k_tiles.dtype), P), adding


@gluon.jit
def _multiply(
    out, lse, grad_q, statistics, tokens, scale, tiles, orders, bars, WORKER: gl.constexpr, HEADS: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    READ: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    LOG2E: gl.constexpr = 1.4426950408889634
    q_tiles, grad_tiles, k_tiles, _values = tiles
    owned_full, owned_empty, k_full, v_full, k_empty, v_empty = bars
    done = 0
    count = 0
    mbarrier.wait(owned_full.index(0), 0)
    rows = ordered(orders, 0, 0)
    while rows > 0:
        begin = ordered(orders, 0, 1)
        token = ordered(orders, 0, 2)
        before = ordered(orders, 0, 3)
        head = ordered(orders, 0, 4)
        brought = gl.cdiv(before + gl.minimum(begin + BLOCK, rows), TILE)
        begin += WORKER * TILE
        read = 0
        if begin < rows:
            read = (before + begin) // TILE + 1
            fence_async_shared()
            queries = q_tiles.index(WORKER)
            grads = grad_tiles.index(WORKER)
            row = begin + gl.arange(0, TILE, gl.SliceLayout(1, READ))
            at = ((token + row).to(gl.int64) * HEADS + head) * W
            outputs = gl.load(
                out + at[:, None] + gl.arange(0, W, gl.SliceLayout(0, READ))[None, :], (row < rows)[:, None], 0.0
            )
            delta = gl.sum(outputs.to(gl.float32) * grads.load(READ).to(gl.float32), 1)
            delta = gl.convert_layout(delta, gl.SliceLayout(1, S))
            position = begin + gl.arange(0, TILE, gl.SliceLayout(1, S))
            log_total = gl.load(lse + (token + position) * HEADS + head, position < rows, 0.0) * LOG2E
            at = head.to(gl.int64) * tokens + token + position
            gl.store(statistics + at, log_total, position < rows)
            gl.store(statistics + at + HEADS * tokens, delta, position < rows)
            sums = gl.zeros((TILE, W), gl.float32, A)
            position += before
            by_score = gl.convert_layout(gl.zeros((TILE, TILE), DTYPE, S), P)
            by_score, sums = _step(
                queries, grads, by_score, sums, log_total, delta, position, 0, scale * LOG2E, tiles, bars, count, True,
                True, S, P,
            )  # fmt: skip
            whole = gl.maximum(read - 1, 1)  # tiles that every query reads whole need no mask
            for i in range(1, whole):
                by_score, sums = _step(
                    queries, grads, by_score, sums, log_total, delta, position, i * TILE, scale * LOG2E, tiles, bars,
                    count + i, False, False, S, P,
                )  # fmt: skip
            for i in range(whole, read):
                by_score, sums = _step(
                    queries, grads, by_score, sums, log_total, delta, position, i * TILE, scale * LOG2E, tiles, bars,
                    count + i, False, True, S, P,
                )  # fmt: skip
            mbarrier.arrive(owned_empty.index(0), count=1)
            last = (count + read - 1) % STAGES
            sums = warpgroup_mma(by_score, k_tiles.index(last), sums, is_async=True)
            sums, by_score = warpgroup_mma_wait(0, [sums, by_score])
            mbarrier.arrive(k_empty.index(last), count=1)
            row = begin + gl.arange(0, TILE, gl.SliceLayout(1, A))
            at = ((token + row).to(gl.int64) * HEADS + head) * W
            gl.store(
                grad_q + at[:, None] + gl.arange(0, W, gl.SliceLayout(0, A))[None, :], (sums * scale).to(DTYPE),
                (row < rows)[:, None],
            )  # fmt: skip
        else:
            mbarrier.arrive(owned_empty.index(0), count=1)
        for i in range(read, brought):  # the other warpgroup's
            stage = (count + i) % STAGES
            phase = (count + i) // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.arrive(v_empty.index(stage), count=1)
        count += brought
        done += 1
        mbarrier.wait(owned_full.index(0), done & 1)
        rows = ordered(orders, 0, 0)


@gluon.jit(do_not_specialize=["sequences", "tokens", "tasks"])
def by_query(
    q, k, v, grad, q_rows, k_rows, v_rows, grad_rows, query_start, context, prefixes, out, lse, grad_q, statistics,
    taken, sequences, tokens, tasks, scale, HEADS: gl.constexpr, GROUPS: gl.constexpr, W: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """Also fills `statistics` [2, HEADS, tokens]: the log2 of sums of exponentials, and what each output's gradient
    adds up to with its output. `taken`: the number of tasks taken beside those that programs begin with."""
    DTYPE: gl.constexpr = q.dtype.element_ty
    tiles = (
        gl.allocate_shared_memory(DTYPE, [WORKERS, TILE, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [WORKERS, TILE, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE, W], SWIZZLED),
    )
    orders = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], mbarrier.MBarrierLayout())
    bars = (
        barriers(1, OWNED), barriers(1, WORKERS), barriers(STAGES, LOADERS), barriers(STAGES, LOADERS),
        barriers(STAGES, WORKERS), barriers(STAGES, WORKERS),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                bring_queries,
                (
                    q, k, v, grad, q_rows, k_rows, v_rows, grad_rows, query_start, context, prefixes, taken, sequences,
                    tokens, tasks, tiles, orders, bars, HEADS, GROUPS, W, SHARED,
                ),
            ),
            (_multiply, (out, lse, grad_q, statistics, tokens, scale, tiles, orders, bars, 0, HEADS, W)),
            (_multiply, (out, lse, grad_q, statistics, tokens, scale, tiles, orders, bars, 1, HEADS, W)),
        ],
        [4, 4], [REGISTERS, REGISTERS],
    )  # fmt: skip
