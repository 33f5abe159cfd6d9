"""Memory-bound product of few rows on Hopper: every load uses the tensor memory accelerator (TMA).

One warpgroup holds a tile; its stages of K wait in shared memory. A launch may begin while the kernel before it still
runs (programmatic dependent launch), and reads nothing until that one is done.
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


def tiles_for(rows: int, outputs: int, width: int) -> Tiles | None:
    for most_rows, most_outputs, most_width, tiles in TABLE:
        fits = (most_outputs is None or outputs <= most_outputs) and (most_width is None or width <= most_width)
        if rows <= most_rows and fits:
            return tiles
    return None


@gluon.jit(do_not_specialize=["rows"])
def _few_rows(
    xs, weights, bias, out, rows, outputs, width, places, stride, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    WIDTH: gl.constexpr, SWAPPED: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, EARLY: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    """Rows of x that a tile of 64 has no use for are never written: a sum has no other row in it.

    `places` and `PLACES` as for `linear._linear`.
    """
    HEIGHT: gl.constexpr = ROWS if SWAPPED else LEFT_ROWS
    LEFT: gl.constexpr = OUTPUTS if SWAPPED else HEIGHT
    RIGHT: gl.constexpr = HEIGHT if SWAPPED else OUTPUTS
    BYTES: gl.constexpr = (ROWS + OUTPUTS) * WIDTH * 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RIGHT, 16])
    row_tiles = gl.cdiv(rows, ROWS)
    first_row, first_output = gl.program_id(0) % row_tiles * ROWS, gl.program_id(0) // row_tiles * OUTPUTS
    x_tiles = gl.allocate_shared_memory(xs.dtype, [STAGES, HEIGHT, WIDTH], xs.layout)
    w_tiles = gl.allocate_shared_memory(weights.dtype, [STAGES, OUTPUTS, WIDTH], weights.layout)
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
        mbarrier.expect(arrived.index(stage), BYTES, stage < steps)
        tma.async_copy_global_to_shared(
            weights, [first_output, stage * WIDTH], arrived.index(stage), w_tiles.index(stage), stage < steps
        )
        tma.async_copy_global_to_shared(
            xs, [first_row, stage * WIDTH], arrived.index(stage), x_tiles.index(stage).slice(0, ROWS), stage < steps
        )
    sums = gl.zeros([LEFT, RIGHT], gl.float32, SUMS)
    for step in range(steps):
        here = step % STAGES
        mbarrier.wait(arrived.index(here), step // STAGES & 1)
        if SWAPPED:
            sums = warpgroup_mma(w_tiles.index(here), x_tiles.index(here).permute((1, 0)), sums, is_async=True)
        else:
            sums = warpgroup_mma(x_tiles.index(here), w_tiles.index(here).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        # The step before is done with its place.
        coming, free = step + STAGES - 1, (step + STAGES - 1) % STAGES
        more = (step > 0) & (coming < steps)
        mbarrier.expect(arrived.index(free), BYTES, more)
        tma.async_copy_global_to_shared(
            weights, [first_output, coming * WIDTH], arrived.index(free), w_tiles.index(free), more
        )
        tma.async_copy_global_to_shared(
            xs, [first_row, coming * WIDTH], arrived.index(free), x_tiles.index(free).slice(0, ROWS), more
        )
    sums = warpgroup_mma_wait(0, deps=[sums])
    left, right = gl.arange(0, LEFT, gl.SliceLayout(1, SUMS)), gl.arange(0, RIGHT, gl.SliceLayout(0, SUMS))
    if SWAPPED:
        row, output = gl.expand_dims(right, 0), gl.expand_dims(first_output + left, 1)
    else:
        row, output = gl.expand_dims(left, 1), gl.expand_dims(first_output + right, 0)
    if HAS_BIAS:
        sums += gl.load(bias + output, output < outputs, 0.0).to(gl.float32)
    at = (first_row + row).to(gl.int64) * stride + output
    inside = (row < ROWS) & (first_row + row < rows) & (output < outputs)
    sums = sums.to(out.dtype.element_ty)
    if PLACES == 0:
        gl.store(out + at, sums, inside)
    for place in gl.static_range(PLACES):
        gl.store(gl.load(places + place).to(out.dtype) + at, sums, inside)


_layouts: dict[tuple[int, int], Any] = {}


def _described(x: Tensor, *tile: int) -> TensorDescriptor:
    if tile not in _layouts:
        _layouts[tile] = gl.NVMMASharedLayout.get_default_for(list(tile), gl.bfloat16)
    return TensorDescriptor.from_tensor(x, list(tile), _layouts[tile])


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, places: Tensor | None = None, *, tiles: Tiles
) -> None:
    """out [T, N] = x [T, K] weight [N, K]^T + bias [N], of 16-bit numbers; K a multiple of 8. `places`: see `chain`."""
    (rows, width), outputs = x.shape, len(weight)
    x, weight = aligned(x), aligned(weight)
    _few_rows[(triton.cdiv(rows, tiles.rows) * triton.cdiv(outputs, tiles.outputs),)](
        _described(x, tiles.rows, tiles.width), _described(weight, tiles.outputs, tiles.width),
        weight if bias is None else aligned(bias), out, rows, outputs, width, out if places is None else places,
        out.stride(0), ROWS=tiles.rows, OUTPUTS=tiles.outputs, WIDTH=tiles.width, SWAPPED=tiles.swapped,
        STAGES=tiles.stages, HAS_BIAS=bias is not None, EARLY=tiles.early, PLACES=0 if places is None else len(places),
        num_warps=4, launch_pdl=tiles.early,
    )  # fmt: skip
