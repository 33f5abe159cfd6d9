"""Gradients of attention over one long causal sequence, with five products where `attention_backward` has seven.

The pairs of queries and keys are taken by blocks. Of a block one kernel, whose programs own keys, adds to dk and dv and
writes ds, in the compute type, to memory; another, whose programs own queries, adds ds k to dq. That is 2 bytes of
traffic each way for a pair, whose products are 5 * 2 * width operations, so memory is not the limit. Sums of dq, dk and
dv go on from block to block in float32, in the order of `attention_backward`: the sizes of blocks change no bit, and
there are no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.attention import _load_rows
from rlloop.numerics.kernels.triton.attention_steps import Tiles, _add_queries, _rows

BY_KEY, BY_QUERY = Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 3)
PROGRAMS = 256  # of a block, that own keys: a little under two for each of 132 processors
ROWS = 8192  # queries of a block, those of all heads that share keys: half a GiB of ds


@triton.jit(do_not_specialize=["length", "first_row", "last_row", "first_key"])
def _by_key(
    q, k, v, lse, grad, deltas, by_scores, key_sums, value_sums, grad_k, grad_v, length, first_row, last_row, first_key,
    scale, block, keys_of, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    W: tl.constexpr, VW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the rows from `first_row` to `last_row` to the sums of `keys_of` keys from `first_key` on, and write their ds
    [GROUPS, keys_of, block]. After the sequence's last row the sums are rounded into the gradients."""
    SHARE: tl.constexpr = HEADS // GROUPS
    group, local = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE
    tile = first_key + local
    if tile < length:
        key, d, dv = tile + tl.arange(0, TILE), tl.arange(0, W), tl.arange(0, VW)
        at, seen = key.to(tl.int64) * GROUPS + group, key < length
        keys, values = _rows(k, at, seen, WIDTH, W), _rows(v, at, seen, V_WIDTH, VW)
        own = tile * SHARE // ROWS * ROWS  # the first rows that read some of these keys
        goes_on = seen & (own < first_row)
        key_at, value_at = at[:, None] * WIDTH + d[None, :], at[:, None] * V_WIDTH + dv[None, :]
        of_keys, of_values = (d < WIDTH)[None, :], (dv < V_WIDTH)[None, :]
        sums = tl.load(key_sums + key_at, goes_on[:, None] & of_keys, 0.0)
        more = tl.load(value_sums + value_at, goes_on[:, None] & of_values, 0.0)
        lowest = tl.maximum(own, first_row)
        whole = tl.minimum(tl.maximum(tl.cdiv((tile + TILE - 1) * SHARE, ROWS) * ROWS, lowest), last_row)
        masked = tl.maximum(last_row // ROWS * ROWS, whole)
        token, lanes = group * 0, tl.arange(0, ROWS)[None, :]
        by_scores += (group * keys_of + local) * block
        cells = tl.arange(0, TILE)[:, None] * block + lanes
        for begin in range(lowest, whole, ROWS):
            sums, more, by_score = _add_queries(
                sums, more, keys, values, q, lse, grad, deltas, lse, token, 0, begin, length, key, group, scale, HEADS,
                SHARE, WIDTH, V_WIDTH, W, VW, ROWS, 0, True, False, True,
            )  # fmt: skip
            tl.store(by_scores + tl.multiple_of(begin - first_row, ROWS) + cells, by_score)
        for begin in range(whole, masked, ROWS):
            sums, more, by_score = _add_queries(
                sums, more, keys, values, q, lse, grad, deltas, lse, token, 0, begin, length, key, group, scale, HEADS,
                SHARE, WIDTH, V_WIDTH, W, VW, ROWS, 0, True, False, False,
            )  # fmt: skip
            tl.store(by_scores + tl.multiple_of(begin - first_row, ROWS) + cells, by_score)
        for begin in range(masked, last_row, ROWS):
            sums, more, by_score = _add_queries(
                sums, more, keys, values, q, lse, grad, deltas, lse, token, 0, begin, length, key, group, scale, HEADS,
                SHARE, WIDTH, V_WIDTH, W, VW, ROWS, 0, True, False, True,
            )  # fmt: skip
            tl.store(by_scores + tl.multiple_of(begin - first_row, ROWS) + cells, by_score)
        if last_row == length * SHARE:
            tl.store(grad_k + key_at, (sums * scale).to(grad_k.dtype.element_ty), seen[:, None] & of_keys)
            tl.store(grad_v + value_at, more.to(grad_v.dtype.element_ty), seen[:, None] & of_values)
        else:
            tl.store(key_sums + key_at, sums, seen[:, None] & of_keys)
            tl.store(value_sums + value_at, more, seen[:, None] & of_values)


@triton.jit
def _add_scores(
    sums, by_scores, k, tile, local, position, row_at, last, group, block, keys_of, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, TILE)
    key, at = tile + lane, tile.to(tl.int64) * GROUPS + group
    keys = _load_rows(k + at * WIDTH, lane * (GROUPS * WIDTH), key <= last, WIDTH, W, MASKED)
    source = by_scores + (group * keys_of + local) * block + (lane[:, None] * block + row_at[None, :])
    if MASKED:  # what no program of `_by_key` has written is not read
        scores = tl.load(source, key[:, None] <= position[None, :], 0.0)
    else:
        scores = tl.load(source)
    return tl.dot(scores.T, keys, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["length", "first_row", "last_row", "first_key"])
def _by_query(
    k, by_scores, query_sums, grad_q, length, first_row, last_row, first_key, scale, block, keys_of,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add `keys_of` keys from `first_key` on to the sums [GROUPS, block, W] of the rows from `first_row` to `last_row`;
    after the last key that a row reads, its sum is rounded into the gradient."""
    SHARE: tl.constexpr = HEADS // GROUPS
    group, begin = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS
    row_at = begin + tl.arange(0, ROWS)
    row, d = first_row + row_at, tl.arange(0, W)
    first, last = (first_row + begin) // SHARE, (tl.minimum(first_row + begin + ROWS, last_row) - 1) // SHARE
    if (first_row + begin < last_row) & (first_key <= last):
        valid, position = row < last_row, row // SHARE
        sum_at = query_sums + (group * block + row_at[:, None]) * W + d[None, :]
        sums = tl.zeros((ROWS, W), tl.float32)
        if first_key > 0:
            sums = tl.load(sum_at)
        end = tl.minimum(first_key + keys_of, last + 1)
        masked = tl.maximum(tl.minimum(first + 1, end) - first_key, 0) // TILE * TILE
        for local in range(0, masked, TILE):
            sums = _add_scores(
                sums, by_scores, k, first_key + local, local, position, row_at, last, group, block, keys_of,
                GROUPS, WIDTH, W, TILE, False,
            )  # fmt: skip
        for local in range(masked, end - first_key, TILE):
            sums = _add_scores(
                sums, by_scores, k, first_key + local, local, position, row_at, last, group, block, keys_of,
                GROUPS, WIDTH, W, TILE, True,
            )  # fmt: skip
        if last < first_key + keys_of:
            index = position.to(tl.int64) * HEADS + group * SHARE + row % SHARE
            tl.store(
                grad_q + index[:, None] * WIDTH + d[None, :], (sums * scale).to(grad_q.dtype.element_ty),
                valid[:, None] & (d < WIDTH)[None, :],
            )  # fmt: skip
        else:
            tl.store(sum_at, sums)


def backward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, deltas: Tensor, grad_q: Tensor, grad_k: Tensor,
    grad_v: Tensor, scale: float, shape: dict[str, int],
) -> None:  # fmt: skip
    """Fill in the gradients of one sequence. `deltas` [T, H]: do . o of each query; `shape`: the kernels' sizes."""
    length, groups, share = len(q), shape["GROUPS"], shape["HEADS"] // shape["GROUPS"]
    keys = max(1, PROGRAMS // groups) * max(BY_KEY.tile, BY_QUERY.tile)
    rows = ROWS
    by_scores = q.new_empty(groups, keys, rows)
    query_sums = torch.empty(groups, rows, shape["W"], device=q.device)
    key_sums, value_sums = (torch.empty_like(x, dtype=torch.float32) for x in (k, v))
    for first_row in range(0, length * share, rows):
        last_row = min(first_row + rows, length * share)
        for first_key in range(0, (last_row - 1) // share + 1, keys):
            place = length, first_row, last_row, first_key, scale, rows, keys
            _by_key[(keys // BY_KEY.tile, groups)](
                q, k, v, lse, grad, deltas, by_scores, key_sums, value_sums, grad_k, grad_v, *place, **shape,
                ROWS=BY_KEY.rows, TILE=BY_KEY.tile, num_warps=BY_KEY.warps,
                num_stages=BY_KEY.stages,
            )  # fmt: skip
            _by_query[(rows // BY_QUERY.rows, groups)](
                k, by_scores, query_sums, grad_q, *place, HEADS=shape["HEADS"], GROUPS=groups, WIDTH=shape["WIDTH"],
                W=shape["W"], ROWS=BY_QUERY.rows, TILE=BY_QUERY.tile, num_warps=BY_QUERY.warps,
                num_stages=BY_QUERY.stages,
            )  # fmt: skip
