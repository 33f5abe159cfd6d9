"""Decode: one query a sequence over pages, with a program of one warp for each key-value head and segment.

The tensor memory accelerator brings the next tile's keys while the warp computes masses, and its values while it comes
to the next keys: no thread loads anything but where pages are, and six programs a multiprocessor keep the memory busy.
What is computed is `attention_tiles`' segment, operation for operation in the same registers, so bits agree.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.launch import EXACT

ROWS = 16  # of queries: heads that share a key-value head
COLUMNS = 64  # of a copy: the accelerator swizzles rows of 128 bytes, in groups
LEAST_PAGE = 8  # of so many
WIDTHS = (64, 128, 256)


def takes(q: Tensor, v: Tensor, v_step: int, block_size: int) -> bool:
    """True if `run` supports these tensors."""
    groups, width = v.shape[1:]
    return (
        q.element_size() == 2
        and q.shape[2] == width
        and width in WIDTHS
        and v_step == groups * width
        and q.shape[1] <= ROWS * groups
        and block_size >= LEAST_PAGE
        and block_size & (block_size - 1) == 0
    )


@gluon.constexpr_function
def _tiles(PAGE, TILE, WIDTH):
    """Layout of a tile in shared memory: page after page, in each its blocks of 64 columns, in each their rows."""
    bases = [[0, 1 << i] for i in range(6)]
    bases += [[1 << i, 8 << i] for i in range(3)]
    bases += [[8 << i, 0] for i in range((PAGE // 8).bit_length() - 1)]
    bases += [[0, 64 << i] for i in range((WIDTH // 64).bit_length() - 1)]
    bases += [[PAGE << i, 0] for i in range((TILE // PAGE).bit_length() - 1)]
    return gl.SharedLinearLayout(bases)


@gluon.jit
def _slots(pages, tile, end, beyond, BLOCK: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr):
    """First slots of a tile's pages; unused pages lie `beyond` the store, where copies read zeros."""
    slots = ()
    for page in gl.static_range(TILE // PAGE):
        first = tile + page * PAGE
        slot = gl.load(pages + first // BLOCK, first < end, 0) + first % BLOCK
        slots = slots + (gl.where(first < end, slot.to(gl.int32), beyond),)  # noqa: RUF005
    return slots


@gluon.jit
def _copy(store, copies, arrived, column_block, slots, wanted, BYTES: gl.constexpr):
    """Start the copy of one tile of a store."""
    mbarrier.expect(arrived, BYTES, pred=wanted)
    for page in gl.static_range(len(slots)):
        tma.async_copy_global_to_shared(store, [column_block, slots[page], 0], arrived, copies.index(page), pred=wanted)


@gluon.jit
def divided(sums, total):
    """`attention_tiles.divided`."""
    zeros = gl.full(sums.shape, 0.0, gl.float32, sums.type.layout)
    inverse = gl.div_rn(gl.full(total.shape, 1.0, gl.float32, total.type.layout), total)
    inverse = gl.expand_dims(inverse, 1) + zeros
    quotient = sums * inverse
    return gl.fma(gl.fma(zeros - gl.expand_dims(total, 1), quotient, sums), inverse, quotient)


@gluon.jit
def _masses(
    query, keys, top, highest, total, scale, left, first, MASKED: gl.constexpr, FIXED: gl.constexpr,
    LIMIT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """(what masses are relative to, highest score, total, factor of the sums so far, masses of a tile's keys).
    `MASKED`: only the first `left` keys count. What they are relative to: the highest score so far where `LIMIT` is 0;
    `top` where that is `FIXED`; else the highest of this tile if it is the `first`."""
    TILE: gl.constexpr = keys.shape[0]
    right = keys.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
    scores = mma_v2(query, right, gl.zeros((query.shape[0], TILE), gl.float32, MMA), input_precision="ieee")
    if MASKED:
        seen = gl.arange(0, TILE, gl.SliceLayout(0, MMA)) < left
        scores = gl.where(seen[None, :], scores, float("-inf"))
    peak = gl.max(scores, 1) * scale
    highest = gl.maximum(highest, peak)
    if LIMIT == 0:
        base = highest
    elif FIXED:
        base = top
    else:
        base = gl.where(first, peak, top)
    masses = gl.exp2(gl.fma(scores, gl.full(scores.shape, scale, gl.float32, MMA), (-base)[:, None]))
    fade = gl.exp2(top - base)  # not used where there is a limit
    if LIMIT == 0:
        total = gl.fma(total, fade, gl.sum(masses, 1))
    else:
        total = total + gl.sum(masses, 1)
    return base, highest, total, fade, masses


@gluon.jit
def _add(sums, fade, masses, values, left, MASKED: gl.constexpr, LIMIT: gl.constexpr, MMA: gl.constexpr):
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    right = values.load(RIGHT)
    if MASKED:  # slots that were never written may hold NaN
        right = gl.where((gl.arange(0, values.shape[0], gl.SliceLayout(1, RIGHT)) < left)[:, None], right, 0.0)
    if LIMIT == 0:
        sums = sums * fade[:, None]
    left_side = gl.convert_layout(masses.to(values.dtype), gl.DotOperandLayout(0, MMA, 2))
    return mma_v2(left_side, right, sums, input_precision="ieee")


@gluon.jit
def _read(
    query, keys, values, copies, tiles, arrived, done, pages, begin, end, beyond, column_block, top, scale,
    FIXED: gl.constexpr, BLOCK: gl.constexpr, PAGE: gl.constexpr, LIMIT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """(top, highest score, total, sums) of the keys `begin` to `end`. `done`: tiles that were read before. `FIXED`:
    masses are relative to `top`; else the first tile says to what."""
    k_copies, v_copies = copies
    k_tile, v_tile = tiles
    k_arrived, v_arrived = arrived
    TILE: gl.constexpr = k_tile.shape[0]
    WIDTH: gl.constexpr = k_tile.shape[1]
    BYTES: gl.constexpr = TILE * WIDTH * 2
    slots = _slots(pages, begin, end, beyond, BLOCK, PAGE, TILE)
    _copy(keys, k_copies, k_arrived, column_block, slots, True, BYTES)
    _copy(values, v_copies, v_arrived, column_block, slots, True, BYTES)
    highest = gl.full((query.shape[0],), float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    total = gl.zeros((query.shape[0],), gl.float32, gl.SliceLayout(1, MMA))
    sums = gl.zeros((query.shape[0], WIDTH), gl.float32, MMA)
    whole, left = (end - begin) // TILE, (end - begin) % TILE
    for index in range(whole):
        tile = begin + (index + 1) * TILE
        slots = _slots(pages, tile, end, beyond, BLOCK, PAGE, TILE)
        mbarrier.wait(k_arrived, (done + index) & 1)
        top, highest, total, fade, masses = _masses(
            query, k_tile, top, highest, total, scale, left, index == 0, False, FIXED, LIMIT, MMA
        )
        _copy(keys, k_copies, k_arrived, column_block, slots, tile < end, BYTES)
        mbarrier.wait(v_arrived, (done + index) & 1)
        sums = _add(sums, fade, masses, v_tile, left, False, LIMIT, MMA)
        _copy(values, v_copies, v_arrived, column_block, slots, tile < end, BYTES)
    if left > 0:
        mbarrier.wait(k_arrived, (done + whole) & 1)
        top, highest, total, fade, masses = _masses(
            query, k_tile, top, highest, total, scale, left, whole == 0, True, FIXED, LIMIT, MMA
        )
        mbarrier.wait(v_arrived, (done + whole) & 1)
        sums = _add(sums, fade, masses, v_tile, left, True, LIMIT, MMA)
    return top, highest, total, sums


@gluon.jit(do_not_specialize=["blocks", "segments", "beyond"])
def _decode(
    q, keys, values, context, block_start, out, lse, part_sums, part_stats, blocks, segments, beyond, scale, addresses,
    stride, HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr,
    TILE: gl.constexpr, SEGMENT: gl.constexpr, LIMIT: gl.constexpr, DIRECT: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """`DIRECT`: no context is longer than a segment. Else parts go to `part_sums` and `part_stats`. `PLACES`: the
    number of `addresses` that results are written to, tokens `stride` apart, in place of `out`; 0: to `out`.
    `LIMIT`: of a segment's total, as `attention_tiles` has it; 0: an online softmax."""
    SHARE: gl.constexpr = HEADS // GROUPS
    PARTS: gl.constexpr = keys.block_shape[0]
    PAGE: gl.constexpr = keys.block_shape[1]
    COPIES: gl.constexpr = [TILE // PAGE, PARTS, PAGE, keys.block_shape[2]]
    TILES: gl.constexpr = _tiles(PAGE, TILE, WIDTH)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    HALF: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    FLOAT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    targets = ()
    for place in gl.static_range(PLACES):
        targets = targets + (gl.multiple_of(gl.load(addresses + place).to(out.dtype), 16),)  # noqa: RUF005
    gdc_wait()
    gdc_launch_dependents()
    group, sequence, segment = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    begin, last = segment * SEGMENT, gl.load(context + sequence).to(gl.int32)
    if begin <= last:
        end, column_block = gl.minimum(begin + SEGMENT, last + 1), group * PARTS
        pages = block_start + sequence.to(gl.int64) * blocks
        k_copies = gl.allocate_shared_memory(keys.dtype, COPIES, keys.layout)
        v_copies = gl.allocate_shared_memory(keys.dtype, COPIES, keys.layout)
        k_arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        v_arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(k_arrived, count=1)
        mbarrier.init(v_arrived, count=1)
        fence_async_shared()
        copies = (k_copies, v_copies)
        tiles = (
            k_copies._reinterpret(keys.dtype, [TILE, WIDTH], TILES),
            v_copies._reinterpret(keys.dtype, [TILE, WIDTH], TILES),
        )
        arrived = (k_arrived, v_arrived)
        first_row = sequence.to(gl.int64) * HEADS + group * SHARE
        row, d = gl.arange(0, ROWS, gl.SliceLayout(1, HALF)), gl.arange(0, WIDTH, gl.SliceLayout(0, HALF))
        inside = gl.expand_dims(row < SHARE, 1) & gl.expand_dims(d < WIDTH, 0)
        query = gl.load(q + (first_row + row)[:, None] * WIDTH + d[None, :], inside, 0.0)
        query = gl.convert_layout(query, gl.DotOperandLayout(0, MMA, 2))
        top = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
        top, highest, total, sums = _read(
            query, keys, values, copies, tiles, arrived, 0, pages, begin, end, beyond, column_block, top, scale, False,
            BLOCK, PAGE, LIMIT, MMA,
        )  # fmt: skip
        if LIMIT > 0:
            over = gl.where(total <= LIMIT, 0, 1)  # also where it is no number
            if gl.max(over, 0) > 0:  # anew; other rows get the same bits again
                top = gl.where(over > 0, highest, top)
                top, highest, total, sums = _read(
                    query, keys, values, copies, tiles, arrived, (end - begin + TILE - 1) // TILE, pages, begin, end,
                    beyond, column_block, top, scale, True, BLOCK, PAGE, LIMIT, MMA,
                )  # fmt: skip
        mine = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
        if DIRECT:
            output = divided(sums, total)
            output = gl.convert_layout(output.to(out.dtype.element_ty), HALF)
            if PLACES == 0:
                gl.store(out + (first_row + row)[:, None] * WIDTH + d[None, :], output, inside)
            own = sequence.to(gl.int64) * stride + (group * SHARE + row)[:, None] * WIDTH + d[None, :]
            for place in gl.static_range(PLACES):
                gl.store(targets[place] + own, output, inside)
            gl.store(lse + first_row + mine, (top + gl.log2(total)) * 0.6931471805599453, mine < SHARE)
        else:
            row, d = gl.arange(0, ROWS, gl.SliceLayout(1, FLOAT)), gl.arange(0, WIDTH, gl.SliceLayout(0, FLOAT))
            inside = gl.expand_dims(row < SHARE, 1) & gl.expand_dims(d < WIDTH, 0)
            at = ((first_row + row) * segments + segment)[:, None] * WIDTH + d[None, :]
            gl.store(part_sums + at, gl.convert_layout(sums, FLOAT), inside)
            stats = part_stats + ((first_row + mine) * segments + segment) * 2
            gl.store(stats, top, mine < SHARE)
            gl.store(stats + 1, total, mine < SHARE)


def _described(store: Tensor, page: int) -> TensorDescriptor:
    """[slots, G, D] as [blocks of columns, slots, columns]: a copy brings all columns of one head of a page."""
    slots, groups, width = store.shape
    column_blocks = width // COLUMNS
    return TensorDescriptor(
        store, [groups * column_blocks, slots, COLUMNS], [COLUMNS, groups * width, 1], [column_blocks, page, COLUMNS],
        gl.NVMMASharedLayout(128, 16, 3),
    )  # fmt: skip


def run(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor, block_start: Tensor, block_size: int, scale: float, out: Tensor,
    lse: Tensor, part_sums: Tensor, part_stats: Tensor, segments: int, tile: int, segment: int, limit: float,
    addresses: Tensor | None = None, stride: int = 0,
) -> None:  # fmt: skip
    """Decode as `attention` does: with one segment fills `out` and `lse`, with several the parts."""
    (tokens, heads, width), groups, page = q.shape, v.shape[1], min(block_size, tile)
    _decode[(groups, tokens, segments)](
        q, _described(k, page), _described(v, page), context, block_start, out, lse, part_sums, part_stats,
        block_start.shape[1], segments, len(k), scale, out if addresses is None else addresses, stride, HEADS=heads,
        GROUPS=groups, WIDTH=width, BLOCK=block_size, ROWS=ROWS, TILE=tile, SEGMENT=segment, LIMIT=limit,
        DIRECT=segments == 1, PLACES=0 if addresses is None else len(addresses), num_warps=1, launch_pdl=True, **EXACT,
    )  # fmt: skip
