"""One tile of attention's gradients: what the kernels that own queries, keys or blocks have in common.

`MASKED`: some query does not read all of the tile's keys, or some are not there. Without it the numbers are the same,
in fewer instructions.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rlloop.numerics.kernels.triton.attention import _load_rows


class Tiles(NamedTuple):
    """Queries and keys of a product, warps of a program, and tiles in flight."""

    rows: int
    tile: int
    warps: int
    stages: int


@triton.jit
def _rows(source, index, inside, WIDTH: tl.constexpr, W: tl.constexpr):
    return _load_rows(source, index * WIDTH, inside, WIDTH, W, True)


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
    keys = _load_rows(k + at * WIDTH, lane * (GROUPS * WIDTH), seen, WIDTH, W, MASKED)
    values = _load_rows(v + at * V_WIDTH, lane * (GROUPS * V_WIDTH), seen, V_WIDTH, VW, MASKED)
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
    """Add a tile of queries to the sums [TILE, W] of dk and dv. Returns them, and ds [TILE, ROWS] before its scale.

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
    queries = _load_rows(q + at * WIDTH, index * WIDTH, valid, WIDTH, W, MASKED)
    slopes = _load_rows(grad + at * V_WIDTH, index * V_WIDTH, valid, V_WIDTH, VW, MASKED)
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
    by_score = (masses * (by_mass - delta[None, :])).to(queries.dtype)
    key_sums = tl.dot(by_score, queries, key_sums, input_precision="ieee")
    return key_sums, value_sums, by_score
