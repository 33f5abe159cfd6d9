"""Products of one input with several weights in one launch, for the rows of a decode step. Bits are `linear`'s.

One projection of some hundred rows is too little work for a whole GPU; several at once fill it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton import small_batch_tiles
from rlloop.numerics.kernels.triton.elementwise import silu_mul
from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, gluon_runs
from rlloop.numerics.kernels.triton.linear import MANY_ROWS, OUR_ROWS, by_vendor, product


class Tiles(NamedTuple):
    rows: int
    outputs: int
    width: int  # of K at a time
    swapped: bool  # weights are the left operand
    warps: int
    stages: int


# (up to so many rows, up to K of so much, the tiles); measured on an H200. Beyond, one after the other is faster.
QKV = (
    (128, 8192, Tiles(64, 64, 64, False, 4, 6)),
    (256, 2048, Tiles(128, 64, 64, True, 4, 5)),
    (256, 8192, Tiles(128, 128, 64, False, 8, 4)),
    (512, 2048, Tiles(128, 128, 64, False, 8, 4)),
)
GATED = ((64, 8192, Tiles(64, 64, 64, False, 4, 4)), (256, 2048, Tiles(64, 64, 64, False, 4, 4)))


def _tiles_for(table: tuple[tuple[int, int, Tiles], ...], x: Tensor, weights: tuple[Tensor, ...]) -> Tiles | None:
    """The tiles for these shapes, or None."""
    rows, width = x.shape
    chosen = next((tiles for most_rows, most, tiles in table if rows <= most_rows and width <= most), None)
    if chosen is None or x.element_size() != 2 or rows == 0 or width % chosen.width:
        return None
    return None if any(len(weight) % chosen.outputs for weight in weights) else chosen


@triton.jit(do_not_specialize=["rows"])
def _qkv(
    x, first, second, third, first_out, second_out, third_out, rows, FIRST: tl.constexpr, SECOND: tl.constexpr,
    THIRD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, K: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """Outputs of each weight are a multiple of OUTPUTS, and the width one of K."""
    tile, row_tiles = tl.program_id(0), tl.cdiv(rows, ROWS)
    begin = tile // row_tiles * OUTPUTS
    if begin < FIRST:
        weight, out, outputs = first, first_out, FIRST
    elif begin < FIRST + SECOND:
        weight, out, outputs, begin = second, second_out, SECOND, begin - FIRST
    else:
        weight, out, outputs, begin = third, third_out, THIRD, begin - FIRST - SECOND
    row, output, k = tile % row_tiles * ROWS + tl.arange(0, ROWS), begin + tl.arange(0, OUTPUTS), tl.arange(0, K)
    x_at = x + (row % rows).to(tl.int64)[:, None] * WIDTH + k[None, :]
    w_at = tl.multiple_of(weight, 16) + output.to(tl.int64)[:, None] * WIDTH + k[None, :]
    if SWAPPED:
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    else:
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for _ in range(0, WIDTH, K):
        xs, ws = tl.load(x_at), tl.load(w_at)
        if SWAPPED:
            sums = tl.dot(ws, xs.T, sums, input_precision="ieee")
        else:
            sums = tl.dot(xs, ws.T, sums, input_precision="ieee")
        x_at += K
        w_at += K
    if SWAPPED:
        sums = sums.T
    at = tl.multiple_of(out, 16) + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), (row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x, gate, up, out, rows, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    tile, row_tiles = tl.program_id(0), tl.cdiv(rows, ROWS)
    row, k = tile % row_tiles * ROWS + tl.arange(0, ROWS), tl.arange(0, K)
    output = tile // row_tiles * TILE + tl.arange(0, TILE)
    x_at = x + (row % rows).to(tl.int64)[:, None] * WIDTH + k[None, :]
    at = output.to(tl.int64)[:, None] * WIDTH + k[None, :]
    gates, ups = tl.zeros((ROWS, TILE), tl.float32), tl.zeros((ROWS, TILE), tl.float32)
    for _ in range(0, WIDTH, K):
        xs = tl.load(x_at)
        gates = tl.dot(xs, tl.load(gate + at).T, gates, input_precision="ieee")
        ups = tl.dot(xs, tl.load(up + at).T, ups, input_precision="ieee")
        x_at += K
        at += K
    # Rounded as they would be in between.
    g, u = gates.to(out.dtype.element_ty).to(tl.float32), ups.to(out.dtype.element_ty).to(tl.float32)
    activated = (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :], activated, (row < rows)[:, None])


def qkv_linear(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`dtype` of the outputs; None: that of x. They may be parts of one tensor [T, N]."""
    weights, dtype = (q_weight, k_weight, v_weight), dtype or x.dtype
    whole = as_one(weights) if dtype == x.dtype and OUR_ROWS < len(x) < MANY_ROWS else None
    if whole is not None and (made := by_vendor(x, whole)) is not None:
        one, other, last = made.split([len(weight) for weight in weights], 1)
        return one, other, last
    if gluon_runs(x.device):
        from rlloop.numerics.kernels.triton import small_batch_linear as few

        if tiles := small_batch_tiles.tiles_of(small_batch_tiles.TABLE_END_TO_END, x, weights, sum(map(len, weights))):
            return few.products(x, weights, tiles, dtype=dtype)
    tiles = _tiles_for(QKV, x, weights)
    if tiles is None:
        one, other, last = (product(x, weight, None, dtype) for weight in weights)
        return one, other, last
    one, other, last = (x.new_empty(len(x), len(weight), dtype=dtype) for weight in weights)
    grid = (sum(map(len, weights)) // tiles.outputs * cdiv(len(x), tiles.rows),)
    _qkv[grid](
        aligned(x), *map(aligned, weights), one, other, last, len(x), FIRST=len(q_weight), SECOND=len(k_weight),
        THIRD=len(v_weight), WIDTH=x.shape[1], ROWS=tiles.rows, OUTPUTS=tiles.outputs, K=tiles.width,
        SWAPPED=tiles.swapped, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return one, other, last


def as_one(weights: Sequence[Tensor]) -> Tensor | None:
    """Weights [N, K] as one, where they lie one behind the other in memory, as `models.attention` lays them."""
    first, at = weights[0], weights[0].data_ptr()
    for weight in weights:
        one_memory = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not one_memory or weight.data_ptr() != at or weight.dtype != first.dtype or not weight.is_contiguous():
            return None
        at += weight.nbytes
    return first.detach().as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def few_rows_gated(x: Tensor, gate: Tensor, up: Tensor) -> Callable[..., None] | None:
    """`small_batch_linear.gated` with its tiles; None where it is not for these shapes."""
    if not gluon_runs(x.device):
        return None
    from rlloop.numerics.kernels.triton import small_batch_linear as few

    tiles = small_batch_tiles.tiles_of(small_batch_tiles.TABLE_GATED, x, (gate, up), len(gate))
    return tiles and partial(few.gated, tiles=tiles)


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    if few := few_rows_gated(x, gate, up):
        out = x.new_empty(len(x), len(gate))
        few(x, gate, up, out)
        return out
    tiles = _tiles_for(GATED, x, (gate, up))
    if tiles is None:
        return silu_mul(product(x, gate, None, x.dtype), product(x, up, None, x.dtype))
    out = x.new_empty(len(x), len(gate))
    _gated[(len(gate) // tiles.outputs * cdiv(len(x), tiles.rows),)](
        aligned(x), aligned(gate), aligned(up), out, len(x), OUTPUTS=len(gate), WIDTH=x.shape[1], ROWS=tiles.rows,
        TILE=tiles.outputs, K=tiles.width, num_warps=tiles.warps, num_stages=tiles.stages, **EXACT,
    )  # fmt: skip
    return out
