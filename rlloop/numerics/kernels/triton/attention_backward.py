"""Gradients of attention, from its output and log-sum-exp, over whole sequences whose keys are the flat tokens.

With p the softmax recomputed from the log-sum-exp: dv_j = sum of p_ij do_i; ds_ij = p_ij (do_i . v_j - do_i . o_i)
scale; dq_i = sum of ds_ij k_j; dk_j = sum of ds_ij q_i. One kernel owns queries, the other keys: nothing is added up by
atomics, so a gradient has the same bits in every run. Both make p and ds, seven products in all: making them once, with
sums of dq written and read again between blocks of keys, was no faster.

`SHARED`: the sequences are in families. The queries that read a prefix's keys are flat tokens in a row, its own and
then those of the sequences that go on from it, so its sums go on over them.

`MASKED`: some query does not read all of a tile's keys, or some are not there. Without it the numbers are the same, in
fewer instructions.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.attention import _find
from rlloop.numerics.kernels.triton.attention_tiles import load_rows
from rlloop.numerics.kernels.triton.launch import aligned, gluon_runs, power_of_two
from rlloop.numerics.kernels.triton.wide_backward import causal_reads, wide_backward
from rlloop.numerics.layout import AttentionLayout


class Tiles(NamedTuple):
    """Queries and keys of a product, warps of a program, and tiles in flight."""

    rows: int
    tile: int
    warps: int
    stages: int


HALF, FLOAT32 = Tiles(64, 64, 4, 2), Tiles(32, 32, 4, 1)
# Of 16-bit numbers, by the widest head that they are for: tiles where queries are owned, and where keys are.
PLAIN = {64: (HALF, HALF), 128: (Tiles(128, 64, 8, 3), Tiles(32, 64, 4, 3)), 256: (HALF, HALF)}
WIDEST = 256  # numbers of a key that these kernels hold; of wider ones there is one head, and cuBLAS has enough to do


@triton.jit
def _rows(source, index, inside, WIDTH: tl.constexpr, W: tl.constexpr):
    return load_rows(source, index * WIDTH, inside, WIDTH, W, True)


@triton.jit
def _add_keys(
    sums, queries, slopes, log_total, delta, position, k, v, tile, token, before, prefix, last, group, scale,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, W: tl.constexpr, VW: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the sums [ROWS, W] of dq."""
    lane = tl.arange(0, TILE)
    key = tile + lane
    begin = token
    if SHARED:
        begin = tl.where(tile < before, prefix, token - before)
    at, seen = (begin + tile) * GROUPS + group, key <= last
    keys = load_rows(k + at * WIDTH, lane * (GROUPS * WIDTH), seen, WIDTH, W, MASKED)
    values = load_rows(v + at * V_WIDTH, lane * (GROUPS * V_WIDTH), seen, V_WIDTH, VW, MASKED)
    scores = tl.dot(queries, keys.T, input_precision="ieee") * (scale * 1.4426950408889634)
    masses = tl.exp2(scores - log_total[:, None])
    if MASKED:
        reads = key[None, :] <= position[:, None]
        if WINDOW > 0:
            reads = reads & (key[None, :] > position[:, None] - WINDOW)
        masses = tl.where(reads, masses, 0.0)
    by_mass = tl.dot(slopes, values.T, input_precision="ieee")
    by_score = masses * (by_mass - delta[:, None])
    return tl.dot(by_score.to(keys.dtype), keys, sums, input_precision="ieee")


@triton.jit
def _add_queries(
    key_sums, value_sums, keys, values, q, lse, grad, deltas, positions, token, before, begin, queries_of, key, group,
    scale, HEADS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, W: tl.constexpr,
    VW: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, PLACED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add a tile of queries to the sums [TILE, W] of dk and dv.

    `PLACED`: queries' positions are in `positions`, counted from `before`."""
    lane = tl.arange(0, ROWS)
    row = begin + lane
    valid, position = row < queries_of * SHARE, row // SHARE
    if ROWS % SHARE == 0:  # offsets are the same in every tile, and 32 bits hold them
        at, index = (token + begin // SHARE) * HEADS + group * SHARE, lane // SHARE * HEADS + lane % SHARE
    else:
        at, index = token * HEADS + group * SHARE, position.to(tl.int64) * HEADS + row % SHARE
    if PLACED:
        position = tl.load(positions + token + position, valid, 0) - before
    queries = load_rows(q + at * WIDTH, index * WIDTH, valid, WIDTH, W, MASKED)
    slopes = load_rows(grad + at * V_WIDTH, index * V_WIDTH, valid, V_WIDTH, VW, MASKED)
    if MASKED:
        log_total, delta = tl.load(lse + at + index, valid, 0.0), tl.load(deltas + at + index, valid, 0.0)
    else:
        log_total, delta = tl.load(lse + at + index), tl.load(deltas + at + index)
    log_total = log_total * 1.4426950408889634
    scores = tl.dot(keys, queries.T, input_precision="ieee") * (scale * 1.4426950408889634)
    masses = tl.exp2(scores - log_total[None, :])
    if MASKED:
        reads = valid[None, :]
        if CAUSAL:
            reads = (key[:, None] <= position[None, :]) & reads
        if WINDOW > 0:
            reads = reads & (key[:, None] > position[None, :] - WINDOW)
        masses = tl.where(reads, masses, 0.0)
    value_sums = tl.dot(masses.to(slopes.dtype), slopes, value_sums, input_precision="ieee")
    by_mass = tl.dot(values, slopes.T, input_precision="ieee")
    by_score = masses * (by_mass - delta[None, :])
    return tl.dot(by_score.to(queries.dtype), queries, key_sums, input_precision="ieee"), value_sums


@triton.jit(do_not_specialize=["sequences"])
def _by_query(
    q, k, v, query_start, context, prefixes, out, lse, grad, grad_q, deltas, sequences, scale, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, W: tl.constexpr, VW: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = HEADS // GROUPS
    group, task = tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)  # the longest sums begin first
    sequence = _find(query_start, sequences, task, SHARE, ROWS)
    token = tl.load(query_start + sequence)
    chunk = task - (token * SHARE // ROWS + sequence).to(tl.int32)
    rows = (tl.load(query_start + sequence + 1) - token).to(tl.int32) * SHARE
    row = chunk * ROWS + tl.arange(0, ROWS)
    if chunk * ROWS < rows:
        valid = row < rows
        index, position = (token + row // SHARE) * HEADS + group * SHARE + row % SHARE, row // SHARE
        queries, slopes = _rows(q, index, valid, WIDTH, W), _rows(grad, index, valid, V_WIDTH, VW)
        output = _rows(out, index, valid, V_WIDTH, VW)
        delta = tl.sum(slopes.to(tl.float32) * output.to(tl.float32), 1)
        tl.store(deltas + index, delta, valid)
        log_total = tl.load(lse + index, valid, 0.0) * 1.4426950408889634
        sums = tl.zeros((ROWS, W), tl.float32)
        first, last = chunk * ROWS // SHARE, (tl.minimum(chunk * ROWS + ROWS, rows) - 1) // SHARE
        before, prefix = 0, token
        if SHARED:
            before, prefix = tl.load(context + sequence).to(tl.int32), tl.load(prefixes + sequence)
            first, last, position = first + before, last + before, position + before
        if not CAUSAL:  # as in `attention._attention`
            last = rows // SHARE - 1
            first, position = last, last + row * 0
        lowest = 0
        if WINDOW > 0:
            lowest = tl.maximum(first - WINDOW + 1, 0) // TILE * TILE
        end = last + 1
        masked = lowest
        if WHOLE:
            # Tiles that every query reads whole need no mask. Without this `maximum` ptxas takes 50 registers more.
            masked = tl.maximum(tl.minimum(first + 1, end) // TILE * TILE, lowest)
            for tile in range(lowest, masked, TILE):
                sums = _add_keys(
                    sums, queries, slopes, log_total, delta, position, k, v, tile, token, before, prefix, last, group,
                    scale, GROUPS, WIDTH, V_WIDTH, W, VW, TILE, WINDOW, SHARED, False,
                )  # fmt: skip
        for tile in range(masked, end, TILE):
            sums = _add_keys(
                sums, queries, slopes, log_total, delta, position, k, v, tile, token, before, prefix, last, group,
                scale, GROUPS, WIDTH, V_WIDTH, W, VW, TILE, WINDOW, SHARED, True,
            )  # fmt: skip
        d = tl.arange(0, W)
        tl.store(
            grad_q + index[:, None] * WIDTH + d[None, :], (sums * scale).to(grad_q.dtype.element_ty),
            valid[:, None] & (d < WIDTH)[None, :],
        )  # fmt: skip


@triton.jit(do_not_specialize=["sequences"])
def _by_key(
    q, k, v, query_start, context, readers, positions, lse, grad, deltas, grad_k, grad_v, sequences, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, W: tl.constexpr,
    VW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    SHARED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = HEADS // GROUPS
    PLACED: tl.constexpr = SHARED and WINDOW > 0  # else what is further on reads all keys, wherever it stands
    group, task = tl.program_id(1), tl.program_id(0)
    sequence = _find(query_start, sequences, task, 1, TILE)
    token = tl.load(query_start + sequence)
    tile = (task - (token // TILE + sequence).to(tl.int32)) * TILE
    length = (tl.load(query_start + sequence + 1) - token).to(tl.int32)
    if tile < length:
        key = tile + tl.arange(0, TILE)
        at, seen = (token + key) * GROUPS + group, key < length
        keys, values = _rows(k, at, seen, WIDTH, W), _rows(v, at, seen, V_WIDTH, VW)
        key_sums, value_sums = tl.zeros((TILE, W), tl.float32), tl.zeros((TILE, VW), tl.float32)
        queries_of, start, end, before = length, tile, length, 0
        if SHARED:
            queries_of = (tl.load(readers + sequence) - token).to(tl.int32)
            end, before = queries_of, tl.load(context + sequence)
        elif WINDOW > 0:
            end = tl.minimum(length, tile + TILE + WINDOW - 1)
        if not CAUSAL:
            start = start * 0
        lowest, end = start * SHARE // ROWS * ROWS, end * SHARE
        masked = lowest
        if WHOLE:  # queries that all read all keys need no mask: from `whole` to `masked`
            whole = lowest
            if CAUSAL:
                whole = tl.minimum(tl.cdiv((tile + TILE - 1) * SHARE, ROWS) * ROWS, tl.cdiv(end, ROWS) * ROWS)
            masked = tl.maximum(queries_of * SHARE // ROWS * ROWS, whole)
            for begin in range(lowest, whole, ROWS):
                key_sums, value_sums = _add_queries(
                    key_sums, value_sums, keys, values, q, lse, grad, deltas, positions, token, before, begin,
                    queries_of, key, group, scale, HEADS, SHARE, WIDTH, V_WIDTH, W, VW, ROWS, WINDOW, CAUSAL, PLACED,
                    True,
                )  # fmt: skip
            for begin in range(whole, masked, ROWS):
                key_sums, value_sums = _add_queries(
                    key_sums, value_sums, keys, values, q, lse, grad, deltas, positions, token, before, begin,
                    queries_of, key, group, scale, HEADS, SHARE, WIDTH, V_WIDTH, W, VW, ROWS, WINDOW, CAUSAL, PLACED,
                    False,
                )  # fmt: skip
        for begin in range(masked, end, ROWS):
            key_sums, value_sums = _add_queries(
                key_sums, value_sums, keys, values, q, lse, grad, deltas, positions, token, before, begin, queries_of,
                key, group, scale, HEADS, SHARE, WIDTH, V_WIDTH, W, VW, ROWS, WINDOW, CAUSAL, PLACED, True,
            )  # fmt: skip
        d, dv = tl.arange(0, W), tl.arange(0, VW)
        tl.store(
            grad_k + at[:, None] * WIDTH + d[None, :], (key_sums * scale).to(grad_k.dtype.element_ty),
            seen[:, None] & (d < WIDTH)[None, :],
        )  # fmt: skip
        tl.store(
            grad_v + at[:, None] * V_WIDTH + dv[None, :], value_sums.to(grad_v.dtype.element_ty),
            seen[:, None] & (dv < V_WIDTH)[None, :],
        )  # fmt: skip


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float,
    window: int = 0, causal: bool = True, families: AttentionLayout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`families`: a layout that has some; None: all sequences are whole."""
    q, k, v, out, grad, query_start = (aligned(x) for x in (q, k, v, out, grad, query_start))
    (tokens, heads, width), (_, groups, v_width), sequences = q.shape, v.shape, len(query_start) - 1
    if tokens and max(width, v_width) > WIDEST:
        if groups > 1 or not causal:
            raise NotImplementedError(
                f"gradients of attention on CUDA hold heads of up to {WIDEST} numbers, of which there are "
                f"{max(width, v_width)}; use device=cpu"
            )
        lengths = query_start.diff().tolist()
        prefixes = None if families is None else _prefixes(families)
        every = [n + len(prefix) for n, prefix in zip(lengths, prefixes or [range(0)] * sequences, strict=True)]
        masks = (causal_reads(n, m, window, q.device) for n, m in zip(lengths, every, strict=True))
        return wide_backward(q, k, v, lengths, masks, out, lse, grad, scale, prefixes)
    gradients = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    if tokens == 0:
        return gradients
    shared = None if families is None else (families.context, families.prefixes, families.readers)
    kernels = _better_kernels(q.device)
    if kernels is not None and kernels.takes(q, v, window, causal):
        kernels.run(q, k, v, query_start, out, lse, grad, scale, gradients, shared)
        return gradients
    deltas = torch.empty_like(lse)
    context, begins, readers = shared or (query_start,) * 3  # not read
    positions = query_start if families is None or not window else families.positions
    by_query, by_key = _tiles(q.dtype, max(width, v_width), families is not None)
    shape = {
        "HEADS": heads, "GROUPS": groups, "WIDTH": width, "V_WIDTH": v_width, "W": power_of_two(width, 16),
        "VW": power_of_two(v_width, 16),
    }  # fmt: skip
    # Elsewhere a second and a third loop take registers (a product then waits for the one before), or long to compile.
    whole = q.dtype.itemsize == 2 and not window and shape["W"] == width <= 128 and shape["VW"] == v_width <= 128
    masks = {"WINDOW": window, "CAUSAL": causal, "SHARED": families is not None, "WHOLE": whole}
    _by_query[(tokens * (heads // groups) // by_query.rows + sequences, groups)](
        q, k, v, query_start, context, begins, out, lse, grad, gradients[0], deltas, sequences, scale, **shape,
        **masks, ROWS=by_query.rows, TILE=by_query.tile, num_warps=by_query.warps, num_stages=by_query.stages,
    )  # fmt: skip
    _by_key[(tokens // by_key.tile + sequences, groups)](
        q, k, v, query_start, context, readers, positions, lse, grad, deltas, gradients[1], gradients[2], sequences,
        scale, **shape, **masks, ROWS=by_key.rows, TILE=by_key.tile, num_warps=by_key.warps,
        num_stages=by_key.stages,
    )  # fmt: skip
    return gradients


@functools.cache
def _better_kernels(device: torch.device) -> ModuleType | None:
    """The kernels of GPUs that have faster ones."""
    if not gluon_runs(device):
        return None
    from rlloop.numerics.kernels.triton import backward_on_hopper

    return backward_on_hopper


def _tiles(dtype: torch.dtype, width: int, families: bool) -> tuple[Tiles, Tiles]:
    """Tiles of the kernels that own queries, and keys. In families a tile of keys must not reach beyond a prefix."""
    if dtype.itemsize > 2:
        return FLOAT32, FLOAT32
    return (HALF, HALF) if families else PLAIN[max(64, power_of_two(width))]


def _prefixes(layout: AttentionLayout) -> list[range]:
    """The flat tokens of each sequence's prefix."""
    begins, counts = layout.prefixes.tolist(), layout.context.tolist()
    return [range(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
