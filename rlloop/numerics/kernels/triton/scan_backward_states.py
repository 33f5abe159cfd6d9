"""The first kernels of `scan_backward`, in whose module the formulas are: states, and their gradients.

A chunk's tiles have a place of their own, `CHUNK` rows whatever its tokens: rows that are not there neither decay, read
nor write. What is multiplied stands there in parts, two tiles of bfloat16 that add up to 16 bits of float32, as tensor
cores fetch them, turned or not; a product is three of parts, with float32 sums.

Decays are used as sums of their logarithms, float64 so that differences of long sums are exact enough: what fades
between two tokens is one subtraction and one exponential. A decay of 0 has a logarithm so low that all fades to 0
again, and the gradient of a decay is made of products without it, never by dividing by it."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(1.2e-38)  # a smaller decay, which float32 has few digits of, is 0
OF_NOTHING = tl.constexpr(-1000.0)  # the logarithm of 0: two to this is 0 in float32


@triton.jit
def _place(slot, query_start, sequences, CHUNK: tl.constexpr):
    """-> a chunk's first token, and how many it has: 0 where the slot is no chunk's."""
    sequence, length = slot * 0, sequences
    while length > 1:
        half = length // 2
        base = tl.load(query_start + sequence + half) // CHUNK + sequence + half
        sequence = tl.where(base <= slot, sequence + half, sequence)
        length -= half
    begin, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    first = begin + (slot - begin // CHUNK - sequence) * CHUNK
    return first, tl.minimum(tl.maximum(end - first, 0), CHUNK).to(tl.int32)


@triton.jit
def _two_to(log):
    return tl.exp2(log.to(tl.float32))


@triton.jit
def _fades(logs, mask):
    """Two to `logs`, and 0 where the mask says so; there `logs` may be anything."""
    return tl.where(mask, _two_to(tl.where(mask, logs, 0.0)), 0.0)


@triton.jit
def _split(x):
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _whole(high, low):
    return high.to(tl.float32) + low.to(tl.float32)


@triton.jit
def _put(at, x, PLANE: tl.constexpr):
    high, low = _split(x)
    tl.store(at, high)
    tl.store(at + PLANE, low)


@triton.jit
def _plus(sums, a, a_low, b, b_low):
    sums = tl.dot(a_low, b, sums)
    sums = tl.dot(a, b_low, sums)
    return tl.dot(a, b, sums)


@triton.jit
def _product(x, y):
    """Of float32, [C, C] each."""
    a, a_low = _split(x)
    b, b_low = _split(y)
    return _plus(tl.zeros((x.shape[0], y.shape[1]), tl.float32), a, a_low, b, b_low)


@triton.jit
def _inverse(alike, log_at, betas_at, lower, scratch, count, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """T = (1 + lower)^-1 [C, C]: blocks of 16 by substitution, then pairs of blocks. Transposed blocks stand in a
    program's `scratch` meanwhile: columns of T are then a thread's, or its neighbours'."""
    PARTS: tl.constexpr = CHUNK // 16
    part, i, n = tl.arange(0, PARTS)[:, None], tl.arange(0, 16), tl.arange(0, CHUNK)
    row, column = n[:, None], n[None, :]
    across = part * 16 + i[None, :]
    log = tl.load(log_at + across)
    blocks = tl.where(i[None, :, None] == i[None, None, :], 1.0, tl.zeros((PARTS, 16, 16), tl.float32))
    for t in tl.static_range(1, 16):
        at = part * 16 + t
        weights = tl.load(alike + at * CHUNK + across) * tl.load(betas_at + at * HEADS, at < count, 0.0)
        weights *= _fades(tl.load(log_at + at) - log, i[None, :] < t)
        product = tl.sum(weights[:, None, :] * blocks, 2)
        blocks = tl.where(i[None, None, :] == t, blocks - product[:, :, None], blocks)
    tl.store(scratch + (part * 256)[:, :, None] + (i * 16)[None, :, None] + i[None, None, :], blocks)
    tl.debug_barrier()
    of_block = row // 16 == column // 16
    whole = tl.load(scratch + row // 16 * 256 + column % 16 * 16 + row % 16, of_block, 0.0)
    for doubling in tl.static_range(2):
        near = (row // (32 << doubling) == column // (32 << doubling)) & (
            row // (16 << doubling) > column // (16 << doubling)
        )
        whole -= _product(whole, _product(tl.where(near, lower, 0.0), whole))
    return whole


@triton.jit(do_not_specialize=["sequences", "heads"])
def prepare(
    q, k, decay, query_start, queries, keys, pairs, logs, sequences, heads, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    KEY: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Of a chunk and a group: parts of queries and keys, and their products; each head's sums of logarithms."""
    SHARE: tl.constexpr = HEADS // GROUPS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    slot, group = tl.program_id(1), tl.program_id(0)
    first, count = _place(slot, query_start, sequences, CHUNK)
    if count > 0:
        n, i = tl.arange(0, CHUNK), tl.arange(0, PIECE)
        row, column, there = n[:, None], n[None, :], n < count
        at = (first * GROUPS + group) * KEY + row * (GROUPS * KEY) + i[None, :]
        pair = slot.to(tl.int64) * (heads // SHARE) + group
        to = pair * (2 * CHUNK * KEYS) + row * KEYS + i[None, :]
        weights = tl.zeros((CHUNK, CHUNK), tl.float32)
        alike = weights
        for piece in range(0, KEYS, PIECE):
            mask = there[:, None] & (piece + i < KEY)[None, :]
            query, query_low = _split(tl.load(q + at + piece, mask, 0.0))
            key, key_low = _split(tl.load(k + at + piece, mask, 0.0))
            tl.store(queries + to + piece, query)
            tl.store(queries + to + piece + CHUNK * KEYS, query_low)
            tl.store(keys + to + piece, key)
            tl.store(keys + to + piece + CHUNK * KEYS, key_low)
            weights = _plus(weights, query, query_low, key.T, key_low.T)
            if CORRECTS:
                alike = _plus(alike, key, key_low, key.T, key_low.T)
        tl.store(pairs + pair * (2 * SQUARE) + row * CHUNK + column, weights)
        if CORRECTS:
            tl.store(pairs + pair * (2 * SQUARE) + SQUARE + row * CHUNK + column, alike)
        for member in range(SHARE):
            head = group * SHARE + member
            decays = tl.load(decay + (first + n) * HEADS + head, there, 1.0)
            log = tl.where(decays < LEAST, OF_NOTHING, tl.log2(tl.maximum(decays, LEAST))).to(tl.float64)
            tl.store(logs + (slot.to(tl.int64) * heads + head) * CHUNK + n, tl.cumsum(log, 0))


@triton.jit(do_not_specialize=["sequences", "heads"])
def invert(
    beta, grad, query_start, pairs, logs, inverses, slopes, sequences, heads, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a chunk and head, with the delta rule: T, and P^T g, what readers in the chunk say of its written values."""
    SHARE: tl.constexpr = HEADS // GROUPS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    slot, head = tl.program_id(1), tl.program_id(0)
    first, count = _place(slot, query_start, sequences, CHUNK)
    if count > 0:
        place = slot.to(tl.int64) * heads + head
        pair = slot.to(tl.int64) * (heads // SHARE) + head // SHARE
        n, j = tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
        row, column, there = n[:, None], n[None, :], n < count
        square = row * CHUNK + column
        log = tl.load(logs + place * CHUNK + n)
        fades = _fades(log[:, None] - log[None, :], row >= column)
        alike_at, beta_at = pairs + pair * (2 * SQUARE) + SQUARE, beta + first * HEADS + head
        lower = tl.load(alike_at + square) * fades * tl.load(beta_at + n * HEADS, there, 0.0)[:, None]
        scratch = slopes + place * (CHUNK * VALUES)
        inverse = _inverse(alike_at, logs + place * CHUNK, beta_at, lower, scratch, count, HEADS, CHUNK)
        _put(inverses + place * (2 * SQUARE) + square, inverse, SQUARE)
        faded, faded_low = _split((tl.load(pairs + pair * (2 * SQUARE) + square) * fades).T)
        value_at = (first * HEADS + head) * WIDTH + row * (HEADS * WIDTH) + j[None, :]
        for piece in range(0, VALUES, COLUMNS):
            mask = there[:, None] & (piece + j < WIDTH)[None, :]
            slope, slope_low = _split(tl.load(grad + value_at + piece, mask, 0.0))
            product = _plus(tl.zeros((CHUNK, COLUMNS), tl.float32), faded, faded_low, slope, slope_low)
            tl.store(slopes + place * (CHUNK * VALUES) + row * VALUES + piece + j[None, :], product)


@triton.jit(do_not_specialize=["heads"])
def begin_states(
    v, beta, query_start, keys, logs, inverses, written, states, begun, heads, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, COLUMNS: tl.constexpr, CORRECTS: tl.constexpr, HAS_BEGUN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has some columns of a head's state, and a sequence's chunks in turn: it leaves the states that they
    begin with, and, with the delta rule, what they write. begun [S, HEADS, WIDTH, KEY]: the states before the first."""
    SHARE: tl.constexpr = HEADS // GROUPS
    TILE: tl.constexpr = CHUNK * KEYS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.load(query_start + sequence)
    count = (tl.load(query_start + sequence + 1) - begin).to(tl.int32)
    n, i, j = tl.arange(0, CHUNK), tl.arange(0, KEYS), block * COLUMNS + tl.arange(0, COLUMNS)
    slot = begin // CHUNK + sequence
    place = slot * heads + head
    key_at = keys + (slot * (heads // SHARE) + head // SHARE) * (2 * TILE) + n[:, None] * KEYS + i[None, :]
    inverse_at = inverses + place * (2 * SQUARE) + n[:, None] * CHUNK + n[None, :]
    written_at = written + place * (2 * CHUNK * VALUES) + n[:, None] * VALUES + j[None, :]
    state_at = states + place * (2 * KEYS * VALUES) + i[:, None] * VALUES + j[None, :]
    log_at = logs + place * CHUNK
    value_at = v + ((begin + n) * HEADS + head)[:, None] * WIDTH + j[None, :]
    beta_at = beta + (begin + n) * HEADS + head
    state = tl.zeros((KEYS, COLUMNS), tl.float32)
    if HAS_BEGUN:
        begun_at = begun + ((sequence * HEADS + head) * WIDTH + j[None, :]) * KEY + i[:, None]
        state = tl.load(begun_at, (i < KEY)[:, None] & (j < WIDTH)[None, :], 0.0)
    for chunk in tl.range(0, count, CHUNK, num_stages=STAGES):
        there = chunk + n < count
        log, last = tl.load(log_at + n), tl.load(log_at + CHUNK - 1)
        high, low = _split(state)
        tl.store(state_at, high)
        tl.store(state_at + KEYS * VALUES, low)
        key, key_low = tl.load(key_at), tl.load(key_at + TILE)
        new = tl.load(value_at, there[:, None] & (j < WIDTH)[None, :], 0.0)
        if CORRECTS:
            read = _plus(tl.zeros((CHUNK, COLUMNS), tl.float32), key, key_low, high, low)
            new -= read * _two_to(log)[:, None]
        new *= tl.load(beta_at, there, 0.0)[:, None]
        if CORRECTS:
            high, low = _split(new)
            inverse, inverse_low = tl.load(inverse_at), tl.load(inverse_at + SQUARE)
            new = _plus(tl.zeros((CHUNK, COLUMNS), tl.float32), inverse, inverse_low, high, low)
            _put(written_at, new, CHUNK * VALUES)
        high, low = _split(new * _two_to(last - log)[:, None])
        state = _plus(state * _two_to(last), key.T, key_low.T, high, low)
        key_at += (heads // SHARE) * (2 * TILE)
        inverse_at += heads * (2 * SQUARE)
        written_at += heads * (2 * CHUNK * VALUES)
        state_at += heads * (2 * KEYS * VALUES)
        log_at += heads * CHUNK
        value_at += CHUNK * HEADS * WIDTH
        beta_at += CHUNK * HEADS


@triton.jit(do_not_specialize=["heads"])
def end_states(
    beta, grad, query_start, queries, keys, logs, inverses, slopes, solved, of_ends, of_states, heads,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr, CORRECTS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As `begin_states`, from the last chunk to the first: gradients of the states that chunks end with, and, with the
    delta rule, R of them and of `slopes`, to `solved`. of_states [S, HEADS, KEY, WIDTH]: gradients of the states after
    the last chunk, in whose place those of the states before the first are left."""
    SHARE: tl.constexpr = HEADS // GROUPS
    TILE: tl.constexpr = CHUNK * KEYS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.load(query_start + sequence)
    count = (tl.load(query_start + sequence + 1) - begin).to(tl.int32)
    chunks = tl.cdiv(count, CHUNK)
    n, i, j = tl.arange(0, CHUNK), tl.arange(0, KEYS), block * COLUMNS + tl.arange(0, COLUMNS)
    slot, start = begin // CHUNK + sequence + chunks - 1, begin + (chunks - 1) * CHUNK
    place = slot * heads + head
    key_place = (slot * (heads // SHARE) + head // SHARE) * (2 * TILE)
    key_at = keys + key_place + n[:, None] * KEYS + i[None, :]
    query_at = queries + key_place + n[:, None] * KEYS + i[None, :]
    inverse_at = inverses + place * (2 * SQUARE) + n[:, None] * CHUNK + n[None, :]
    slope_at = slopes + place * (CHUNK * VALUES) + n[:, None] * VALUES + j[None, :]
    solved_at = solved + place * (2 * CHUNK * VALUES) + n[:, None] * VALUES + j[None, :]
    end_at = of_ends + place * (2 * KEYS * VALUES) + i[:, None] * VALUES + j[None, :]
    log_at = logs + place * CHUNK
    grad_at = grad + ((start + n) * HEADS + head)[:, None] * WIDTH + j[None, :]
    beta_at = beta + (start + n) * HEADS + head
    of_state = tl.zeros((KEYS, COLUMNS), tl.float32)
    of_states_at = of_states + ((sequence * HEADS + head) * KEY + i[:, None]) * WIDTH + j[None, :]
    inside = (i < KEY)[:, None] & (j < WIDTH)[None, :]
    if HAS_SLOPES:
        of_state = tl.load(of_states_at, inside, 0.0)
    for turn in tl.range(0, chunks, num_stages=STAGES):
        there = n < count - (chunks - 1 - turn) * CHUNK
        log, last = tl.load(log_at + n), tl.load(log_at + CHUNK - 1)
        since = _two_to(log)[:, None]
        high, low = _split(of_state)
        tl.store(end_at, high)
        tl.store(end_at + KEYS * VALUES, low)
        slope, slope_low = _split(tl.load(grad_at, there[:, None] & (j < WIDTH)[None, :], 0.0) * since)
        query, query_low = tl.load(query_at), tl.load(query_at + TILE)
        of_state = _plus(of_state * _two_to(last), query.T, query_low.T, slope, slope_low)
        if CORRECTS:
            key, key_low = tl.load(key_at), tl.load(key_at + TILE)
            read = _plus(tl.zeros((CHUNK, COLUMNS), tl.float32), key, key_low, high, low)
            high, low = _split(tl.load(slope_at) + read * _two_to(last - log)[:, None])
            inverse, inverse_low = tl.load(inverse_at), tl.load(inverse_at + SQUARE)
            of_new = _plus(tl.zeros((CHUNK, COLUMNS), tl.float32), inverse.T, inverse_low.T, high, low)
            _put(solved_at, of_new, CHUNK * VALUES)
            high, low = _split(of_new * (-tl.load(beta_at, there, 0.0)[:, None] * since))
            of_state = _plus(of_state, key.T, key_low.T, high, low)
        key_at -= (heads // SHARE) * (2 * TILE)
        query_at -= (heads // SHARE) * (2 * TILE)
        inverse_at -= heads * (2 * SQUARE)
        slope_at -= heads * (CHUNK * VALUES)
        solved_at -= heads * (2 * CHUNK * VALUES)
        end_at -= heads * (2 * KEYS * VALUES)
        log_at -= heads * CHUNK
        grad_at -= CHUNK * HEADS * WIDTH
        beta_at -= CHUNK * HEADS
    if HAS_SLOPES:
        tl.store(of_states_at, of_state, inside)
