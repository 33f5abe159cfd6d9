"""The adapter's part of `small_batch_linear`: z = A x, which a launch's first programs make and its others wait for.
Where a program makes it for itself (`own`), A's rows are multiplied as its weight's first ones.

z has nothing beside it that says what is there: a number of it is itself the sign. Its memory, the forward's own
(`AdapterSlots.blank`), holds `BLANK` everywhere at first, a NaN that no rounding makes. So nothing is counted, fenced
or reset, and who needs z has it one load after it was stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.gluon_names import barrier

LEFT_ROWS = gl.constexpr(64)  # of the tensor core's left operand
ONE, END_TO_END, GATED = (gl.constexpr(i) for i in range(3))  # how a launch uses its weights
REDUCED_WIDTH = gl.constexpr(128)  # of K at a time
BLANK = gl.constexpr(-1)  # as int16; a NaN that is rounded is 0x7FFF


@gluon.jit
def copy_tile(
    first, second, third, tile, second_tile, arrived, row, k, w_index, FORM: gl.constexpr, wanted,
):  # fmt: skip
    """Starts the copy of a weight's tile from its row `row` and column k on, if it is `wanted`; of weights end to end
    it is that of number `w_index`, and GATED wants both."""
    if FORM == END_TO_END:
        tma.async_copy_global_to_shared(first, [row, k], arrived, tile, wanted & (w_index == 0))
        tma.async_copy_global_to_shared(second, [row, k], arrived, tile, wanted & (w_index == 1))
        tma.async_copy_global_to_shared(third, [row, k], arrived, tile, wanted & (w_index == 2))
    else:
        tma.async_copy_global_to_shared(first, [row, k], arrived, tile, wanted)
    if FORM == GATED:
        tma.async_copy_global_to_shared(second, [row, k], arrived, second_tile, wanted)


@gluon.jit
def copy_factor(first, second, third, tile, arrived, row, k, w_index, FORM: gl.constexpr, wanted=True):
    # Branches, since each copy makes the whole program meet, wanted or not.
    if FORM == ONE or w_index == 0:
        tma.async_copy_global_to_shared(first, [row, k], arrived, tile, wanted)
    elif w_index == 1:
        tma.async_copy_global_to_shared(second, [row, k], arrived, tile, wanted)
    else:
        tma.async_copy_global_to_shared(third, [row, k], arrived, tile, wanted)


@gluon.jit
def reduce(
    xs, first, second, third, z, slots, slot, rows, width, rank, FORM: gl.constexpr, ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr, RANK: gl.constexpr,
    HAS_SLOTS: gl.constexpr,
):  # fmt: skip
    """One program's tile of z [weights, T, RANK]: rows of x times OUTPUTS rows of one weight's A, whatever tiles the
    product has. Rows whose slot is not this one get zeros, which leave a sum as it is."""
    WIDTH: gl.constexpr = REDUCED_WIDTH
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    PARTS: gl.constexpr = RANK // OUTPUTS
    BYTES: gl.constexpr = (ROWS + OUTPUTS) * WIDTH * 2
    row_tiles = gl.cdiv(rows, ROWS)
    first_row = gl.program_id(0) % row_tiles * ROWS
    part = gl.program_id(0) // row_tiles
    w_index, first_output = part // PARTS, part % PARTS * OUTPUTS
    x_tiles = gl.allocate_shared_memory(xs.dtype, [STAGES, LEFT_ROWS, WIDTH], xs.layout)
    tiles = gl.allocate_shared_memory(first.dtype, [STAGES, OUTPUTS, WIDTH], first.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()
    barrier()
    steps, row = gl.cdiv(width, WIDTH), slot * rank + first_output
    for stage in gl.static_range(STAGES):
        if stage < steps:
            mbarrier.expect(arrived.index(stage), BYTES)
            copy_factor(
                first, second, third, tiles.index(stage), arrived.index(stage), row, stage * WIDTH, w_index, FORM
            )
    if EARLY and AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            xs, [first_row, stage * WIDTH], arrived.index(stage), x_tiles.index(stage).slice(0, ROWS), stage < steps
        )
    sums = gl.zeros([LEFT_ROWS, OUTPUTS], gl.float32, SUMS)
    for step in range(steps):
        here = step % STAGES
        mbarrier.wait(arrived.index(here), step // STAGES & 1)
        sums = warpgroup_mma(x_tiles.index(here), tiles.index(here).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        # The step before is done with its place.
        coming, free = step + STAGES - 1, (step + STAGES - 1) % STAGES
        if (step > 0) & (coming < steps):
            mbarrier.expect(arrived.index(free), BYTES)
            copy_factor(
                first, second, third, tiles.index(free), arrived.index(free), row, coming * WIDTH, w_index, FORM
            )
            tma.async_copy_global_to_shared(
                xs, [first_row, coming * WIDTH], arrived.index(free), x_tiles.index(free).slice(0, ROWS)
            )
    sums = warpgroup_mma_wait(0, deps=[sums])
    row = gl.expand_dims(gl.arange(0, LEFT_ROWS, gl.SliceLayout(1, SUMS)), 1)
    output = first_output + gl.expand_dims(gl.arange(0, OUTPUTS, gl.SliceLayout(0, SUMS)), 0)
    inside = (row < ROWS) & (first_row + row < rows)
    has = inside & (output < rank)
    if HAS_SLOTS:
        has = has & (gl.load(slots + first_row + row, inside, -1) == slot)
    numbers = gl.where(has, sums, 0.0).to(xs.dtype).to(gl.int16, bitcast=True)
    numbers = gl.where(numbers == BLANK, 0x7FFF, numbers.to(gl.int32)).to(gl.int16)
    gl.store(z + ((w_index * rows + first_row + row) * RANK).to(gl.int64) + output, numbers, inside)


@gluon.jit
def look(at, inside, weight, FORM: gl.constexpr):
    """Loads z past the multiprocessor's cache: one weight's, and with GATED the second's, `weight` numbers on."""
    numbers = gl.load(at, inside, 0, volatile=True)
    more = numbers
    if FORM == GATED:
        more = gl.load(at + weight, inside, 0, volatile=True)
    return numbers, more


@gluon.jit
def places(
    z, w_index, first_row, rows, ROWS: gl.constexpr, HEIGHT: gl.constexpr, RANK: gl.constexpr
):  # fmt: skip
    """Addresses of a tile of one weight's z, and the mask of those that exist."""
    # No number is loaded by two threads, which might see it at different times.
    EACH: gl.constexpr = min(8, HEIGHT * RANK // 128)
    WIDE: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // RANK, RANK // EACH], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, HEIGHT, gl.SliceLayout(1, WIDE)), 1)
    column = gl.expand_dims(gl.arange(0, RANK, gl.SliceLayout(0, WIDE)), 0)
    at = z + ((w_index * rows + first_row + row) * RANK).to(gl.int64) + column
    return at, (row < ROWS) & (first_row + row < rows) & (column < RANK)


@gluon.jit
def _blanks(numbers, more):
    return gl.max(gl.max(((numbers == BLANK) | (more == BLANK)).to(gl.int32), 1), 0)


@gluon.jit
def reduced(
    numbers, more, at, inside, weight, FORM: gl.constexpr, HEIGHT: gl.constexpr, RANK: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """Tiles of z in shared memory once they are whole, of which these numbers have been seen."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(min(RANK * 2, 128), 16, 2)
    blanks = _blanks(numbers, more)
    while blanks > 0:
        numbers, more = look(at, inside, weight, FORM)
        blanks = _blanks(numbers, more)
    tile = gl.allocate_shared_memory(dtype, [HEIGHT, RANK], SHARED, numbers.to(dtype, bitcast=True))
    second_tile = tile
    if FORM == GATED:
        second_tile = gl.allocate_shared_memory(dtype, [HEIGHT, RANK], SHARED, more.to(dtype, bitcast=True))
    fence_async_shared()
    barrier()
    return tile, second_tile


@gluon.jit
def _rounded(
    sums, has, SWAPPED: gl.constexpr, HEIGHT: gl.constexpr, TILE: gl.constexpr, RANK: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(min(TILE * 2, 128), 16, 2)
    numbers = gl.where(has, sums, 0.0).to(dtype)
    if SWAPPED:
        numbers = numbers.permute((1, 0))
    return gl.allocate_shared_memory(dtype, [HEIGHT, TILE], SHARED, numbers).slice(0, RANK, 1)


@gluon.jit
def _row_and_output(SWAPPED: gl.constexpr, HEIGHT: gl.constexpr, TILE: gl.constexpr, SUMS: gl.constexpr):
    if SWAPPED:
        row = gl.expand_dims(gl.arange(0, HEIGHT, gl.SliceLayout(0, SUMS)), 0)
        output = gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(1, SUMS)), 1)
    else:
        row = gl.expand_dims(gl.arange(0, HEIGHT, gl.SliceLayout(1, SUMS)), 1)
        output = gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(0, SUMS)), 0)
    return row, output


@gluon.jit
def slots_of(
    slots, slot, first_row, rows, SWAPPED: gl.constexpr, HEIGHT: gl.constexpr, TILE: gl.constexpr,
    HAS_SLOTS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Slots of the rows of a tile of sums."""
    row, _ = _row_and_output(SWAPPED, HEIGHT, TILE, SUMS)
    if HAS_SLOTS:
        slot = gl.load(slots + first_row + row, first_row + row < rows, -1).to(gl.int32)
    return slot


@gluon.jit
def own(
    sums, ups, slots, slot, left_rows, rank, FORM: gl.constexpr, SWAPPED: gl.constexpr, HEIGHT: gl.constexpr,
    TILE: gl.constexpr, RANK: gl.constexpr, SUMS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Tiles of z in shared memory, which are the first of these sums' outputs, of rows with these slots."""
    row, output = _row_and_output(SWAPPED, HEIGHT, TILE, SUMS)
    has = (row < left_rows) & (output < rank) & (slots == slot)
    tile = _rounded(sums, has, SWAPPED, HEIGHT, TILE, RANK, dtype)
    second_tile = tile
    if FORM == GATED:
        second_tile = _rounded(ups, has, SWAPPED, HEIGHT, TILE, RANK, dtype)
    fence_async_shared()
    barrier()
    return tile, second_tile
