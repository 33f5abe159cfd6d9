"""`scan_chunks` with the delta rule where programs are few: the way through a chunk is then what takes time, and two
warps share it.

A program has 16 columns of S, and each warp a part of them along K, which it alone writes to. S crosses through shared
memory once a chunk, split, as the left operand of one product with k and q together, of which each warp makes the
columns of eight tokens. All other products are made by both, but for outputs, which each makes of its tokens. Numbers
are those of `scan_chunks`: the same chains of the same instructions."""

from __future__ import annotations

import triton
import triton.language as tl

from rlloop.numerics.kernels.triton.scan_kernels import keep_begun, step_of
from rlloop.numerics.kernels.triton.scan_products import plus, split, straight, straight_tiles, summed, turned, written


@triton.jit
def _nothing(COLUMNS: tl.constexpr):
    zeros = tl.zeros((2, 16, COLUMNS), tl.float32)
    return zeros, zeros, zeros


@triton.jit
def _both(x):
    """For each warp the same."""
    return tl.broadcast_to(x[None, :, :], (2, x.shape[0], x.shape[1]))


@triton.jit
def _chunk(
    state, q, k, to, values, betas, given, first, old, end, KEY: tl.constexpr, STRIDE: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """-> the state after it, outputs [2, V, 8], each warp's of its tokens, and r [2, V, 16]. Tokens are counted from
    `first`: those before `old` have keys, and r `given`; from `end` on there are none."""
    SQUARE: tl.constexpr = CHUNK * CHUNK
    SPAN: tl.constexpr = 2 * PIECE
    warp, n = tl.arange(0, 2), tl.arange(0, CHUNK)
    is_old, whole = (first + n < old)[None, :], first + CHUNK <= end
    mine = warp[:, None] * 8 + tl.arange(0, 8)[None, :]
    weights = tl.load(to + SQUARE + mine[:, None, :] * CHUNK + n[None, :, None])
    since, since_mine = tl.load(to + 2 * SQUARE + n), tl.load(to + 2 * SQUARE + turned(mine))
    to_end_at = to + 2 * SQUARE + CHUNK
    to_end = tl.where(whole, tl.load(to_end_at + turned(n)), 0.0)
    total = tl.where(whole, tl.load(to_end_at - 1), 1.0)
    column = tl.arange(0, 2 * CHUNK)  # tokens of k, then of q
    token, asks = turned(column) & (CHUNK - 1), column >= CHUNK
    there = (first + token < end) & ((first + token >= old) | ~asks)
    zeros = tl.zeros((16, 2 * CHUNK), tl.float32)
    sums = zeros, zeros, zeros
    for piece in tl.static_range(PIECES):
        number = piece * SPAN + tl.arange(0, SPAN)
        of_key = ((number < KEY) | (KEY % SPAN == 0))[:, None]
        at = tl.where(asks, q, k)[None, :] + (token[None, :] * STRIDE + number[:, None])
        to_high, to_low = split(tl.load(at, there[None, :] & of_key, 0.0))
        high, low = split(state[piece].permute(1, 0, 2).reshape(16, SPAN))
        sums = plus(sums, high, low, to_high, to_low)
    read, asked = summed(sums).reshape(16, 2, 2, 8).permute(2, 0, 3, 1).split()
    read = straight(read.permute(1, 0, 2).reshape(16, CHUNK), 16, CHUNK)
    r = _both((values - since[None, :] * read) * betas[None, :])
    r = tl.where(is_old[None, :, :], _both(given), r)
    high, low = split(r)
    to_high, to_low = split(tl.load(to + n[None, :] * CHUNK + n[:, None]))
    u = summed(plus(_nothing(CHUNK), high, low, _both(to_high), _both(to_low)))
    ended, u = straight_tiles(u * to_end[None, None, :], 2, CHUNK), straight_tiles(u, 2, CHUNK)
    high, low = split(ended)
    after = ()
    for piece in tl.static_range(PIECES):
        number = piece * SPAN + warp[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
        inside = (first + n < end)[None, :, None] & ((number < KEY) | (KEY % SPAN == 0))[:, None, :]
        keys = tl.load(k + n[None, :, None] * STRIDE + number[:, None, :], inside, 0.0)
        added = straight_tiles(written(high, low, straight_tiles(keys, 2, PIECE, True)), 2, PIECE)
        after = after + (state[piece] * total + added,)  # noqa: RUF005
    high, low = split(u)
    to_high, to_low = split(weights)
    output = since_mine[:, None, :] * asked
    output += summed(plus(_nothing(8), high, low, to_high, to_low))
    return after, output, r


@triton.jit(do_not_specialize=["has_states"])
def scan_pairs(
    q, k, v, beta, query_start, context, rows, states, made, begun, out, has_states, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    CHUNK: tl.constexpr, CORRECTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, INVERSES: tl.constexpr,
    FADES: tl.constexpr, SINCE: tl.constexpr, SIZE: tl.constexpr, MADE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has 16 columns of a head's state, and a sequence's chunks in turn; a warp of it `PIECE` numbers of each
    piece along K."""
    tl.static_assert(CORRECTS)
    SHARE: tl.constexpr = HEADS // GROUPS
    STRIDE: tl.constexpr = GROUPS * KEY
    SPAN: tl.constexpr = 2 * PIECE
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // SHARE
    begin, known, mine, old, end = step_of(sequence, query_start, context, rows, states, has_states, SIZE, CHUNK)
    warp, n, j = tl.arange(0, 2), tl.arange(0, CHUNK), block * 16 + tl.arange(0, 16)
    of_value = (j < WIDTH)[:, None]
    number = warp[:, None, None] * PIECE + tl.arange(0, PIECE)[None, None, :]
    state_at = mine + (head * WIDTH + j)[None, :, None] * KEY + number
    state = ()
    for piece in tl.static_range(PIECES):
        inside = (of_value & (known >= CHUNK))[None, :, :] & (piece * SPAN + number < KEY)
        state = state + (tl.load(state_at + piece * SPAN, inside, 0.0),)  # noqa: RUF005
    mine_of = turned(warp[:, None] * 8 + tl.arange(0, 8)[None, :])
    kept_at = mine + VALUES + (head * CHUNK + n)[None, :] * WIDTH + j[:, None]
    given = tl.load(kept_at, (n < old)[None, :] & of_value, 0.0)
    to = made + ((begin // CHUNK + 2 * sequence) * HEADS + head) * MADE
    q += ((begin - old) * GROUPS + group) * KEY
    k += ((begin - old) * GROUPS + group) * KEY
    v += ((begin - old) * HEADS + head) * WIDTH
    out += ((begin - old) * HEADS + head) * WIDTH
    beta += (begin - old) * HEADS + head
    keys = k
    if old > 0:
        keys = begun + (sequence * CHUNK * GROUPS + group) * KEY
    r = tl.zeros((2, 16, CHUNK), tl.float32)
    for chunk in tl.range(0, end, CHUNK, num_stages=STAGES):
        token, token_mine = chunk + n, chunk + mine_of
        there, there_mine = (token >= old) & (token < end), (token_mine >= old) & (token_mine < end)
        values = tl.load(v + n[None, :] * (HEADS * WIDTH) + j[:, None], there[None, :] & of_value, 0.0)
        betas = tl.load(beta + n * HEADS, there, 0.0)
        state, output, r = _chunk(
            state, q, keys, to, values, betas, given, chunk, old, end, KEY, STRIDE, PIECES, PIECE, CHUNK,
        )  # fmt: skip
        out_at = out + mine_of[:, None, :] * (HEADS * WIDTH) + j[None, :, None]
        tl.store(out_at, output, there_mine[:, None, :] & of_value[None, :, :])
        to += HEADS * MADE
        q += CHUNK * STRIDE
        k += CHUNK * STRIDE
        v += CHUNK * HEADS * WIDTH
        out += CHUNK * HEADS * WIDTH
        beta += CHUNK * HEADS
        keys = k
    if has_states != 0:
        if end >= CHUNK:
            for piece in tl.static_range(PIECES):
                inside = of_value[None, :, :] & (piece * SPAN + number < KEY)
                tl.store(state_at + piece * SPAN, state[piece], inside)
        upto = end % CHUNK
        is_new = (n < upto) & ((end >= CHUNK) | (n >= old))
        stored = (is_new[None, :] & of_value)[None, :, :] & (warp == 0)[:, None, None]
        tl.store(kept_at[None, :, :] + 0 * warp[:, None, None], r, stored)
        if (block == 0) & (upto > 0):  # nothing of this is read in this launch
            keep_begun(
                mine, to - HEADS * MADE, k - CHUNK * STRIDE, head, upto, is_new, KEY, STRIDE, SHARE, PIECES, SPAN,
                CHUNK, CORRECTS, KEYS, INVERSES, FADES, SINCE,
            )  # fmt: skip
