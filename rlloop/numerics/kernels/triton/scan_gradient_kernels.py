"""Kernels of `scan_backward`, in whose module the formulas are.

A chunk's tiles have a place of their own, `CHUNK` rows whatever its tokens: rows that are not there neither decay, read
nor write. What is multiplied stands there in parts, two tiles of bfloat16 that add up to 16 bits of float32, as a tensor
core fetches them, turned or not; a product is three of parts, with float32 sums.

Decays are used as sums of their logarithms, float64 so that differences of long sums are exact enough: what fades
between two tokens is one subtraction and one exponential. A decay of 0 has a logarithm so low that all fades to 0 again,
and the gradient of a decay is made of products without it, never by dividing by it."""

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
def _exact(x, y):
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr):
    """(1 + lower)^-1 [C, C] of a strictly lower triangle: blocks of 16 by substitution, then pairs of blocks."""
    PARTS: tl.constexpr = CHUNK // 16
    part, n, i = tl.arange(0, PARTS), tl.arange(0, CHUNK), tl.arange(0, 16)
    row, column = n[:, None], n[None, :]
    own = part[:, None, None, None] == part[None, None, :, None]
    blocks = tl.sum(tl.where(own, lower.reshape(PARTS, 16, PARTS, 16), 0.0), 2)  # of the diagonal, [PARTS, 16, 16]
    at, across = i[None, :, None], i[None, None, :]
    inverse = tl.where(at == across, 1.0, tl.zeros((PARTS, 16, 16), tl.float32))
    for t in range(1, 16):
        weights = tl.sum(tl.where(at == t, blocks, 0.0), 1)
        product = tl.sum(weights[:, :, None] * inverse, 1)
        inverse = tl.where(at == t, inverse - product[:, None, :], inverse)
    whole = tl.where(own, inverse[:, :, None, :], 0.0).reshape(CHUNK, CHUNK)
    for doubling in tl.static_range(2):
        near = (row // (32 << doubling) == column // (32 << doubling)) & (
            row // (16 << doubling) > column // (16 << doubling)
        )
        whole -= _exact(whole, _exact(tl.where(near, lower, 0.0), whole))
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
    v, beta, grad, query_start, keys, pairs, logs, inverses, kept, own, of_written, sequences, heads,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a chunk and head, with the delta rule: T, W, T (beta v), and P^T g, what readers say of written values."""
    SHARE: tl.constexpr = HEADS // GROUPS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    slot, head = tl.program_id(1), tl.program_id(0)
    first, count = _place(slot, query_start, sequences, CHUNK)
    if count > 0:
        place = slot.to(tl.int64) * heads + head
        pair = slot.to(tl.int64) * (heads // SHARE) + head // SHARE
        n, i, j = tl.arange(0, CHUNK), tl.arange(0, PIECE), tl.arange(0, COLUMNS)
        row, column, there = n[:, None], n[None, :], n < count
        square = row * CHUNK + column
        log = tl.load(logs + place * CHUNK + n)
        betas = tl.load(beta + (first + n) * HEADS + head, there, 0.0)
        fades = _fades(log[:, None] - log[None, :], row >= column)
        alike = tl.load(pairs + pair * (2 * SQUARE) + SQUARE + square)
        inverse = _inverse(tl.where(row > column, alike * fades * betas[:, None], 0.0), CHUNK)
        _put(inverses + place * (2 * SQUARE) + square, inverse, SQUARE)
        faded, faded_low = _split((tl.load(pairs + pair * (2 * SQUARE) + square) * fades).T)
        inverse *= betas[None, :]
        solver, solver_low = _split(inverse)
        value_at = (first * HEADS + head) * WIDTH + row * (HEADS * WIDTH) + j[None, :]
        for piece in range(0, VALUES, COLUMNS):
            mask = there[:, None] & (piece + j < WIDTH)[None, :]
            at = place * (CHUNK * VALUES) + row * VALUES + piece + j[None, :]
            nothing = tl.zeros((CHUNK, COLUMNS), tl.float32)
            value, value_low = _split(tl.load(v + value_at + piece, mask, 0.0))
            tl.store(own + at, _plus(nothing, solver, solver_low, value, value_low))
            slope, slope_low = _split(tl.load(grad + value_at + piece, mask, 0.0))
            tl.store(of_written + at, _plus(nothing, faded, faded_low, slope, slope_low))
        solver, solver_low = _split(inverse * _two_to(log)[None, :])
        for piece in range(0, KEYS, PIECE):
            at = row * KEYS + piece + i[None, :]
            key = tl.load(keys + pair * (2 * CHUNK * KEYS) + at)
            key_low = tl.load(keys + pair * (2 * CHUNK * KEYS) + CHUNK * KEYS + at)
            product = _plus(tl.zeros((CHUNK, PIECE), tl.float32), solver, solver_low, key, key_low)
            _put(kept + place * (2 * CHUNK * KEYS) + at, product, CHUNK * KEYS)


@triton.jit(do_not_specialize=["heads"])
def begin_states(
    v, beta, query_start, keys, logs, kept, own, written, states, heads, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr,
    CORRECTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has some columns of a head's state, and a sequence's chunks in turn: it leaves the states that they
    begin with, and, with the delta rule, what they write."""
    SHARE: tl.constexpr = HEADS // GROUPS
    TILE: tl.constexpr = CHUNK * KEYS
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.load(query_start + sequence)
    count = (tl.load(query_start + sequence + 1) - begin).to(tl.int32)
    n, i, j = tl.arange(0, CHUNK), tl.arange(0, KEYS), block * COLUMNS + tl.arange(0, COLUMNS)
    slot = begin // CHUNK + sequence
    place = slot * heads + head
    key_at = keys + (slot * (heads // SHARE) + head // SHARE) * (2 * TILE) + n[:, None] * KEYS + i[None, :]
    kept_at = kept + place * (2 * TILE) + n[:, None] * KEYS + i[None, :]
    own_at = own + place * (CHUNK * VALUES) + n[:, None] * VALUES + j[None, :]
    written_at = written + place * (2 * CHUNK * VALUES) + n[:, None] * VALUES + j[None, :]
    state_at = states + place * (2 * KEYS * VALUES) + i[:, None] * VALUES + j[None, :]
    log_at = logs + place * CHUNK
    value_at = v + ((begin + n) * HEADS + head)[:, None] * WIDTH + j[None, :]
    beta_at = beta + (begin + n) * HEADS + head
    state = tl.zeros((KEYS, COLUMNS), tl.float32)
    for chunk in tl.range(0, count, CHUNK, num_stages=STAGES):
        log, last = tl.load(log_at + n), tl.load(log_at + CHUNK - 1)
        high, low = _split(state)
        tl.store(state_at, high)
        tl.store(state_at + KEYS * VALUES, low)
        if CORRECTS:
            reader, reader_low = tl.load(kept_at), tl.load(kept_at + TILE)
            read = _plus(tl.zeros((CHUNK, COLUMNS), tl.float32), reader, reader_low, high, low)
            new = tl.load(own_at) - read
            _put(written_at, new, CHUNK * VALUES)
        else:
            there = chunk + n < count
            new = tl.load(value_at, there[:, None] & (j < WIDTH)[None, :], 0.0)
            new *= tl.load(beta_at, there, 0.0)[:, None]
        high, low = _split(new * _two_to(last - log)[:, None])
        key, key_low = tl.load(key_at), tl.load(key_at + TILE)
        state = _plus(state * _two_to(last), key.T, key_low.T, high, low)
        key_at += (heads // SHARE) * (2 * TILE)
        kept_at += heads * (2 * TILE)
        own_at += heads * (CHUNK * VALUES)
        written_at += heads * (2 * CHUNK * VALUES)
        state_at += heads * (2 * KEYS * VALUES)
        log_at += heads * CHUNK
        value_at += CHUNK * HEADS * WIDTH
        beta_at += CHUNK * HEADS


@triton.jit(do_not_specialize=["heads"])
def end_states(
    grad, query_start, queries, keys, logs, kept, of_written, slopes, of_ends, heads, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    COLUMNS: tl.constexpr, CORRECTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `begin_states`, from the last chunk to the first: gradients of the states that chunks end with, and, with the
    delta rule, of what they write (`of_written`, as far as the chunk reads it, to `slopes`)."""
    SHARE: tl.constexpr = HEADS // GROUPS
    TILE: tl.constexpr = CHUNK * KEYS
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
    kept_at = kept + place * (2 * TILE) + n[:, None] * KEYS + i[None, :]
    of_written_at = of_written + place * (CHUNK * VALUES) + n[:, None] * VALUES + j[None, :]
    slope_at = slopes + place * (2 * CHUNK * VALUES) + n[:, None] * VALUES + j[None, :]
    end_at = of_ends + place * (2 * KEYS * VALUES) + i[:, None] * VALUES + j[None, :]
    log_at = logs + place * CHUNK
    grad_at = grad + ((start + n) * HEADS + head)[:, None] * WIDTH + j[None, :]
    of_state = tl.zeros((KEYS, COLUMNS), tl.float32)
    for turn in tl.range(0, chunks, num_stages=STAGES):
        there = n < count - (chunks - 1 - turn) * CHUNK
        log, last = tl.load(log_at + n), tl.load(log_at + CHUNK - 1)
        high, low = _split(of_state)
        tl.store(end_at, high)
        tl.store(end_at + KEYS * VALUES, low)
        slope = tl.load(grad_at, there[:, None] & (j < WIDTH)[None, :], 0.0)
        slope, slope_low = _split(slope * _two_to(log)[:, None])
        query, query_low = tl.load(query_at), tl.load(query_at + TILE)
        of_state = _plus(of_state * _two_to(last), query.T, query_low.T, slope, slope_low)
        if CORRECTS:
            key, key_low = tl.load(key_at), tl.load(key_at + TILE)
            read = _plus(tl.zeros((CHUNK, COLUMNS), tl.float32), key, key_low, high, low)
            of_new = tl.load(of_written_at) + read * _two_to(last - log)[:, None]
            _put(slope_at, of_new, CHUNK * VALUES)
            high, low = _split(-of_new)
            reader, reader_low = tl.load(kept_at), tl.load(kept_at + TILE)
            of_state = _plus(of_state, reader.T, reader_low.T, high, low)
        key_at -= (heads // SHARE) * (2 * TILE)
        query_at -= (heads // SHARE) * (2 * TILE)
        kept_at -= heads * (2 * TILE)
        of_written_at -= heads * (CHUNK * VALUES)
        slope_at -= heads * (2 * CHUNK * VALUES)
        end_at -= heads * (2 * KEYS * VALUES)
        log_at -= heads * CHUNK
        grad_at -= CHUNK * HEADS * WIDTH
