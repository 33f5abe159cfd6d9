"""Memory-bound products of few rows on Hopper: every load uses the tensor memory accelerator (TMA).

One warpgroup holds a tile; its stages of K wait in shared memory. A launch may begin while the kernel before it still
runs (programmatic dependent launch), and reads nothing until that one is done. One launch may have several weights,
whose outputs lie end to end (queries, keys and values), or two whose outputs meet (a gate and what it scales).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.launch import aligned

LEFT_ROWS = gl.constexpr(64)  # of the tensor core's left operand


class Tiles(NamedTuple):
    rows: int
    outputs: int
    width: int  # of K at a time
    swapped: bool  # weights on the left
    stages: int
    early: bool = True  # the launch begins before its predecessor has ended


TABLE = (  # (up to so many rows, outputs and K, the tiles); measured on an H200. None: others are faster
    (8, 8192, None, Tiles(8, 64, 256, True, 5)),
    (8, None, None, Tiles(8, 64, 128, True, 5)),
    (16, 2048, None, Tiles(16, 16, 256, False, 5)),
    (16, 8192, None, Tiles(16, 64, 256, True, 5)),
    (16, None, None, Tiles(16, 64, 128, True, 5)),
    (32, 2048, None, Tiles(32, 16, 256, False, 5)),
    (32, 3072, None, Tiles(32, 64, 256, True, 4)),
    (32, 8192, None, Tiles(32, 64, 128, True, 8)),
    (32, None, None, Tiles(32, 64, 128, True, 4)),
    (64, 2048, None, Tiles(64, 16, 256, False, 5)),
    (64, 8192, 8192, Tiles(64, 32, 256, False, 4)),
    (64, 8192, None, Tiles(32, 64, 128, True, 8, early=False)),
    (64, None, 1024, Tiles(64, 64, 64, True, 6)),
    (64, None, None, Tiles(64, 128, 128, True, 4, early=False)),
    (128, 2048, None, Tiles(64, 32, 256, False, 4)),
    (128, 8192, None, Tiles(64, 64, 128, True, 6)),
    (256, 1024, None, Tiles(64, 32, 256, False, 4)),
    (256, 2048, None, Tiles(64, 64, 128, True, 6)),
    (256, 3072, None, None),
    (256, 8192, None, Tiles(128, 64, 64, True, 8)),
)


# The same, without K, for three weights end to end (their outputs together), and for a gate with what it scales.
TABLE_END_TO_END = (
    (8, 4096, Tiles(8, 64, 256, True, 5)),
    (8, None, Tiles(8, 64, 128, True, 5)),
    (16, 4096, Tiles(16, 64, 256, True, 5)),
    (16, None, Tiles(16, 64, 128, True, 5)),
    (32, 4096, Tiles(32, 64, 256, True, 4)),
    (32, None, Tiles(32, 64, 256, True, 4, early=False)),
    (64, 4096, Tiles(32, 64, 256, True, 4)),
    (64, None, Tiles(64, 64, 128, True, 5, early=False)),
    (128, 4096, Tiles(64, 64, 128, True, 5)),
)
TABLE_GATED = (
    (8, 4096, Tiles(8, 64, 128, True, 6)),
    (8, 8192, Tiles(8, 64, 64, True, 6)),
    (8, 12288, Tiles(8, 64, 128, True, 3, early=False)),
    (8, None, Tiles(8, 64, 128, True, 6)),
    (16, 4096, Tiles(16, 64, 128, True, 6)),
    (16, 8192, Tiles(16, 64, 64, True, 6)),
    (16, 12288, Tiles(16, 64, 128, True, 3, early=False)),
    (16, None, Tiles(16, 64, 128, True, 6)),
    (32, None, Tiles(32, 64, 128, True, 4)),
    (64, 4096, Tiles(32, 64, 128, True, 4)),
    (64, 8192, Tiles(64, 64, 128, True, 4, early=False)),
    (64, 12288, None),
    (64, None, Tiles(64, 64, 64, True, 8)),
    (128, 8192, Tiles(64, 64, 64, True, 8, early=False)),
)


def tiles_for(rows: int, outputs: int, width: int) -> Tiles | None:
    for most_rows, most_outputs, most_width, tiles in TABLE:
        fits = (most_outputs is None or outputs <= most_outputs) and (most_width is None or width <= most_width)
        if rows <= most_rows and fits:
            return tiles
    return None


def tiles_of(
    table: tuple[tuple[int, int | None, Tiles | None], ...], x: Tensor, weights: tuple[Tensor, ...], outputs: int
) -> Tiles | None:
    """The tiles of a table for x [T, K] and weights of `outputs` together; None where another kernel has to do it."""
    rows, width = x.shape
    if rows == 0 or x.itemsize != 2 or width == 0 or width % 8:
        return None
    found = (tiles for most_rows, most, tiles in table if rows <= most_rows and (most is None or outputs <= most))
    tiles = next(found, None)
    return None if tiles is None or any(len(weight) % tiles.outputs for weight in weights) else tiles


ONE, END_TO_END, GATED = (gl.constexpr(i) for i in range(3))  # how a launch uses its weights


@gluon.jit
def _fetch(
    xs, first, second, third, x_tile, w_tile, u_tile, arrived, row, output, k, FIRST: gl.constexpr,
    SECOND: gl.constexpr, FORM: gl.constexpr, ROWS: gl.constexpr, BYTES: gl.constexpr, wanted,
):  # fmt: skip
    """Starts the copy of one stage, if it is `wanted`."""
    mbarrier.expect(arrived, BYTES, wanted)
    if FORM == END_TO_END:
        in_first, in_third = output < FIRST, output >= FIRST + SECOND
        in_second = (output >= FIRST) & (output < FIRST + SECOND)
        tma.async_copy_global_to_shared(first, [output, k], arrived, w_tile, wanted & in_first)
        tma.async_copy_global_to_shared(second, [output - FIRST, k], arrived, w_tile, wanted & in_second)
        tma.async_copy_global_to_shared(third, [output - FIRST - SECOND, k], arrived, w_tile, wanted & in_third)
    else:
        tma.async_copy_global_to_shared(first, [output, k], arrived, w_tile, wanted)
    if FORM == GATED:
        tma.async_copy_global_to_shared(second, [output, k], arrived, u_tile, wanted)
    tma.async_copy_global_to_shared(xs, [row, k], arrived, x_tile.slice(0, ROWS), wanted)


@gluon.jit(do_not_specialize=["rows"])
def _few_rows(
    xs, first, second, third, bias, out, second_out, third_out, rows, outputs, width, places, stride,
    FIRST: gl.constexpr, SECOND: gl.constexpr, FORM: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    WIDTH: gl.constexpr, SWAPPED: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, EARLY: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    """Rows of x that a tile of 64 has no use for are never written: a sum has no other row in it.

    `places` and `PLACES` as for `linear._linear`. END_TO_END: the weights have FIRST, SECOND and other outputs, all
    multiples of OUTPUTS. GATED, for SWAPPED alone: `silu(x first^T) * (x second^T)`, rounded as it would be in between.
    """
    HEIGHT: gl.constexpr = ROWS if SWAPPED else LEFT_ROWS
    LEFT: gl.constexpr = OUTPUTS if SWAPPED else HEIGHT
    RIGHT: gl.constexpr = HEIGHT if SWAPPED else OUTPUTS
    BYTES: gl.constexpr = (ROWS + (2 if FORM == GATED else 1) * OUTPUTS) * WIDTH * 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RIGHT, 16])
    row_tiles = gl.cdiv(rows, ROWS)
    first_row, first_output = gl.program_id(0) % row_tiles * ROWS, gl.program_id(0) // row_tiles * OUTPUTS
    x_tiles = gl.allocate_shared_memory(xs.dtype, [STAGES, HEIGHT, WIDTH], xs.layout)
    w_tiles = gl.allocate_shared_memory(first.dtype, [STAGES, OUTPUTS, WIDTH], first.layout)
    u_tiles = w_tiles
    if FORM == GATED:
        u_tiles = gl.allocate_shared_memory(first.dtype, [STAGES, OUTPUTS, WIDTH], first.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    steps = gl.cdiv(width, WIDTH)
    for stage in gl.static_range(STAGES):
        _fetch(
            xs, first, second, third, x_tiles.index(stage), w_tiles.index(stage), u_tiles.index(stage),
            arrived.index(stage), first_row, first_output, stage * WIDTH, FIRST, SECOND, FORM, ROWS, BYTES,
            stage < steps,
        )  # fmt: skip
    sums = gl.zeros([LEFT, RIGHT], gl.float32, SUMS)
    ups = gl.zeros([LEFT, RIGHT], gl.float32, SUMS)
    for step in range(steps):
        here = step % STAGES
        mbarrier.wait(arrived.index(here), step // STAGES & 1)
        x_tile = x_tiles.index(here)
        if SWAPPED:
            sums = warpgroup_mma(w_tiles.index(here), x_tile.permute((1, 0)), sums, is_async=True)
            if FORM == GATED:
                ups = warpgroup_mma(u_tiles.index(here), x_tile.permute((1, 0)), ups, is_async=True)
        else:
            sums = warpgroup_mma(x_tile, w_tiles.index(here).permute((1, 0)), sums, is_async=True)
        if FORM == GATED:
            sums, ups = warpgroup_mma_wait(2, deps=[sums, ups])
        else:
            sums = warpgroup_mma_wait(1, deps=[sums])
        # The step before is done with its place.
        coming, free = step + STAGES - 1, (step + STAGES - 1) % STAGES
        _fetch(
            xs, first, second, third, x_tiles.index(free), w_tiles.index(free), u_tiles.index(free),
            arrived.index(free), first_row, first_output, coming * WIDTH, FIRST, SECOND, FORM, ROWS, BYTES,
            (step > 0) & (coming < steps),
        )  # fmt: skip
    # At once: with other instructions in between, the assembler makes every product wait for the one before.
    if FORM == GATED:
        sums, ups = warpgroup_mma_wait(0, deps=[sums, ups])
        g, u = sums.to(out.dtype.element_ty).to(gl.float32), ups.to(out.dtype.element_ty).to(gl.float32)
        sums = g / (1.0 + gl.exp(-g)) * u
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    left, right = gl.arange(0, LEFT, gl.SliceLayout(1, SUMS)), gl.arange(0, RIGHT, gl.SliceLayout(0, SUMS))
    if FORM == END_TO_END:
        if first_output >= FIRST + SECOND:
            out, first_output, stride = third_out, first_output - FIRST - SECOND, stride - FIRST - SECOND
            outputs -= FIRST + SECOND
        elif first_output >= FIRST:
            out, first_output, stride, outputs = second_out, first_output - FIRST, SECOND, SECOND
        else:
            stride, outputs = FIRST, FIRST
    if SWAPPED:
        row, output = gl.expand_dims(right, 0), gl.expand_dims(first_output + left, 1)
    else:
        row, output = gl.expand_dims(left, 1), gl.expand_dims(first_output + right, 0)
    if HAS_BIAS:
        sums += gl.load(bias + output, output < outputs, 0.0).to(gl.float32)
    sums = sums.to(out.dtype.element_ty)
    if PLACES == 0:
        inside = (row < ROWS) & (first_row + row < rows) & (output < outputs)
        gl.store(out + (first_row + row).to(gl.int64) * stride + output, sums, inside)
    else:  # to other GPUs whole vectors of outputs travel, not the pairs that a warp holds
        if SWAPPED:
            sums = sums.permute((1, 0))
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUTPUTS, OUTPUTS // 8], [4, 1], [1, 0])
        sums = gl.convert_layout(sums, WIDE)
        row = gl.expand_dims(gl.arange(0, HEIGHT, gl.SliceLayout(1, WIDE)), 1)
        output = first_output + gl.expand_dims(gl.arange(0, OUTPUTS, gl.SliceLayout(0, WIDE)), 0)
        at = (first_row + row).to(gl.int64) * stride + output
        inside = (row < ROWS) & (first_row + row < rows) & (output < outputs)
        for place in gl.static_range(PLACES):
            gl.store(gl.multiple_of(gl.load(places + place).to(out.dtype), 16) + at, sums, inside)


_layouts: dict[tuple[int, int], Any] = {}


def _described(x: Tensor, *tile: int) -> TensorDescriptor:
    if tile not in _layouts:
        _layouts[tile] = gl.NVMMASharedLayout.get_default_for(list(tile), gl.bfloat16)
    return TensorDescriptor.from_tensor(x, list(tile), _layouts[tile])


def _launch(
    x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None, outs: tuple[Tensor, ...], places: Tensor | None,
    tiles: Tiles, form: int,
) -> None:  # fmt: skip
    rows, width = x.shape
    outputs = len(weights[0]) if form == GATED.value else sum(map(len, weights))
    described = [_described(aligned(weight), tiles.outputs, tiles.width) for weight in weights]
    first, second, third = (described * 3)[:3]
    out, second_out, third_out = (outs * 3)[:3]
    stride = outputs if form == END_TO_END.value else out.stride(0)
    _few_rows[(triton.cdiv(rows, tiles.rows) * triton.cdiv(outputs, tiles.outputs),)](
        _described(aligned(x), tiles.rows, tiles.width), first, second, third,
        out if bias is None else aligned(bias), out, second_out, third_out, rows, outputs, width,
        out if places is None else places, stride, FIRST=len(weights[0]), SECOND=len((weights * 2)[1]), FORM=form,
        ROWS=tiles.rows, OUTPUTS=tiles.outputs, WIDTH=tiles.width, SWAPPED=tiles.swapped,
        STAGES=tiles.stages, HAS_BIAS=bias is not None, EARLY=tiles.early, PLACES=0 if places is None else len(places),
        num_warps=4, launch_pdl=tiles.early, enable_fp_fusion=form != GATED.value,
    )  # fmt: skip


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tiles: Tiles, places: Tensor | None = None
) -> None:
    """out [T, N] = x [T, K] weight [N, K]^T + bias [N], of 16-bit numbers; K a multiple of 8. `places`: see `chain`."""
    _launch(x, (weight,), bias, (out,), places, tiles, ONE.value)


def products(x: Tensor, weights: tuple[Tensor, Tensor, Tensor], tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K] times each of three weights [N, K], whose outputs are multiples of the tile's -> [T, N] each."""
    first, second, third = (x.new_empty(len(x), len(weight)) for weight in weights)
    _launch(x, weights, None, (first, second, third), None, tiles, END_TO_END.value)
    return first, second, third


def gated(x: Tensor, gate: Tensor, up: Tensor, out: Tensor, tiles: Tiles, places: Tensor | None = None) -> None:
    """out [T, F] = silu_mul of x [T, K] times gate and up [F, K]. `places`: see `chain`."""
    assert tiles.swapped
    _launch(x, (gate, up), None, (out,), places, tiles, GATED.value)
