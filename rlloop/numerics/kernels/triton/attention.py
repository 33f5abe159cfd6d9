"""Attention over ragged sequences: the same arithmetic for decode, prefill, chunked prefill, training and images.

A query reads keys in tiles at absolute positions, and its softmax, in float32, begins anew every `SEGMENT` keys: a
segment's (top, total, sums) joins those before it in ascending order. `attention_tiles` says what a segment is. Decode
over a long context gives each segment a program of its own and joins them afterwards; everything else joins them as it
goes. A query's bits depend on itself and its keys alone. Queries of the heads that share a key-value head stand in one
tile.

The keys of a window are one part, which begins with the tile that has the first of them. A sink counts as a first key
whose value is 0. Without causality (vision towers), every query reads the keys that a causal sequence's last one reads.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.attention_tiles import divided, fixed_segment, join, load_rows, segment
from rlloop.numerics.kernels.triton.launch import (
    ALIGNMENT,
    EXACT,
    HOPPER,
    aligned,
    cdiv,
    generation,
    gluon_runs,
    hopper,
    power_of_two,
    processors,
    rows_like,
)
from rlloop.numerics.kernels.triton.segments import SEGMENT, TILE, fixed, limit
from rlloop.numerics.layout import AttentionLayout

AHEAD = 8  # parts of a softmax that are loaded before they are joined
FLAGS = 1024  # blocks of queries of which a program asks at once whether they are to be computed anew


class Tiles(NamedTuple):
    """Queries of a program, its warps, and the number of tiles of keys in flight. Here each warp has 16 queries to
    itself, so that a query's masses are summed in one order. (Two warps with 32 share theirs: other bits, measured.)"""

    rows: int
    warps: int
    stages: int


DECODE = Tiles(16, 1, 2)
MANY = Tiles(64, 4, 3)  # where a sequence has more than one query, or more heads share keys than fit
LONG = Tiles(128, 8, 3)  # the same where contexts may be longer than a segment
BROAD = Tiles(64, 4, 2)  # likewise; of heads of more than 128 numbers no more fit into shared memory
FLOAT32 = Tiles(64, 4, 1)
# Latent attention: a key is its value and a little more, and is read in those two parts. One choice for every phase.
WIDE = 256  # numbers of a value
WIDE_HALF = Tiles(64, 8, 1)
WIDE_FLOAT32 = Tiles(16, 8, 1)
DATACENTRE_BLACKWELL = 10  # of `generation`
LOG2E = 1.4426950408889634


def for_generation(tiles: Tiles, v_width: int, generation: int) -> Tiles:
    """Tiles in which each warp has queries to itself on such a GPU, by the layouts that Triton 3.6 chooses: on Hopper
    `tiles` as they are; where the tensor core works warp by warp, as many queries as a value has numbers, or one warp.
    """
    if generation in (0, HOPPER):
        return tiles
    return DECODE if generation == DATACENTRE_BLACKWELL or v_width > LONG.rows else LONG


@triton.jit
def _find(starts, sequences, task, SHARE: tl.constexpr, ROWS: tl.constexpr):
    """The sequence that `task` is of, when sequence s has the tasks from starts[s] * SHARE // ROWS + s on."""
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) * SHARE // ROWS + middle <= task:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _joined(top, total, sums, part_top, part_total, part, reached, LIMIT: tl.constexpr):
    """Queries that come before the part's segment keep what they have."""
    new_top, new_total, new_sums = join(top, total, sums, part_top, part_total, part, LIMIT)
    top, total = tl.where(reached, new_top, top), tl.where(reached, new_total, total)
    return top, total, tl.where(reached[:, None], new_sums, sums)


@triton.jit
def _queries(
    task, group, at, q, k, v, v_step, query_start, context, block_start, sinks, out, lse, part_sums, part_stats,
    sequences, blocks, block_size, segments, scale, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, W: tl.constexpr, VW: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SEGMENT: tl.constexpr, CONTIGUOUS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    ONE: tl.constexpr, FORM: tl.constexpr, CAUSAL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The block `task` of queries of a key-value head. `ONE`: of each sequence, which has few queries. `FORM`: 0, no
    context is longer than a segment; 1, segments join here; 2, this is segment `at`, whose part goes to `part_sums` and
    `part_stats`. `REST`: keys are values followed by so many numbers (padded); 0: they are something else. Not
    `CAUSAL`: the mask takes every query for its sequence's last. `LIMIT`: 0 of the online softmax."""
    SHARE: tl.constexpr = HEADS // GROUPS
    if ONE:
        sequence, chunk = task, 0
    else:
        sequence = _find(query_start, sequences, task, SHARE, ROWS)
        chunk = task - (tl.load(query_start + sequence) * SHARE // ROWS + sequence).to(tl.int32)
    token = tl.load(query_start + sequence)
    rows = (tl.load(query_start + sequence + 1) - token) * SHARE
    offset = tl.load(context + sequence)
    row = chunk * ROWS + tl.arange(0, ROWS)
    if chunk * ROWS < rows:
        index = (token + row // SHARE) * HEADS + group * SHARE + row % SHARE
        position = offset + row // SHARE
        last = offset + (tl.minimum(chunk * ROWS + ROWS, rows) - 1) // SHARE
        first, dv = offset + chunk * ROWS // SHARE, tl.arange(0, VW)
        if not CAUSAL:
            last = offset + rows // SHARE - 1
            first, position = last, last + row * 0
        if REST == 0:
            queries = load_rows(q, index * WIDTH, row < rows, WIDTH, W, True)
            rest = queries
        else:
            queries = load_rows(q, index * WIDTH, row < rows, V_WIDTH, VW, True)
            rest = load_rows(q + V_WIDTH, index * WIDTH, row < rows, WIDTH - V_WIDTH, REST, True)
        mine = block_start + sequence.to(tl.int64) * blocks
        none, nothing = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
        top, total = none, nothing
        if SINKS:
            top = tl.load(sinks + group * SHARE + row % SHARE).to(tl.float32) * 1.4426950408889634
            total = nothing + 1.0
        if FORM == 2:
            begin = at * SEGMENT
            if begin <= last:
                end = tl.minimum(begin + SEGMENT, last + 1)
                if LIMIT > 0:
                    top, total, sums = fixed_segment(
                        queries, k, v, v_step, mine, block_size, group, position, first, last, begin, end, scale,
                        GROUPS, WIDTH, W, ROWS, TILE, CONTIGUOUS, ONE, LIMIT,
                    )  # fmt: skip
                else:
                    top, total = tl.where(at == 0, top, none), tl.where(at == 0, total, nothing)
                    top, total, sums = segment(
                        queries, rest, k, v, v_step, mine, block_size, group, position, first, last, begin, end, scale,
                        top, total, GROUPS, WIDTH, V_WIDTH, W, VW, REST, ROWS, TILE, CONTIGUOUS, WINDOW, ONE,
                    )  # fmt: skip
                part_index = index * segments + at
                tl.store(
                    part_sums + part_index[:, None] * V_WIDTH + dv[None, :], sums,
                    (row < rows)[:, None] & (dv < V_WIDTH)[None, :],
                )  # fmt: skip
                tl.store(part_stats + part_index * 2, top, row < rows)
                tl.store(part_stats + part_index * 2 + 1, total, row < rows)
        else:
            if LIMIT > 0:
                if FORM == 0:
                    top, total, sums = fixed_segment(
                        queries, k, v, v_step, mine, block_size, group, position, first, last, 0, last + 1, scale,
                        GROUPS, WIDTH, W, ROWS, TILE, CONTIGUOUS, ONE, LIMIT,
                    )  # fmt: skip
                else:
                    sums = tl.zeros((ROWS, VW), tl.float32)
                    for begin in range(0, last + 1, SEGMENT):
                        part_top, part_total, part = fixed_segment(
                            queries, k, v, v_step, mine, block_size, group, position, first, last, begin,
                            tl.minimum(begin + SEGMENT, last + 1), scale, GROUPS, WIDTH, W, ROWS, TILE, CONTIGUOUS, ONE,
                            LIMIT,
                        )  # fmt: skip
                        alone = begin == 0
                        top, total = tl.where(alone, part_top, top), tl.where(alone, part_total, total)
                        sums = tl.where(alone, part, sums)
                        top, total, sums = _joined(
                            top, total, sums, part_top, part_total, part, (position >= begin) & (begin > 0), LIMIT
                        )
            else:
                lowest, end = 0, tl.minimum(SEGMENT, last + 1)
                if WINDOW > 0:
                    lowest, end = tl.maximum(first - WINDOW + 1, 0) // TILE * TILE, last + 1
                top, total, sums = segment(
                    queries, rest, k, v, v_step, mine, block_size, group, position, first, last, lowest, end, scale,
                    top, total, GROUPS, WIDTH, V_WIDTH, W, VW, REST, ROWS, TILE, CONTIGUOUS, WINDOW, ONE,
                )  # fmt: skip
                if FORM == 1:
                    for begin in range(SEGMENT, last + 1, SEGMENT):
                        part_top, part_total, part = segment(
                            queries, rest, k, v, v_step, mine, block_size, group, position, first, last, begin,
                            tl.minimum(begin + SEGMENT, last + 1), scale, none, nothing, GROUPS, WIDTH, V_WIDTH, W, VW,
                            REST, ROWS, TILE, CONTIGUOUS, WINDOW, ONE,
                        )  # fmt: skip
                        top, total, sums = _joined(
                            top, total, sums, part_top, part_total, part, position >= begin, LIMIT
                        )
            output = divided(sums, total).to(out.dtype.element_ty)
            tl.store(
                out + index[:, None] * V_WIDTH + dv[None, :], output, (row < rows)[:, None] & (dv < V_WIDTH)[None, :]
            )
            tl.store(lse + index, (top + tl.log2(total)) * 0.6931471805599453, row < rows)


@triton.jit(do_not_specialize=["sequences", "blocks", "block_size", "segments"])
def _attention(
    q, k, v, v_step, query_start, context, block_start, sinks, out, lse, part_sums, part_stats, sequences, blocks,
    block_size, segments, scale, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, W: tl.constexpr, VW: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SEGMENT: tl.constexpr, CONTIGUOUS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    ONE: tl.constexpr, FORM: tl.constexpr, CAUSAL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    _queries(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), q, k, v, v_step, query_start, context, block_start, sinks,
        out, lse, part_sums, part_stats, sequences, blocks, block_size, segments, scale, HEADS, GROUPS, WIDTH, V_WIDTH,
        W, VW, REST, ROWS, TILE, SEGMENT, CONTIGUOUS, WINDOW, SINKS, ONE, FORM, CAUSAL, LIMIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "blocks", "block_size", "tasks"])
def _anew(
    flags, q, k, v, v_step, query_start, context, block_start, out, lse, sequences, blocks, block_size, tasks, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SEGMENT: tl.constexpr, CONTIGUOUS: tl.constexpr, CAUSAL: tl.constexpr, LIMIT: tl.constexpr,
    READ: tl.constexpr,
):  # fmt: skip
    """Computes the blocks whose flag `prefill` has set; `READ` flags are looked at together."""
    programs = tl.num_programs(0)
    for begin in range(tl.program_id(0), tasks, programs * READ):
        mine = begin + tl.arange(0, READ) * programs
        if tl.max(tl.load(flags + 1 + mine, mine < tasks, 0), 0) > 0:
            for task in range(begin, tl.minimum(begin + programs * READ, tasks), programs):
                if tl.load(flags + 1 + task) > 0:
                    _queries(
                        task // GROUPS, task % GROUPS, 0, q, k, v, v_step, query_start, context, block_start, lse, out,
                        lse, lse, lse, sequences, blocks, block_size, 1, scale, HEADS, GROUPS, WIDTH, WIDTH, W, W, 0,
                        ROWS, TILE, SEGMENT, CONTIGUOUS, 0, False, False, 1, CAUSAL, LIMIT,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["segments"])
def _join_parts(
    part_sums, part_stats, context, out, lse, segments, addresses, stride, HEADS: tl.constexpr, V_WIDTH: tl.constexpr,
    VW: tl.constexpr, SEGMENT: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, PLACES: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """The parts of one head of a decoding sequence, in ascending order; `AHEAD` are read before the first is joined.
    `addresses` and `PLACES` as for `decode._decode`."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    sequence, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, VW)[None, :]
    count, inside = (tl.load(context + sequence) // SEGMENT + 1).to(tl.int32), d < V_WIDTH
    index = sequence.to(tl.int64) * HEADS + head
    stats, partials = part_stats + index * segments * 2 + tl.arange(0, 1), part_sums + index * segments * V_WIDTH + d
    top, total, sums = tl.load(stats), tl.load(stats + 1), tl.load(partials, inside, 0.0)
    for begin in range(1, count, AHEAD):
        tops, totals, rows = (), (), ()
        for ahead in tl.static_range(AHEAD):
            segment = begin + ahead
            tops = tops + (tl.load(stats + segment * 2, segment < count, 0.0),)  # noqa: RUF005
            totals = totals + (tl.load(stats + segment * 2 + 1, segment < count, 0.0),)  # noqa: RUF005
            rows = rows + (tl.load(partials + segment * V_WIDTH, inside & (segment < count), 0.0),)  # noqa: RUF005
        for ahead in tl.static_range(AHEAD):
            new_top, new_total, new_sums = join(top, total, sums, tops[ahead], totals[ahead], rows[ahead], LIMIT)
            there = begin + ahead < count
            top, total = tl.where(there, new_top, top), tl.where(there, new_total, total)
            sums = tl.where(there, new_sums, sums)
    output = divided(sums, total).to(out.dtype.element_ty)
    if PLACES == 0:
        tl.store(out + index * V_WIDTH + d, output, inside)
    for place in tl.static_range(PLACES):
        at = tl.multiple_of(tl.load(addresses + place).to(out.dtype), 16) + sequence.to(tl.int64) * stride
        tl.store(at + head * V_WIDTH + d, output, inside)
    tl.store(lse + index + tl.arange(0, 1), (top + tl.log2(total)) * 0.6931471805599453)


def value_rows(v: Tensor) -> tuple[Tensor, int]:
    """Values [slots, G, D] that a kernel can read, and how far one slot is from the next. Latents, and values made
    together with queries and keys, are parts of wider rows, and are not copied for their sake.

    The compiler knows which steps are multiples of 16, and lays tiles out by it: one that is where the copy's is not,
    or the other way round, would be read by another kernel.
    """
    _, groups, width = v.shape
    apart = v.stride(2) == 1 and (groups == 1 or v.stride(1) == width) and v.stride(0) >= groups * width
    alike = groups == 1 or (v.stride(0) % ALIGNMENT == 0) == (groups * width % ALIGNMENT == 0)
    if apart and alike and v.data_ptr() % ALIGNMENT == 0:
        return v, v.stride(0)
    return aligned(v), groups * width


def _better_kernels(device: torch.device) -> tuple[ModuleType | None, ModuleType | None]:
    """(of one query a sequence, of more): the Gluon kernels, or None."""
    if not gluon_runs(device):
        return None, None
    from rlloop.numerics.kernels.triton import decode, prefill

    return decode, prefill


def decodes(q: Tensor, v: Tensor, layout: AttentionLayout) -> bool:
    """True if these are sequences of one query each that `decode` reads, so that results can go elsewhere."""
    if layout.decoding or layout.families or not 0 < len(q) == len(layout.block_start):
        return False
    decode, _ = _better_kernels(q.device)
    return decode is not None and v.is_contiguous() and decode.takes(q, v, v.stride(0), layout.block_size)


def attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, context: Tensor, block_start: Tensor, block_size: int,
    scale: float, window: int = 0, sinks: Tensor | None = None, causal: bool = True, addresses: Tensor | None = None,
    stride: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, log-sum-exp of the scaled scores [T, H] float32). `layout.AttentionMask` says what window and sinks are.

    With as many queries as sequences, each sequence must have one: that is decode. Not `causal`: each query reads all
    keys of its sequence, which has neither a window nor sinks; whole sequences only, any number of queries.

    `addresses` [P] int64, multiples of 16: where `decodes`, each gets the results in place of `out`, tokens `stride`
    numbers apart.
    """
    (tokens, heads, width), (_, groups, v_width) = q.shape, v.shape
    out, lse = rows_like(q, tokens, heads, v_width), q.new_empty(tokens, heads, dtype=torch.float32)
    if tokens == 0:
        return out, lse
    q, k, (v, v_step) = aligned(q), aligned(k), value_rows(v)
    query_start, context, block_start = query_start.contiguous(), context.contiguous(), block_start.contiguous()
    sequences, blocks = block_start.shape
    single = causal and tokens == sequences
    segments, share = cdiv(blocks * block_size, SEGMENT), heads // groups
    most = limit(q.dtype) if fixed(q.dtype, width, v_width, window, sinks is not None) else 0.0
    form = 0 if segments == 1 or window else 2 if single else 1
    wide = groups == 1 and width > v_width >= WIDE and (v.data_ptr(), v_step) == (k.data_ptr(), width)
    if q.dtype == torch.float32:
        tiles = WIDE_FLOAT32 if wide else FLOAT32
    elif wide:
        tiles = WIDE_HALF
    elif single and share <= DECODE.rows:
        tiles = DECODE
    else:
        tiles = BROAD if width > 128 else LONG if form == 1 else MANY
        tiles = for_generation(tiles, v_width, generation(q.device))
    one = single and share <= tiles.rows
    tasks = sequences if one else tokens * share // tiles.rows + sequences
    shapes = ((tokens, heads, segments, n) for n in (v_width, 2))
    part_sums, part_stats = (q.new_empty(x, dtype=torch.float32) for x in shapes) if form == 2 else (lse, lse)
    decode, prefill = _better_kernels(q.device) if not window and sinks is None else (None, None)
    if not single and prefill is not None and prefill.takes(q, k, v, v_step, blocks, block_size, causal):
        flags, flagged = prefill.run(
            q, k, v, v_step, query_start, context, block_start, block_size, scale * LOG2E, out, lse, causal,
        )  # fmt: skip
        _anew[(min(flagged, processors(q.device)),)](
            flags, q, k, v, v_step, query_start, context, block_start, out, lse, sequences, blocks, block_size, flagged,
            scale * LOG2E, HEADS=heads, GROUPS=groups, WIDTH=width, W=power_of_two(width), ROWS=LONG.rows, TILE=TILE,
            SEGMENT=SEGMENT, CONTIGUOUS=blocks == 1, CAUSAL=causal, LIMIT=most, READ=FLAGS,
            num_warps=LONG.warps, num_stages=LONG.stages, **EXACT,
        )  # fmt: skip
    elif single and decode is not None and decode.takes(q, v, v_step, block_size):
        decode.run(
            q, k, v, context, block_start, block_size, scale * LOG2E, out, lse, part_sums, part_stats, segments, TILE,
            SEGMENT, most, None if form == 2 else addresses, stride,
        )  # fmt: skip
    else:
        _attention[(tasks, groups, segments if form == 2 else 1)](
            q, k, v, v_step, query_start, context, block_start, lse if sinks is None else aligned(sinks), out, lse,
            part_sums, part_stats, sequences, blocks, block_size, segments, scale * LOG2E, HEADS=heads, GROUPS=groups,
            WIDTH=width, V_WIDTH=v_width, W=power_of_two(width, 16), VW=power_of_two(v_width, 16),
            REST=power_of_two(width - v_width, 16) if wide else 0, ROWS=tiles.rows, TILE=TILE, SEGMENT=SEGMENT,
            CONTIGUOUS=blocks == 1, WINDOW=window, SINKS=sinks is not None, ONE=one, FORM=form, CAUSAL=causal,
            LIMIT=most, num_warps=tiles.warps, num_stages=tiles.stages, **EXACT,
        )  # fmt: skip
    if form == 2:
        _join_parts[(tokens, heads)](
            part_sums, part_stats, context, out, lse, segments, out if addresses is None else addresses, stride,
            HEADS=heads, V_WIDTH=v_width, VW=power_of_two(v_width, 16), SEGMENT=SEGMENT, AHEAD=AHEAD,
            EARLY=hopper(q.device), PLACES=0 if addresses is None else len(addresses),
            LIMIT=most, num_warps=1 if v_width <= 128 else 4, launch_pdl=hopper(q.device), **EXACT,
        )  # fmt: skip
    return out, lse
