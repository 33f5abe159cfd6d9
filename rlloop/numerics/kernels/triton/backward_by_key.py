"""Gradients of attention by its keys and values, on Hopper: one warpgroup of a program brings tiles, two multiply.

A warpgroup has 64 keys, and adds up over the heads that read them, of each over the tiles of queries in order.
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

from rlloop.numerics.kernels.triton.backward_loads import OWNED, STAGES, TILE, bring_keys
from rlloop.numerics.kernels.triton.prefill import REGISTERS, SWIZZLED, barriers
from rlloop.numerics.kernels.triton.prefill_loads import FIELDS, LOADERS, WORKERS, ordered


@gluon.jit
def _step(
    keys, values, key_sums, value_sums, scale, tiles, bars, count, MASKED: gl.constexpr, COPIED: gl.constexpr,
    S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """(sums of dk, of dv) with a tile of queries. `MASKED`: query i reads keys up to i. `COPIED`: the tile may have
    come by copies that are not bulk copies."""
    q_tiles, grad_tiles, _keys, _values, numbers = tiles
    _owned_full, _owned_empty, full, empty = bars
    stage = count % STAGES
    queries = q_tiles.index(stage)
    grads = grad_tiles.index(stage)
    zeros = gl.zeros((TILE, TILE), gl.float32, S)
    mbarrier.wait(full.index(stage), count // STAGES & 1)
    if COPIED:
        fence_async_shared()
    scores = warpgroup_mma(keys, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
    by_mass = warpgroup_mma(values, grads.permute((1, 0)), zeros, use_acc=False, is_async=True)
    log_total = numbers.index(stage).slice(0, TILE).load(gl.SliceLayout(0, S))
    scores = warpgroup_mma_wait(1, [scores])
    masses = gl.exp2(gl.fma(scores, gl.full(scores.shape, scale, gl.float32, S), -log_total[None, :]))
    if MASKED:
        key = gl.arange(0, TILE, gl.SliceLayout(1, S))
        position = gl.arange(0, TILE, gl.SliceLayout(0, S))
        masses = gl.where(key[:, None] <= position[None, :], masses, 0.0)
    by_key = gl.convert_layout(masses.to(keys.dtype), P)
    value_sums = warpgroup_mma(by_key, grads, value_sums, is_async=True)
    delta = numbers.index(stage).slice(TILE, TILE).load(gl.SliceLayout(0, S))
    by_mass = warpgroup_mma_wait(1, [by_mass])
    by_score = gl.convert_layout((masses * (by_mass - delta[None, :])).to(keys.dtype), P)
    key_sums = warpgroup_mma(by_score, queries, key_sums, is_async=True)
    key_sums, value_sums, by_key, by_score = warpgroup_mma_wait(0, [key_sums, value_sums, by_key, by_score])
    mbarrier.arrive(empty.index(stage), count=1)
    return key_sums, value_sums


@gluon.jit
def _write(to, sums, at, rows_inside, W: gl.constexpr, A: gl.constexpr):
    d = gl.arange(0, W, gl.SliceLayout(0, A))
    gl.store(to + at[:, None] + d[None, :], sums.to(to.dtype.element_ty), rows_inside[:, None])


@gluon.jit
def _multiply(
    grad_k, grad_v, scale, tiles, orders, bars, WORKER: gl.constexpr, HEADS: gl.constexpr, GROUPS: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    LOG2E: gl.constexpr = 1.4426950408889634
    _queries, _grads, k_tiles, v_tiles, _numbers = tiles
    owned_full, owned_empty, full, empty = bars
    keys = k_tiles.index(WORKER)
    values = v_tiles.index(WORKER)
    done = 0
    count = 0
    mbarrier.wait(owned_full.index(0), 0)
    rows = ordered(orders, 0, 0)
    while rows > 0:
        begin = ordered(orders, 0, 1)
        token = ordered(orders, 0, 2)
        end = ordered(orders, 0, 3)
        group = ordered(orders, 0, 4)
        fence_async_shared()
        brought = gl.cdiv(end - begin, TILE)  # tiles of queries of each head
        key_sums = gl.zeros((TILE, W), gl.float32, A)
        value_sums = gl.zeros((TILE, W), gl.float32, A)
        for _ in range(HEADS // GROUPS):
            for i in range(gl.minimum(brought, WORKER)):  # queries before these keys
                stage = (count + i) % STAGES
                mbarrier.wait(full.index(stage), (count + i) // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
            for i in range(WORKER, gl.minimum(brought, WORKER + 1)):
                key_sums, value_sums = _step(
                    keys, values, key_sums, value_sums, scale * LOG2E, tiles, bars, count + i, True, True, S, P
                )
            for i in range(WORKER + 1, brought - 1):
                key_sums, value_sums = _step(
                    keys, values, key_sums, value_sums, scale * LOG2E, tiles, bars, count + i, False, False, S, P
                )
            for i in range(gl.maximum(WORKER + 1, brought - 1), brought):
                key_sums, value_sums = _step(
                    keys, values, key_sums, value_sums, scale * LOG2E, tiles, bars, count + i, False, True, S, P
                )
            count += brought
        mbarrier.arrive(owned_empty.index(0), count=1)
        row = begin + WORKER * TILE + gl.arange(0, TILE, gl.SliceLayout(1, A))
        at = ((token + row).to(gl.int64) * GROUPS + group) * W
        _write(grad_k, key_sums * scale, at, row < rows, W, A)
        _write(grad_v, value_sums, at, row < rows, W, A)
        done += 1
        mbarrier.wait(owned_full.index(0), done & 1)
        rows = ordered(orders, 0, 0)


@gluon.jit(do_not_specialize=["sequences", "tokens", "tasks"])
def by_key(
    q, k, v, grad, q_rows, k_rows, v_rows, grad_rows, query_start, readers, statistics, grad_k, grad_v, taken,
    sequences, tokens, tasks, scale, HEADS: gl.constexpr, GROUPS: gl.constexpr, W: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """`statistics`: as `by_query` fills them. `taken`: as there."""
    DTYPE: gl.constexpr = q.dtype.element_ty
    tiles = (
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [WORKERS, TILE, W], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [WORKERS, TILE, W], SWIZZLED),
        gl.allocate_shared_memory(gl.float32, [STAGES, 2 * TILE], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    orders = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], mbarrier.MBarrierLayout())
    bars = (barriers(1, OWNED), barriers(1, WORKERS), barriers(STAGES, 3 * LOADERS), barriers(STAGES, WORKERS))
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                bring_keys,
                (
                    q, k, v, grad, q_rows, k_rows, v_rows, grad_rows, query_start, readers, statistics, taken,
                    sequences, tokens, tasks, tiles, orders, bars, HEADS, GROUPS, W, SHARED,
                ),
            ),
            (_multiply, (grad_k, grad_v, scale, tiles, orders, bars, 0, HEADS, GROUPS, W)),
            (_multiply, (grad_k, grad_v, scale, tiles, orders, bars, 1, HEADS, GROUPS, W)),
        ],
        [4, 4], [REGISTERS, REGISTERS],
    )  # fmt: skip
