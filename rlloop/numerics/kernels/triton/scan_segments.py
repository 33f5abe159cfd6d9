"""Kernel of `scan` without the delta rule for few long sequences, whose notation and formulas are there: the states
from which parts of a sequence go on side by side."""

from __future__ import annotations

import triton
import triton.language as tl

from rlloop.numerics.kernels.triton.scan_products import split, straight, turned, written


@triton.jit(do_not_specialize=["has_states"])
def begin_segments(
    k, v, beta, query_start, context, rows, states, made, begun, segments, has_states, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, SEGMENT: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, MADE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """S before each segment of a sequence, and r of a begun chunk's old rows, to `segments`, whose slots are laid out
    as rows of `states` are. `scan_chunks` reads them there: its programs write to the rows meanwhile.

    A program has a piece along K of some columns of a head's S, and chunks in turn. What a chunk adds does not depend
    on S, so pieces need nothing of each other. It is made as `scan_kernels._chunk` makes it."""
    SQUARE: tl.constexpr = CHUNK * CHUNK
    STRIDE: tl.constexpr = GROUPS * KEY
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    block, piece, group = part % BLOCKS, part // BLOCKS, head // (HEADS // GROUPS)
    begin = tl.load(query_start + sequence)
    count = (tl.load(query_start + sequence + 1) - begin).to(tl.int32)
    known = begin * 0
    mine = states
    if has_states != 0:
        known = tl.load(context + sequence)
        mine = states + tl.load(rows + sequence) * SIZE
    old = (known % CHUNK).to(tl.int32)
    n, token = tl.arange(0, CHUNK), turned(tl.arange(0, CHUNK))
    i, j = piece * PIECE + tl.arange(0, PIECE), block * COLUMNS + tl.arange(0, COLUMNS)
    of_key, of_value = (i < KEY)[None, :], (j < WIDTH)[:, None]
    state_at = (head * WIDTH + j)[:, None] * KEY + i[None, :]
    kept_at = VALUES + (head * CHUNK + token)[None, :] * WIDTH + j[:, None]
    state = tl.load(mine + state_at, of_value & of_key & (known >= CHUNK), 0.0)
    is_given = (token < old)[None, :] & of_value
    given = tl.load(mine + kept_at, is_given, 0.0)
    segments += (begin // SEGMENT + 2 * sequence) * SIZE
    tl.store(segments + state_at, state, of_value & of_key)
    tl.store(segments + kept_at, given, is_given & (piece == 0))
    to = made + ((begin // CHUNK + 2 * sequence) * HEADS + head) * MADE + 2 * SQUARE + CHUNK
    k += ((begin - old) * GROUPS + group) * KEY
    value_at = v + ((begin - old) * HEADS + head) * WIDTH + token[None, :] * (HEADS * WIDTH) + j[:, None]
    beta_at = beta + (begin - old + token) * HEADS + head
    keys = k
    if old > 0:
        keys = begun + (sequence * CHUNK * GROUPS + group) * KEY
    # Up to the last segment's begin, so that all chunks are whole.
    for chunk in tl.range(0, (old + count - 1) // SEGMENT * SEGMENT, CHUNK, num_stages=STAGES):
        is_old = chunk + token < old
        values = tl.load(value_at, ~is_old[None, :] & of_value, 0.0)
        betas = tl.load(beta_at, ~is_old, 0.0)
        to_end, total = tl.load(to + token), tl.load(to - 1)
        rows_of_keys = tl.load(keys + n[:, None] * STRIDE + i[None, :], (n >= 0)[:, None] & of_key, 0.0)
        u = tl.where(is_old[None, :], given, values * betas[None, :])
        high, low = split(straight(u * to_end[None, :], COLUMNS, CHUNK))
        added = straight(written(high, low, straight(rows_of_keys, CHUNK, PIECE, True)), COLUMNS, PIECE)
        state = state * total + added
        if (chunk + CHUNK) % SEGMENT == 0:
            segments += SIZE
            tl.store(segments + state_at, state, of_value & of_key)
        to += HEADS * MADE
        k += CHUNK * STRIDE
        value_at += CHUNK * HEADS * WIDTH
        beta_at += CHUNK * HEADS
        keys = k
