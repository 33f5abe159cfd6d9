"""The last kernels of `scan_backward`: from states and their gradients, those of all that the scan was given."""

from __future__ import annotations

import triton
import triton.language as tl

from rlloop.numerics.kernels.triton.scan_backward_states import (
    _fades,
    _place,
    _plus,
    _product,
    _put,
    _split,
    _two_to,
    _whole,
)


@triton.jit(do_not_specialize=["sequences", "heads"])
def of_values(
    v, beta, grad, query_start, keys, pairs, logs, written, solved, of_ends, of_pairs, by_v, by_decay, by_beta,
    sequences, heads, GROUPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr, CORRECTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of a chunk and head: gradients of values, of pairs of tokens (to `of_pairs`: of q k^T, then of k k^T), and what
    pairs have of those of decays and beta."""
    SHARE: tl.constexpr = HEADS // GROUPS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    slot, head = tl.program_id(1), tl.program_id(0)
    first, count = _place(slot, query_start, sequences, CHUNK)
    if count > 0:
        place = slot.to(tl.int64) * heads + head
        pair = slot.to(tl.int64) * (heads // SHARE) + head // SHARE
        n, i, j = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.arange(0, COLUMNS)
        row, column, there = n[:, None], n[None, :], n < count
        square, gate_at = row * CHUNK + column, (first + n) * HEADS + head
        log, last = tl.load(logs + place * CHUNK + n), tl.load(logs + place * CHUNK + CHUNK - 1)
        betas = tl.load(beta + gate_at, there, 0.0)
        if not CORRECTS:
            fades = _fades(log[:, None] - log[None, :], row >= column)
            faded, faded_low = _split((tl.load(pairs + pair * (2 * SQUARE) + square) * fades).T)
            key_at = keys + pair * (2 * CHUNK * KEYS) + row * KEYS + i[None, :]
            key, key_low = tl.load(key_at), tl.load(key_at + CHUNK * KEYS)
        of_weights = tl.zeros((CHUNK, CHUNK), tl.float32)
        of_lower = of_weights
        of_betas = tl.zeros((CHUNK,), tl.float32)
        value_at = (first * HEADS + head) * WIDTH + row * (HEADS * WIDTH) + j[None, :]
        for piece in tl.range(0, VALUES, COLUMNS, num_stages=STAGES):
            mask = there[:, None] & (piece + j < WIDTH)[None, :]
            at = place * (2 * CHUNK * VALUES) + row * VALUES + piece + j[None, :]
            slope, slope_low = _split(tl.load(grad + value_at + piece, mask, 0.0))
            value = tl.load(v + value_at + piece, mask, 0.0)
            if CORRECTS:
                new, new_low = tl.load(written + at), tl.load(written + at + CHUNK * VALUES)
                given, given_low = tl.load(solved + at), tl.load(solved + at + CHUNK * VALUES)
                of_lower = _plus(of_lower, given, given_low, new.T, new_low.T)
                of_new = _whole(given, given_low)
            else:
                new, new_low = _split(value * betas[:, None])
                end_at = of_ends + place * (2 * KEYS * VALUES) + i[:, None] * VALUES + piece + j[None, :]
                nothing = tl.zeros((CHUNK, COLUMNS), tl.float32)
                of_new = _plus(nothing, key, key_low, tl.load(end_at), tl.load(end_at + KEYS * VALUES))
                of_new = _plus(of_new * _two_to(last - log)[:, None], faded, faded_low, slope, slope_low)
            of_weights = _plus(of_weights, slope, slope_low, new.T, new_low.T)
            tl.store(by_v + value_at + piece, of_new * betas[:, None], mask)
            of_betas += tl.sum(of_new * value, 1)
        fades = _fades(log[:, None] - log[None, :], row >= column)
        of_fades = of_weights * tl.load(pairs + pair * (2 * SQUARE) + square)
        _put(of_pairs + place * (4 * SQUARE) + square, of_weights * fades, SQUARE)
        if CORRECTS:
            alike = tl.load(pairs + pair * (2 * SQUARE) + SQUARE + square)
            of_lower = tl.where(row > column, -of_lower, 0.0)
            of_alike = of_lower * fades
            of_betas += tl.sum(of_alike * alike, 1)
            of_alike *= betas[:, None]
            _put(of_pairs + place * (4 * SQUARE) + 2 * SQUARE + square, of_alike, SQUARE)
            of_fades += of_lower * alike * betas[:, None]
        tl.store(by_beta + gate_at, of_betas, there)
        # Of the decay of token m + 1, which fades what those up to m wrote for those after m.
        sums = _product(tl.where(row > column, of_fades, 0.0), fades.T)
        following = tl.load(logs + place * CHUNK + n + 1, n + 1 < CHUNK, 0.0)
        sums *= _fades(log[:, None] - following[None, :], row > column)
        tl.store(by_decay + gate_at + HEADS, tl.sum(sums, 0), n + 1 < count)
        tl.store(by_decay + gate_at, 0.0 * of_betas, n == 0)


@triton.jit(do_not_specialize=["sequences", "heads", "slots"])
def of_queries(
    grad, query_start, queries, keys, logs, states, of_pairs, by_q, sums, sequences, heads, slots,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of a chunk, a group and some numbers of its queries: gradients of queries, heads in turn. What those numbers have
    of the gradients of decays goes to `sums` [KEYS / PIECE, slots, heads, 4, CHUNK]."""
    SHARE: tl.constexpr = HEADS // GROUPS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    part, group, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = _place(slot, query_start, sequences, CHUNK)
    if count > 0:
        n, i, j = tl.arange(0, CHUNK), part * PIECE + tl.arange(0, PIECE), tl.arange(0, COLUMNS)
        row, column, there = n[:, None], n[None, :], n < count
        key_at = (slot.to(tl.int64) * (heads // SHARE) + group) * (2 * CHUNK * KEYS) + row * KEYS + i[None, :]
        for_q = tl.zeros((CHUNK, PIECE), tl.float32)
        for member in range(SHARE):
            head = group * SHARE + member
            place = slot.to(tl.int64) * heads + head
            asked = tl.zeros((CHUNK, PIECE), tl.float32)
            for piece in tl.range(0, VALUES, COLUMNS, num_stages=STAGES):
                state_at = states + place * (2 * KEYS * VALUES) + i[:, None] * VALUES + piece + j[None, :]
                state, state_low = tl.load(state_at), tl.load(state_at + KEYS * VALUES)
                grad_at = (first * HEADS + head) * WIDTH + row * (HEADS * WIDTH) + piece + j[None, :]
                slope, slope_low = _split(tl.load(grad + grad_at, there[:, None] & (piece + j < WIDTH)[None, :], 0.0))
                asked = _plus(asked, slope, slope_low, state.T, state_low.T)
            query, query_low = tl.load(queries + key_at), tl.load(queries + key_at + CHUNK * KEYS)
            to = sums + ((part * slots + slot).to(tl.int64) * heads + head) * (4 * CHUNK) + n
            tl.store(to, tl.sum(_whole(query, query_low) * asked, 1))
            for_q += _two_to(tl.load(logs + place * CHUNK + n))[:, None] * asked
            pair_at = of_pairs + place * (4 * SQUARE) + row * CHUNK + column
            of_weights, of_weights_low = tl.load(pair_at), tl.load(pair_at + SQUARE)
            key, key_low = tl.load(keys + key_at), tl.load(keys + key_at + CHUNK * KEYS)
            for_q = _plus(for_q, of_weights, of_weights_low, key, key_low)
        to = (first * GROUPS + group) * KEY + row * (GROUPS * KEY) + i[None, :]
        tl.store(by_q + to, for_q, there[:, None] & (i < KEY)[None, :])


@triton.jit(do_not_specialize=["sequences", "heads", "slots"])
def of_keys(
    v, beta, query_start, queries, keys, logs, written, solved, states, of_ends, of_pairs, by_k, sums,
    sequences, heads, slots, GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr,
    CORRECTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `of_queries`, of keys: `sums` has what is left of the gradients of decays, and with the delta rule of beta."""
    SHARE: tl.constexpr = HEADS // GROUPS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    part, group, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = _place(slot, query_start, sequences, CHUNK)
    if count > 0:
        n, i, j = tl.arange(0, CHUNK), part * PIECE + tl.arange(0, PIECE), tl.arange(0, COLUMNS)
        row, column, there = n[:, None], n[None, :], n < count
        key_at = (slot.to(tl.int64) * (heads // SHARE) + group) * (2 * CHUNK * KEYS) + row * KEYS + i[None, :]
        for_k = tl.zeros((CHUNK, PIECE), tl.float32)
        for member in range(SHARE):
            head = group * SHARE + member
            place = slot.to(tl.int64) * heads + head
            betas = tl.load(beta + (first + n) * HEADS + head, there, 0.0)
            ended = tl.zeros((CHUNK, PIECE), tl.float32)
            read = ended
            both = tl.zeros((PIECE, COLUMNS), tl.float32)
            for piece in tl.range(0, VALUES, COLUMNS, num_stages=STAGES):
                at = place * (2 * CHUNK * VALUES) + row * VALUES + piece + j[None, :]
                state_at = place * (2 * KEYS * VALUES) + i[:, None] * VALUES + piece + j[None, :]
                state, state_low = tl.load(states + state_at), tl.load(states + state_at + KEYS * VALUES)
                end, end_low = tl.load(of_ends + state_at), tl.load(of_ends + state_at + KEYS * VALUES)
                both += _whole(state, state_low) * _whole(end, end_low)
                if CORRECTS:
                    new, new_low = tl.load(written + at), tl.load(written + at + CHUNK * VALUES)
                    given, given_low = tl.load(solved + at), tl.load(solved + at + CHUNK * VALUES)
                    read = _plus(read, given, given_low, state.T, state_low.T)
                else:
                    value_at = (first * HEADS + head) * WIDTH + row * (HEADS * WIDTH) + piece + j[None, :]
                    mask = there[:, None] & (piece + j < WIDTH)[None, :]
                    new, new_low = _split(tl.load(v + value_at, mask, 0.0) * betas[:, None])
                ended = _plus(ended, new, new_low, end.T, end_low.T)
            log, last = tl.load(logs + place * CHUNK + n), tl.load(logs + place * CHUNK + CHUNK - 1)
            wide = _whole(tl.load(keys + key_at), tl.load(keys + key_at + CHUNK * KEYS))
            to = sums + ((part * slots + slot).to(tl.int64) * heads + head) * (4 * CHUNK) + n
            tl.store(to + CHUNK, tl.sum(wide * ended, 1))
            tl.store(to + 3 * CHUNK, tl.where(n == 0, tl.sum(both), 0.0))
            for_k += _two_to(last - log)[:, None] * ended
            if CORRECTS:
                tl.store(to + 2 * CHUNK, tl.sum(wide * read, 1))
                for_k -= (_two_to(log) * betas)[:, None] * read
            pair_at = of_pairs + place * (4 * SQUARE) + row * CHUNK + column
            of_weights, of_weights_low = tl.load(pair_at), tl.load(pair_at + SQUARE)
            query, query_low = tl.load(queries + key_at), tl.load(queries + key_at + CHUNK * KEYS)
            for_k = _plus(for_k, of_weights.T, of_weights_low.T, query, query_low)
            if CORRECTS:
                # Read again: there are too few registers to keep them.
                key, key_low = tl.load(keys + key_at), tl.load(keys + key_at + CHUNK * KEYS)
                of_alike, of_alike_low = tl.load(pair_at + 2 * SQUARE), tl.load(pair_at + 3 * SQUARE)
                for_k = _plus(for_k, of_alike, of_alike_low, key, key_low)
                for_k = _plus(for_k, of_alike.T, of_alike_low.T, key, key_low)
        to = (first * GROUPS + group) * KEY + row * (GROUPS * KEY) + i[None, :]
        tl.store(by_k + to, for_k, there[:, None] & (i < KEY)[None, :])


@triton.jit(do_not_specialize=["sequences", "heads", "slots"])
def of_gates(
    beta, query_start, logs, sums, by_decay, by_beta, sequences, heads, slots, HEADS: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of a chunk's decays and beta what `of_queries` and `of_keys` left of them."""
    slot, head = tl.program_id(1), tl.program_id(0)
    first, count = _place(slot, query_start, sequences, CHUNK)
    if count > 0:
        n = tl.arange(0, CHUNK)
        row, column, there = n[:, None], n[None, :], n < count
        of_since = tl.zeros((CHUNK,), tl.float32)
        of_to_end = of_since
        read = of_since
        of_last = 0.0
        for part in range(PARTS):
            at = sums + ((part * slots + slot).to(tl.int64) * heads + head) * (4 * CHUNK) + n
            of_since += tl.load(at)
            of_to_end += tl.load(at + CHUNK)
            if CORRECTS:
                read += tl.load(at + 2 * CHUNK)
            of_last += tl.sum(tl.load(at + 3 * CHUNK))
        gate_at = (first + n) * HEADS + head
        logs += (slot.to(tl.int64) * heads + head) * CHUNK
        log, last = tl.load(logs + n), tl.load(logs + CHUNK - 1)
        before = tl.load(logs + n - 1, n > 0, 0.0)
        if CORRECTS:
            by = tl.load(by_beta + gate_at, there, 0.0)
            tl.store(by_beta + gate_at, by - _two_to(log) * read, there)
            of_since -= tl.load(beta + gate_at, there, 0.0) * read
        of_since += tl.where(n == CHUNK - 1, of_last, 0.0)
        # Token m's decay stands in the fade of all before it for each token from m on, and of each token before m.
        later = tl.sum(_fades(log[:, None] - log[None, :], row >= column) * of_since[:, None], 0)
        earlier = tl.sum(_fades(before[:, None] - log[None, :], row > column) * of_to_end[None, :], 1)
        by = tl.load(by_decay + gate_at, there, 0.0)
        by += _two_to(before) * later + _two_to(last - log) * earlier
        tl.store(by_decay + gate_at, by, there)
