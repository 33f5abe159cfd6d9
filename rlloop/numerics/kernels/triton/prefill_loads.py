"""The loading warpgroup of `prefill`: brings blocks of queries, and tiles of keys and values in a ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from rlloop.numerics.kernels.triton import segments
from rlloop.numerics.kernels.triton.gluon_names import barrier

TILE = gl.constexpr(2 * segments.TILE)
ROWS = gl.constexpr(64)  # queries of a warpgroup
WORKERS = gl.constexpr(2)  # warpgroups that multiply
STAGES = gl.constexpr(3)  # tiles of keys and values on their way
QUEUE = gl.constexpr(1)  # blocks of queries on their way
LOADERS = gl.constexpr(128)  # threads that bring them
FIELDS = gl.constexpr(5)  # of what is said of a block


@gluon.jit
def place(block, query_start, sequences, SHARE: gl.constexpr, BLOCK: gl.constexpr):
    """(first row, rows of the sequence, its first token, the sequence) of a block: sequence s has the blocks from
    query_start[s] * SHARE // BLOCK + s on."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(query_start + middle).to(gl.int32) * SHARE // BLOCK + middle <= block:
            low = middle
        else:
            high = middle
    token = gl.load(query_start + low).to(gl.int32)
    rows = (gl.load(query_start + low + 1).to(gl.int32) - token) * SHARE
    return (block - token * SHARE // BLOCK - low) * BLOCK, rows, token, low


@gluon.jit
def last_key(begin, rows, offset, SHARE: gl.constexpr, CAUSAL: gl.constexpr):
    """The last key that some query of the block from row `begin` on reads."""
    end = gl.minimum(begin + WORKERS * ROWS, rows) if CAUSAL else rows
    return offset + (end - 1) // SHARE


@gluon.jit
def _copy(base, offset, inside, tile, WIDTH: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows of WIDTH numbers at base + offset to a tile of W; zeros where not inside."""
    d = gl.arange(0, W, gl.SliceLayout(0, LAYOUT))
    at = base + offset[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(tile, at, inside[:, None] & (d < WIDTH)[None, :])


@gluon.jit
def _fetch(
    store, described, step, column, slots, start, pages, tile, end, full, into, WIDTH: gl.constexpr, W: gl.constexpr,
    BOX: gl.constexpr, LAYOUT: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """A tile of keys or values. Rows from the sequence's `end` on belong to another one and are not read.

    Of a head narrower than a tile the accelerator brings the next head's numbers, too: queries have zeros there, and
    sums of such values are not stored.
    """
    if tile + TILE <= end:
        mbarrier.expect(full, TILE * W * 2)
        mbarrier.arrive(full, count=LOADERS - 1)
        for box in gl.static_range(TILE // BOX):
            tma.async_copy_global_to_shared(described, [slots[box], column], full, into.slice(box * BOX, BOX, dim=0))
    else:
        keys = tile + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
        if PAGE:
            at = gl.load(pages + keys // PAGE, keys < end, 0) + keys % PAGE
        else:
            at = (start + keys).to(gl.int64)
        _copy(store + column, at * step, keys < end, into, WIDTH, W, LAYOUT)
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _slots(start, pages, tile, end, BOX: gl.constexpr, PAGE: gl.constexpr):
    """Rows of the store at which a tile's boxes begin."""
    slots = ()
    for box in gl.static_range(TILE // BOX):
        key = tile + box * BOX
        if PAGE:
            slot = gl.load(pages + key // PAGE, key < end, 0).to(gl.int32) + key % PAGE
        else:
            slot = start + key
        slots = slots + (slot,)  # noqa: RUF005
    return slots


@gluon.jit
def order(orders, queue_slot, rows, begin, token, offset, block):
    """Says what the block at `queue_slot` is; no rows: that there are no more."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero = gl.full((1,), 0, gl.int32, one)
    orders.index(queue_slot * FIELDS).store(zero + rows)
    orders.index(queue_slot * FIELDS + 1).store(zero + begin)
    orders.index(queue_slot * FIELDS + 2).store(zero + token)
    orders.index(queue_slot * FIELDS + 3).store(zero + offset)
    orders.index(queue_slot * FIELDS + 4).store(zero + block)
    barrier()


@gluon.jit
def ordered(orders, queue_slot, field: gl.constexpr):
    return gl.max(orders.index(queue_slot * FIELDS + field).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def bring(
    q, k, v, k_described, v_described, v_step, query_start, context, block_start, flags, sequences, tokens, blocks,
    tasks, tiles, orders, bars, HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr,
    W: gl.constexpr, BOX: gl.constexpr, CAUSAL: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The loading warpgroup. All its threads arrive at a `full` barrier, one of each other warpgroup at an `empty`."""
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_empty, k_full, v_full, k_empty, v_empty = bars
    SHARE: gl.constexpr = HEADS // GROUPS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    rows_here = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    done = 0
    count = 0
    task = gl.program_id(0)
    while task < tasks:
        block = tokens * SHARE // (WORKERS * ROWS) + sequences - 1 - task // GROUPS  # a sequence's end first
        begin, rows, token, sequence = place(block, query_start, sequences, SHARE, WORKERS * ROWS)
        group = task % GROUPS
        if begin < rows:
            offset = gl.load(context + sequence).to(gl.int32)
            queue_slot = done % QUEUE
            mbarrier.wait(q_empty.index(queue_slot), (done // QUEUE & 1) ^ 1)
            order(orders, queue_slot, rows, begin, token, offset, block * GROUPS + group)
            mbarrier.arrive(q_full.index(queue_slot), count=1)
            for worker in gl.static_range(WORKERS):
                row = begin + worker * ROWS + rows_here
                at = ((token + row // SHARE).to(gl.int64) * HEADS + group * SHARE + row % SHARE) * WIDTH
                _copy(q, at, row < rows, q_tiles.index(queue_slot * WORKERS + worker), WIDTH, W, LAYOUT)
            async_copy.mbarrier_arrive(q_full.index(queue_slot), increment_count=False)
            done += 1
            end = offset + rows // SHARE
            last = last_key(begin, rows, offset, SHARE, CAUSAL)
            pages = block_start + sequence.to(gl.int64) * blocks
            start = 0 if PAGE else gl.load(pages).to(gl.int32)
            slots = _slots(start, pages, 0, end, BOX, PAGE)
            for tile in range(0, last + 1, TILE):
                stage = count % STAGES
                phase = (count // STAGES & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                _fetch(
                    k, k_described, GROUPS * WIDTH, group * WIDTH, slots, start, pages, tile, end,
                    k_full.index(stage), k_tiles.index(stage), WIDTH, W, BOX, LAYOUT, PAGE,
                )  # fmt: skip
                mbarrier.wait(v_empty.index(stage), phase)
                _fetch(
                    v, v_described, v_step, group * WIDTH, slots, start, pages, tile, end,
                    v_full.index(stage), v_tiles.index(stage), WIDTH, W, BOX, LAYOUT, PAGE,
                )  # fmt: skip
                slots = _slots(start, pages, tile + TILE, end, BOX, PAGE)  # of the next: it waits for no other then
                count += 1
        task = gl.num_programs(0) + gl.atomic_add(flags, 1)
    queue_slot = done % QUEUE
    mbarrier.wait(q_empty.index(queue_slot), (done // QUEUE & 1) ^ 1)
    order(orders, queue_slot, 0, 0, 0, 0, 0)
    mbarrier.arrive(q_full.index(queue_slot), count=1)
    async_copy.mbarrier_arrive(q_full.index(queue_slot), increment_count=False)
