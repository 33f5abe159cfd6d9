"""`rlloop.sync.adaptive`, compiled. The coder's state is an array: low, high, the bytes read ahead, offset.

Constants are compiled in, and numba caches kernels by this file: when one in `adaptive` changes, touch this file too.
"""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.jit import kernel
from rlloop.sync.adaptive import BITS, CONTEXTS, FIRST, LARGER, MOST, NEIGHBOURS, ONE, RATES, SURE, UNARY
from rlloop.sync.steps import Ordering
from rlloop.sync.steps_fast import _order, _pattern

_MASK = ONE - 1
_TOP = 0xFF << 24
_RATES = np.array(RATES)


@kernel
def _code(answer, chance, content, decoding, state):
    low, high = state[0], state[1]
    middle = low + ((high - low) * min(max(chance >> 16, 1), 65535) >> 16)
    if decoding:
        answer = np.int64(state[2] <= middle)
    if answer:
        high = middle
    else:
        low = middle + 1
    while (low ^ high) & _TOP == 0:
        if decoding:
            _read(content, state)
        else:
            if state[3] < len(content):
                content[state[3]] = low >> 24
            state[3] += 1
        low, high = low << 8 & _MASK, high << 8 & _MASK | 255
    state[0], state[1] = low, high
    return answer


@kernel
def _read(content, state):
    following = np.int64(content[state[3]]) if state[3] < len(content) else 0
    state[2] = state[2] << 8 & _MASK | following
    state[3] += 1


@kernel
def _ask(answer, which, context, chances, seen, content, decoding, state):
    chance = chances[which, context]
    if chance < 0:
        chance = _guess(which, chances)
    answer = _code(answer, chance, content, decoding, state)
    chances[which, context] = chance + (((ONE if answer else 0) - chance) * _RATES[seen[which, context]] >> 30)
    seen[which, context] = min(seen[which, context] + 1, MOST)
    return answer


@kernel
def _guess(which, chances):
    for away in range(1, NEIGHBOURS + 1):
        if which + away < 256 and chances[which + away, 0] >= 0:
            return min(ONE - ONE // 10, chances[which + away, 0] << away)
        if which >= away and chances[which - away, 0] >= 0:
            return chances[which - away, 0] >> away
    return FIRST


@kernel
def _walk(old, new, out, shift, sign, floating, content, decoding, state):
    """Encode `new` into `content`, or decode that into `out`. False if it is full, or `out` leaves the dtype."""
    chances, seen = np.full((256, CONTEXTS), ONE // 2), np.zeros((256, CONTEXTS), np.int64)
    chances[:, 0], chances[:, 1], seen[:, 0] = -1, LARGER, SURE
    for i in range(len(old)):
        which = (np.int64(old[i]) & (sign - 1)) >> shift
        before, step = _order(np.int64(old[i]), sign, floating), 0
        if not decoding:
            step = _order(np.int64(new[i]), sign, floating) - before
        if not _ask(np.int64(step != 0), which, 0, chances, seen, content, decoding, state):
            if decoding:
                out[i] = old[i]
            continue
        negative = _code(np.int64(step < 0), ONE // 2, content, decoding, state)
        wanted, size = abs(step), 1
        while size <= UNARY and _ask(np.int64(wanted > size), which, size, chances, seen, content, decoding, state):
            size += 1
        if size > UNARY:
            wanted, bits = wanted - UNARY, 1
            while bits < BITS and _ask(
                np.int64(wanted >> bits > 0), which, UNARY + bits, chances, seen, content, decoding, state
            ):
                bits += 1
            size = 1
            for bit in range(bits - 2, -1, -1):
                size = size << 1 | _code(wanted >> bit & 1, ONE // 2, content, decoding, state)
            size += UNARY
        if decoding:
            value = before - size if negative else before + size
            if value < -sign or value >= sign:
                return False
            out[i] = _pattern(value, sign, floating)
        elif state[3] >= len(content):
            return False
    return True


def encode(old: np.ndarray, new: np.ndarray, ordering: Ordering, limit: int) -> bytes | None:
    """As `adaptive.encode`."""
    content, state = np.empty(limit, np.uint8), np.array([0, _MASK, 0, 0])
    if not _walk(old, new, new[:0].copy(), *_how(ordering), content, False, state) or state[3] >= limit:
        return None
    encoded = content[: state[3]].tobytes() + _tail(state)
    return encoded if len(encoded) < limit else None


def decode(old: np.ndarray, content: bytes, ordering: Ordering) -> np.ndarray | None:
    """As `adaptive.decode`."""
    ahead, new = int.from_bytes(content[:4].ljust(4, b"\0")), np.empty_like(old)
    state = np.array([0, _MASK, ahead, 4])
    if not _walk(old, old, new, *_how(ordering), np.frombuffer(bytearray(content), np.uint8), True, state):
        return None
    written = int(state[3]) - 4
    return new if content[written:] == _tail(state) and written <= len(content) else None


def _tail(state: np.ndarray) -> bytes:
    """The fewest bytes that lie in the last interval when followed by zeros."""
    low, high, tail, shift = int(state[0]), int(state[1]), 0, 32
    while tail < low or tail > high:
        shift -= 8
        tail = (low + (1 << shift) - 1) >> shift << shift
    return tail.to_bytes(4)[: (32 - shift) // 8]


def _how(ordering: Ordering) -> tuple[int, int, bool]:
    return ordering.shift, 1 << (ordering.bits - 1), ordering.floating
