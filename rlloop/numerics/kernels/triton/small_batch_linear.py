"""Memory-bound products of few rows on Hopper: every load uses the tensor memory accelerator (TMA).

One warpgroup holds a tile; its stages of K wait in shared memory. A launch may begin while the kernel before it still
runs (programmatic dependent launch), and reads nothing until that one is done. One launch may have several weights,
whose outputs lie end to end (queries, keys and values), or two whose outputs meet (a gate and what it scales).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
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

from rlloop.numerics.kernels.triton.gluon_names import barrier
from rlloop.numerics.kernels.triton.launch import aligned, cdiv, processors
from rlloop.numerics.kernels.triton.meeting import Meeting, meet
from rlloop.numerics.kernels.triton.small_batch_adapters import (
    END_TO_END,
    GATED,
    LEFT_ROWS,
    ONE,
    REDUCED_WIDTH,
    copy_factor,
    copy_tile,
    look,
    own,
    places,
    reduce,
    reduced,
    slots_of,
)
from rlloop.numerics.kernels.triton.small_batch_meeting import met, place
from rlloop.numerics.kernels.triton.small_batch_tiles import OWN_COLUMNS, Tiles
from rlloop.numerics.layout import AdapterSlots, Factors


@gluon.jit
def _copy_weights(
    first, second, third, first_down, second_down, third_down, tile, second_tile, arrived, w_row, down_row, k, w_index,
    FORM: gl.constexpr, OUTPUTS: gl.constexpr, FRONT: gl.constexpr, OWN: gl.constexpr, wanted,
):  # fmt: skip
    """A step's rows of the weights, from a tile's row FRONT on; its first OWN rows are A's."""
    copy_tile(
        first, second, third, tile.slice(FRONT, OUTPUTS), second_tile.slice(FRONT, OUTPUTS), arrived, w_row, k,
        w_index, FORM, wanted,
    )  # fmt: skip
    if OWN > 0:
        copy_factor(
            first_down, second_down, third_down, tile.slice(0, OWN), arrived, down_row, k, w_index, FORM, wanted
        )  # fmt: skip
    if OWN > 0 and FORM == GATED:
        tma.async_copy_global_to_shared(second_down, [down_row, k], arrived, second_tile.slice(0, OWN), wanted)


@gluon.jit
def _multiplied(
    steps, xs, first, second, third, first_down, second_down, third_down, x_tiles, w_tiles, u_tiles,
    arrived, row, w_row, down_row, w_index, sums, ups, FORM: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    FRONT: gl.constexpr, OWN: gl.constexpr, WIDTH: gl.constexpr, SWAPPED: gl.constexpr, STAGES: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """The sums after all steps of K, of which the last may still be under way."""
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
        wanted = (step > 0) & (coming < steps)
        mbarrier.expect(arrived.index(free), BYTES, wanted)
        _copy_weights(
            first, second, third, first_down, second_down, third_down, w_tiles.index(free), u_tiles.index(free),
            arrived.index(free), w_row, down_row, coming * WIDTH, w_index, FORM, OUTPUTS, FRONT, OWN,
            wanted,
        )  # fmt: skip
        tma.async_copy_global_to_shared(
            xs, [row, coming * WIDTH], arrived.index(free), x_tiles.index(free).slice(0, ROWS), wanted
        )
    return sums, ups


@gluon.jit
def _landed(sums, ups, FORM: gl.constexpr):
    if FORM == GATED:
        sums, ups = warpgroup_mma_wait(0, deps=[sums, ups])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    return sums, ups


@gluon.jit(do_not_specialize=["rows", "me", "meeting"])
def _few_rows(
    xs, first, second, third, z_xs, first_down, second_down, third_down, first_up, second_up, third_up, z, slots, sole,
    bias, out, second_out, third_out, rows, outputs, width, addresses, stride, flags, round, me, meeting, rank,
    FIRST: gl.constexpr, SECOND: gl.constexpr, FORM: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    WIDTH: gl.constexpr, SWAPPED: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, EARLY: gl.constexpr,
    AHEAD: gl.constexpr, PLACES: gl.constexpr, MEETS: gl.constexpr, RANK: gl.constexpr, TILE: gl.constexpr,
    Z_ROWS: gl.constexpr, Z_OUTPUTS: gl.constexpr, Z_STAGES: gl.constexpr, HAS_SLOTS: gl.constexpr,
):  # fmt: skip
    """Rows of x that a tile of 64 has no use for are never written: a sum has no other row in it.

    `addresses` and `PLACES` as for `linear._linear`. END_TO_END: the weights have FIRST, SECOND and other outputs, all
    multiples of OUTPUTS. GATED, for SWAPPED alone: `silu(x first^T) * (x second^T)`, rounded as it would be in between.
    AHEAD: weights are fetched before the launch's predecessor has ended, which has not written them: those of a model,
    since no forward begins with a product. MEETS, for AHEAD alone: x is there once `PLACES` ranks have met.

    RANK: the columns of z and B' in shared memory, 0 without an adapter. The first programs make z = x A^T; the others,
    which begin meanwhile, look for it after their last step. Without Z_STAGES each program makes z itself: the first
    half of a weight's tile of TILE rows is A's then.
    """
    OWN: gl.constexpr = 0 if Z_STAGES > 0 else RANK
    FRONT: gl.constexpr = TILE // 2 if OWN > 0 else 0
    HEIGHT: gl.constexpr = ROWS if SWAPPED else LEFT_ROWS
    LEFT: gl.constexpr = TILE if SWAPPED else HEIGHT
    RIGHT: gl.constexpr = HEIGHT if SWAPPED else TILE
    BYTES: gl.constexpr = (ROWS + (2 if FORM == GATED else 1) * (OWN + OUTPUTS)) * WIDTH * 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RIGHT, 16])
    if EARLY and not AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    targets = ()
    for index in gl.static_range(PLACES):
        targets = targets + (gl.multiple_of(gl.load(addresses + index).to(out.dtype), 16),)  # noqa: RUF005
    if MEETS:
        theirs, mine, now = place(flags, round, me, meeting, PLACES)
    task, slot = gl.program_id(0), 0
    if RANK > 0 and HAS_SLOTS:
        slot = gl.load(sole).to(gl.int32)
    if Z_STAGES > 0:
        WEIGHTS: gl.constexpr = 3 if FORM == END_TO_END else 2 if FORM == GATED else 1
        reducing = gl.cdiv(rows, Z_ROWS) * (RANK // Z_OUTPUTS) * WEIGHTS
        if task < reducing:
            reduce(
                z_xs, first_down, second_down, third_down, z, slots, slot, rows, width, rank, FORM, Z_ROWS, Z_OUTPUTS,
                Z_STAGES, EARLY, AHEAD, RANK, HAS_SLOTS,
            )  # fmt: skip
            return
        task -= reducing
    row_tiles = gl.cdiv(rows, ROWS)
    first_row = task % row_tiles * ROWS
    task = task // row_tiles
    if FORM == END_TO_END:
        w_index = (task * OUTPUTS >= FIRST).to(gl.int32) + (task * OUTPUTS >= FIRST + SECOND).to(gl.int32)
        begins = gl.where(w_index == 0, 0, gl.where(w_index == 1, FIRST, FIRST + SECOND))
    else:
        w_index, begins = 0, 0
    first_output = task * OUTPUTS - begins
    x_tiles = gl.allocate_shared_memory(xs.dtype, [STAGES, HEIGHT, WIDTH], xs.layout)
    w_tiles = gl.allocate_shared_memory(first.dtype, [STAGES, TILE, WIDTH], first.layout)
    u_tiles = w_tiles
    if FORM == GATED:
        u_tiles = gl.allocate_shared_memory(first.dtype, [STAGES, TILE, WIDTH], first.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES + 1):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()
    barrier()
    steps = gl.cdiv(width, WIDTH)
    for stage in gl.static_range(STAGES):
        mbarrier.expect(arrived.index(stage), BYTES, stage < steps)
        _copy_weights(
            first, second, third, first_down, second_down, third_down, w_tiles.index(stage), u_tiles.index(stage),
            arrived.index(stage), first_output, slot * rank, stage * WIDTH, w_index, FORM, OUTPUTS, FRONT, OWN,
            stage < steps,
        )  # fmt: skip
        if not (EARLY and AHEAD):
            tma.async_copy_global_to_shared(
                xs, [first_row, stage * WIDTH], arrived.index(stage), x_tiles.index(stage).slice(0, ROWS), stage < steps
            )
    if RANK > 0:
        own_outputs = outputs
        if FORM == END_TO_END:
            own_outputs = gl.where(w_index == 0, FIRST, gl.where(w_index == 1, SECOND, outputs - FIRST - SECOND))
        up_tile = gl.allocate_shared_memory(first_up.dtype, [TILE, RANK], first_up.layout)
        second_up_tile = up_tile
        if FORM == GATED:
            second_up_tile = gl.allocate_shared_memory(first_up.dtype, [TILE, RANK], first_up.layout)
        mbarrier.expect(arrived.index(STAGES), (2 if FORM == GATED else 1) * OUTPUTS * RANK * 2)
        copy_tile(
            first_up, second_up, third_up, up_tile.slice(FRONT, OUTPUTS), second_up_tile.slice(FRONT, OUTPUTS),
            arrived.index(STAGES), slot * own_outputs + first_output, 0, w_index, FORM, True,
        )  # fmt: skip
    if EARLY and AHEAD:
        gdc_wait()
        gdc_launch_dependents()
        if MEETS:
            met(theirs, mine, now)
        for stage in gl.static_range(STAGES):
            tma.async_copy_global_to_shared(
                xs, [first_row, stage * WIDTH], arrived.index(stage), x_tiles.index(stage).slice(0, ROWS), stage < steps
            )
    sums = gl.zeros([LEFT, RIGHT], gl.float32, SUMS)
    ups = gl.zeros([LEFT, RIGHT], gl.float32, SUMS)
    if OWN > 0:
        here = slots_of(slots, slot, first_row, rows, SWAPPED, HEIGHT, TILE, HAS_SLOTS, SUMS)
    sums, ups = _multiplied(
        steps, xs, first, second, third, first_down, second_down, third_down, x_tiles, w_tiles,
        u_tiles, arrived, first_row, first_output, slot * rank, w_index, sums, ups, FORM, ROWS, OUTPUTS, FRONT, OWN,
        WIDTH, SWAPPED, STAGES, BYTES,
    )  # fmt: skip
    if Z_STAGES > 0:
        at, there = places(z, w_index, first_row, rows, ROWS, HEIGHT, RANK)
        numbers, more = look(at, there, rows * RANK, FORM)
    if RANK > 0:
        sums, ups = _landed(sums, ups, FORM)
        barrier()  # other warps may still read the stages, in whose place z comes
        if OWN > 0:
            z_tile, second_z_tile = own(
                sums, ups, here, slot, rows - first_row, rank, FORM, SWAPPED, HEIGHT, TILE, RANK, SUMS, xs.dtype
            )  # fmt: skip
        else:
            z_tile, second_z_tile = reduced(numbers, more, at, there, rows * RANK, FORM, HEIGHT, RANK, xs.dtype)
        mbarrier.wait(arrived.index(STAGES), 0)
        if SWAPPED:
            sums = warpgroup_mma(up_tile, z_tile.permute((1, 0)), sums, is_async=True)
            if FORM == GATED:
                ups = warpgroup_mma(second_up_tile, second_z_tile.permute((1, 0)), ups, is_async=True)
        else:
            sums = warpgroup_mma(z_tile, up_tile.permute((1, 0)), sums, is_async=True)
    # At once: with other instructions in between, the assembler makes every product wait for the one before.
    sums, ups = _landed(sums, ups, FORM)
    left, right = gl.arange(0, LEFT, gl.SliceLayout(1, SUMS)), gl.arange(0, RIGHT, gl.SliceLayout(0, SUMS))
    if SWAPPED:
        row, output = gl.expand_dims(right, 0), gl.expand_dims(left - FRONT, 1)
    else:
        row, output = gl.expand_dims(left, 1), gl.expand_dims(right - FRONT, 0)
    wanted, output = (output >= 0) & (output < OUTPUTS), first_output + output
    if FORM == GATED:
        g, u = sums.to(out.dtype.element_ty).to(gl.float32), ups.to(out.dtype.element_ty).to(gl.float32)
        sums = g / (1.0 + gl.exp(-g)) * u
    if FORM == END_TO_END:
        if w_index == 2:
            out, stride, outputs = third_out, stride - FIRST - SECOND, outputs - FIRST - SECOND
        elif w_index == 1:
            out, stride, outputs = second_out, SECOND, SECOND
        else:
            stride, outputs = FIRST, FIRST
    wanted = wanted & (output < outputs)
    if HAS_BIAS:
        sums += gl.load(bias + output, wanted, 0.0).to(gl.float32)
    sums = sums.to(out.dtype.element_ty)
    if PLACES == 0:
        inside = (row < ROWS) & (first_row + row < rows) & wanted
        gl.store(out + (first_row + row).to(gl.int64) * stride + output, sums, inside)
    else:  # to other GPUs whole vectors of outputs travel, not the pairs that a warp holds
        barrier()  # as before z
        if SWAPPED:
            sums = sums.permute((1, 0))
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // TILE, TILE // 8], [4, 1], [1, 0])
        sums = gl.convert_layout(sums, WIDE)
        row = gl.expand_dims(gl.arange(0, HEIGHT, gl.SliceLayout(1, WIDE)), 1)
        output = gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(0, WIDE)), 0) - FRONT
        wanted, output = (output >= 0) & (output < OUTPUTS), first_output + output
        at = (first_row + row).to(gl.int64) * stride + output
        inside = (row < ROWS) & (first_row + row < rows) & wanted & (output < outputs)
        for index in gl.static_range(PLACES):
            gl.store(targets[index] + at, sums, inside)


_layouts: dict[tuple[int, int], Any] = {}


def _described(x: Tensor, *tile: int) -> TensorDescriptor:
    if tile not in _layouts:
        _layouts[tile] = gl.NVMMASharedLayout.get_default_for(list(tile), gl.bfloat16)
    return TensorDescriptor.from_tensor(x, list(tile), _layouts[tile])


class Adapter(NamedTuple):
    """The one adapter that the rows of a launch have, or some of them."""

    factors: tuple[Factors, ...]  # of each weight, all of one rank
    which: AdapterSlots
    slots: Tensor | None  # [T] int64; None: all rows have slot 0
    sole: Tensor | None  # [1] int64, the slot that is the adapter's
    ahead: bool  # `sole` is there before the launch's predecessor has ended


SHARED = 227 * 1024  # bytes of shared memory that a program may have


def _launch(
    x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None, outs: tuple[Tensor, ...], addresses: Tensor | None,
    tiles: Tiles, form: int, adapter: Adapter | None = None, meeting: Meeting | None = None,
) -> None:  # fmt: skip
    rows, width = x.shape
    ahead = all(isinstance(weight, Parameter) and aligned(weight) is weight for weight in weights)
    if meeting is not None and not (tiles.early and ahead and addresses is not None and adapter is None):
        meet(meeting)
        meeting = None
    outputs = len(weights[0]) if form == GATED.value else sum(map(len, weights))
    described = [_described(aligned(weight), tiles.outputs, tiles.width) for weight in weights]
    downs, ups, rank, columns, z_programs = described, described, 0, 0, 0
    out, second_out, third_out = (outs * 3)[:3]
    z = slots = sole = out
    z_xs = xs = _described(aligned(x), tiles.rows, tiles.width)
    z_rows, part, z_stages, stages = tiles.rows, 0, 0, tiles.stages
    tile = max(tiles.outputs, LEFT_ROWS.value * tiles.swapped)
    row_tiles = cdiv(rows, tiles.rows)
    if adapter is not None:
        rank, held = adapter.factors[0].down.shape[1], [x for each in adapter.factors for x in (each.down, each.up)]
        # A copy of a weight would be the predecessor's work.
        ahead = adapter.ahead and all(aligned(each) is each for each in (*weights, *held))
        columns = max(16, triton.next_power_of_2(rank))
        own = tiles.part == 0 and columns <= OWN_COLUMNS
        z_rows, part, z_width = min(tiles.z_rows, tiles.rows), min(tiles.part or 16, columns), REDUCED_WIDTH.value
        if own:
            part, z_width = columns, tiles.width
            tile = max(tile, 2 * columns, 2 * tiles.outputs)
        else:
            z_xs = _described(aligned(x), z_rows, z_width)
            z = adapter.which.blank(len(weights) * rows * columns, x.device)
            z_programs = cdiv(rows, z_rows) * columns // part * len(weights)
        downs = [_described(aligned(each.down).flatten(0, 1), part, z_width) for each in adapter.factors]
        ups = [_described(aligned(each.up).flatten(0, 1), tiles.outputs, columns) for each in adapter.factors]
        if adapter.slots is not None and adapter.sole is not None:
            slots, sole = adapter.slots, adapter.sole
        height, both = tiles.rows if tiles.swapped else LEFT_ROWS.value, 2 if form == GATED.value else 1
        # A z of its own lies where the stages were.
        kept = both * (height * columns * (not own) + tile * columns) * 2 + 2048
        stage, programs = (height + both * tile) * tiles.width * 2, row_tiles * (outputs // tiles.outputs)
        # z's programs may be the ones that no longer find a place of their own: two share one if they can.
        alone = own or programs + z_programs <= processors(x.device) or 3 * stage + kept > SHARED // 2
        stages = min(stages, ((SHARED if alone else SHARED // 2) - kept) // stage)
        if not own:
            z_stages = (stages * stage + kept - 1024) // ((LEFT_ROWS.value + part) * z_width * 2)
            z_stages = max(2, min(12, z_stages, cdiv(width, z_width)))
    first, second, third = (described * 3)[:3]
    first_down, second_down, third_down = (downs * 3)[:3]
    first_up, second_up, third_up = (ups * 3)[:3]
    stride = outputs if form == END_TO_END.value else out.stride(0)
    _few_rows[(row_tiles * cdiv(outputs, tiles.outputs) + z_programs,)](
        xs, first, second, third, z_xs, first_down, second_down, third_down, first_up, second_up, third_up, z, slots,
        sole, out if bias is None else aligned(bias), out, second_out, third_out, rows, outputs, width,
        out if addresses is None else addresses, stride, *(meeting or (out, out, 0, 0)), rank,
        FIRST=len(weights[0]), SECOND=len((weights * 2)[1]), FORM=form, ROWS=tiles.rows, OUTPUTS=tiles.outputs,
        WIDTH=tiles.width, SWAPPED=tiles.swapped, STAGES=stages, HAS_BIAS=bias is not None, EARLY=tiles.early,
        AHEAD=ahead, PLACES=0 if addresses is None else len(addresses), MEETS=meeting is not None, RANK=columns,
        TILE=tile, Z_ROWS=z_rows, Z_OUTPUTS=part, Z_STAGES=z_stages, HAS_SLOTS=slots is not out, num_warps=4,
        launch_pdl=tiles.early, enable_fp_fusion=form != GATED.value,
    )  # fmt: skip


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tiles: Tiles, addresses: Tensor | None = None,
    adapter: Adapter | None = None, meeting: Meeting | None = None,
) -> None:  # fmt: skip
    """out [T, N] = x [T, K] weight [N, K]^T + bias [N], of 16-bit numbers; K a multiple of 8. `addresses`: see
    `chain`. `meeting`: `meet`, before x is read."""
    _launch(x, (weight,), bias, (out,), addresses, tiles, ONE.value, adapter, meeting)


def products(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], tiles: Tiles, adapter: Adapter | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [T, K] times each of three weights [N, K], whose outputs are multiples of the tile's -> [T, N] each."""
    first, second, third = (x.new_empty(len(x), len(weight), dtype=dtype) for weight in weights)
    _launch(x, weights, None, (first, second, third), None, tiles, END_TO_END.value, adapter)
    return first, second, third


def gated(
    x: Tensor, gate: Tensor, up: Tensor, out: Tensor, tiles: Tiles, addresses: Tensor | None = None,
    adapter: Adapter | None = None,
) -> None:  # fmt: skip
    """out [T, F] = silu_mul of x [T, K] times gate and up [F, K]. `addresses`: see `chain`."""
    assert tiles.swapped
    _launch(x, (gate, up), None, (out,), addresses, tiles, GATED.value, adapter)
