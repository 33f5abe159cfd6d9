"""The steps coder's arithmetic, compiled: one pass over the elements, the rest over the changed ones only."""

from __future__ import annotations

import numpy as np

from rlloop.numerics.cpu.jit import kernel
from rlloop.sync.steps import LIMIT, WIDE, Changes, Ordering

_NEVER = np.int64(1) << 40  # a gap that no chunk has


@kernel
def _order(pattern, sign, floating):
    if pattern < sign:
        return pattern
    return sign - 1 - pattern if floating else pattern - 2 * sign


@kernel
def _scan(old, new, shift, sign, floating, classes, gaps, steps, counts, spans):
    """Every change in the order of its place: class, gap within the class, step."""
    since = np.zeros(512, np.uint32)  # two of each class, in turn: an increment need not wait for the one before
    found = 0
    mask = np.uint32(sign - 1)
    for i in range(len(old)):
        before = np.uint32(old[i])
        which = (before & mask) >> shift
        if old[i] == new[i]:
            since[which | np.uint32((i & 1) << 8)] += np.uint32(1)
        else:
            step = _order(np.int64(new[i]), sign, floating) - _order(np.int64(before), sign, floating)
            gap = since[which] + since[which | np.uint32(256)]
            classes[found] = which
            gaps[found] = gap
            steps[found] = 2 * step - 2 if step > 0 else -2 * step - 1
            counts[which] += 1
            spans[which] += np.int64(gap) + 1
            since[which] = 0
            since[which | np.uint32(256)] = 0
            found += 1


@kernel
def _emit(classes, gaps, steps, counts, spans, low_bits, symbols, remainders, far, farther, large, larger):
    """Sorted by class; lengths of far, farther, large, larger and the remainders' bits."""
    n = len(classes)
    place = np.zeros(257, np.int64)
    for c in range(256):
        place[c + 1] = place[c] + counts[c]
        if counts[c]:
            mean = spans[c] // counts[c]
            k = 0
            while mean >= 4:
                mean >>= 1
                k += 1
            low_bits[c] = k
    gap, step, which = np.empty(n, np.uint32), np.empty(n, np.uint32), np.empty(n, np.uint8)
    for i in range(n):
        c = classes[i]
        gap[place[c]], step[place[c]], which[place[c]] = gaps[i], steps[i], c
        place[c] += 1
    lengths = np.zeros(5, np.int64)
    pending, held, byte = np.uint64(0), 0, 0
    for i in range(n):
        k = low_bits[which[i]]
        quotient, zigzag = np.int64(gap[i] >> np.uint32(k)), np.int64(step[i])
        symbols[i] = min(quotient, LIMIT) * 16 + min(zigzag, LIMIT)
        if quotient >= LIMIT:
            quotient -= LIMIT
            far[lengths[0]] = min(quotient, WIDE)
            lengths[0] += 1
            if quotient >= WIDE:
                farther[lengths[1]] = quotient - WIDE
                lengths[1] += 1
        if zigzag >= LIMIT:
            zigzag -= LIMIT
            large[lengths[2]] = min(zigzag, WIDE)
            lengths[2] += 1
            if zigzag >= WIDE:
                larger[lengths[3]] = zigzag - WIDE
                lengths[3] += 1
        pending |= np.uint64(gap[i] & np.uint32((1 << k) - 1)) << np.uint64(held)
        held += k
        while held >= 8:
            remainders[byte] = pending & np.uint64(255)
            pending >>= np.uint64(8)
            held -= 8
            byte += 1
    if held:
        remainders[byte] = pending & np.uint64(255)
        byte += 1
    lengths[4] = byte
    return lengths


@kernel
def _expand(counts, low_bits, symbols, remainders, far, farther, large, larger, gaps, steps):
    """Gaps and steps in the order of the symbols; False where an overflow is missing or left over."""
    a, b, c, d = 0, 0, 0, 0
    pending, held, byte, i = np.uint64(0), 0, 0, 0
    for which in range(len(counts)):
        k = low_bits[which]
        for _ in range(counts[which]):
            quotient, zigzag = np.int64(symbols[i] >> 4), np.int64(symbols[i] & 15)
            if quotient == LIMIT:
                if a == len(far):
                    return False
                quotient += far[a]
                if far[a] == WIDE:
                    if b == len(farther):
                        return False
                    quotient += farther[b]
                    b += 1
                a += 1
            if zigzag == LIMIT:
                if c == len(large):
                    return False
                zigzag += large[c]
                if large[c] == WIDE:
                    if d == len(larger):
                        return False
                    zigzag += larger[d]
                    d += 1
                c += 1
            while held < k:
                pending |= np.uint64(remainders[byte]) << np.uint64(held)
                held += 8
                byte += 1
            low = np.int64(pending & np.uint64((1 << k) - 1))
            pending >>= np.uint64(k)
            held -= k
            gaps[i] = min((quotient << k) + low, _NEVER)
            steps[i] = -(zigzag >> 1) - 1 if zigzag & 1 else (zigzag >> 1) + 1
            i += 1
    return a == len(far) and b == len(farther) and c == len(large) and d == len(larger)


@kernel
def _apply(old, out, shift, sign, floating, counts, gaps, steps):
    """`out` begins as a copy of `old`. Returns False where a change reaches outside."""
    mask = np.uint32(sign - 1)
    left, cursor, end = np.full(256, _NEVER), np.zeros(256, np.int64), np.zeros(256, np.int64)
    first = 0
    for which in range(len(counts)):
        cursor[which] = first
        first += counts[which]
        end[which] = first
        if counts[which]:
            left[which] = gaps[cursor[which]]
    applied = 0
    for i in range(len(old)):
        which = np.uint8((np.uint32(old[i]) & mask) >> shift)
        if left[which]:
            left[which] -= 1
            continue
        at = cursor[which]
        value = _order(np.int64(old[i]), sign, floating) + steps[at]
        if value < -sign or value >= sign:
            return False
        if value < 0:
            value = sign - 1 - value if floating else value + 2 * sign
        out[i] = value
        applied += 1
        cursor[which] = at + 1
        left[which] = gaps[at + 1] if at + 1 < end[which] else _NEVER
    return applied == len(steps)


def find_changes(old: np.ndarray, new: np.ndarray, ordering: Ordering) -> Changes:
    """As `steps.find_changes`."""
    n = int(np.count_nonzero(old != new))
    classes, gaps, steps = np.empty(n, np.uint8), np.empty(n, np.uint32), np.empty(n, np.uint32)
    counts, spans, low_bits = np.zeros(256, np.int64), np.zeros(256, np.int64), np.zeros(256, np.uint8)
    sign = 1 << (ordering.bits - 1)
    _scan(old, new, np.uint32(ordering.shift), sign, ordering.floating, classes, gaps, steps, counts, spans)
    symbols, remainders = np.empty(n, np.uint8), np.empty(3 * n + 8, np.uint8)  # a chunk's gaps have under 24 bits
    far, farther = np.empty(n, np.uint8), np.empty(n, "<u4")
    large, larger = np.empty(n, np.uint8), np.empty(n, "<u4")
    lengths = _emit(
        classes, gaps, steps, counts, spans, low_bits, symbols, remainders, far, farther, large, larger
    ).tolist()  # fmt: skip
    return Changes(
        counts[: ordering.classes],
        low_bits[: ordering.classes],
        symbols,
        remainders[: lengths[4]],
        far[: lengths[0]],
        farther[: lengths[1]],
        large[: lengths[2]],
        larger[: lengths[3]],
    )


def apply_changes(old: np.ndarray, changes: Changes, ordering: Ordering) -> np.ndarray | None:
    """As `steps.apply_changes`."""
    n = len(changes.symbols)
    gaps, steps = np.empty(n, np.int64), np.empty(n, np.int64)
    whole = _expand(
        changes.counts, changes.low_bits, changes.symbols, changes.remainders,
        changes.far, changes.farther, changes.large, changes.larger, gaps, steps,
    )  # fmt: skip
    if not whole:
        return None
    out, sign = old.copy(), 1 << (ordering.bits - 1)
    fits = _apply(old, out, np.uint32(ordering.shift), sign, ordering.floating, changes.counts, gaps, steps)
    return out if fits else None
