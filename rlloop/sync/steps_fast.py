"""`rlloop.sync.steps`, compiled: one pass over all elements, everything else over the changed ones only."""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.jit import kernel
from rlloop.sync.steps import LIMIT, WIDE, Changes, Ordering

_NEVER = np.int64(1) << 40  # a gap larger than any chunk
_SHIFT = 20  # bits of the step below the gap, where one number holds both
_BIAS = np.int64(1) << 18  # added to that step; larger than any dtype's largest
_STEP = np.int64((1 << _SHIFT) - 1)
_DENSE = 8  # where more than one element in this many changes, the scan has no branches


@kernel
def _order(pattern, sign, floating):
    if pattern < sign:
        return pattern
    return sign - 1 - pattern if floating else pattern - 2 * sign


@kernel
def _zigzag(old, new, sign, floating):
    step = _order(np.int64(new), sign, floating) - _order(np.int64(old), sign, floating)
    return np.uint64(2 * step - 2 if step > 0 else -2 * step - 1)


@kernel
def _scan_sparse(old, new, old_words, new_words, shift, sign, floating, classes, changes):
    """Every change in the order of elements: its class; its gap within the class (upper 32 bits) and its step.

    A word of four unchanged elements is counted with no comparison of each, into four tables, so that no increment
    depends on the one before.
    """
    since = np.zeros(1024, np.uint32)
    shift_word, bits, low = np.uint64(shift), np.uint64(8 * old.itemsize), np.uint64((sign - 1) >> shift)
    count = 0
    for w in range(len(old_words)):
        if old_words[w] == new_words[w]:
            word = np.uint64(old_words[w]) >> shift_word
            for table in range(4):
                since[np.uint64(table << 8) | (word & low)] += np.uint32(1)
                word >>= bits
            continue
        for i in range(4 * w, 4 * w + 4):
            count = _scan_one(old[i], new[i], shift, sign, floating, since, classes, changes, count)
    for i in range(4 * len(old_words), len(old)):
        count = _scan_one(old[i], new[i], shift, sign, floating, since, classes, changes, count)


@kernel
def _scan_one(old, new, shift, sign, floating, since, classes, changes, count):
    which = (np.uint32(old) & np.uint32(sign - 1)) >> shift
    if old == new:
        since[which] += np.uint32(1)
        return count
    gap = np.uint32(0)
    for table in range(4):
        gap += since[np.uint32(table << 8) | which]
        since[np.uint32(table << 8) | which] = 0
    classes[count] = which
    changes[count] = np.uint64(gap) << np.uint64(32) | _zigzag(old, new, sign, floating)
    return count + 1


@kernel
def _scan_dense(old, new, shift, sign, floating, classes, changes):
    """The same without branches, for dense changes, which mispredict. The arrays have room for one change more."""
    since = np.zeros(256, np.uint64)
    count = 0
    mask = np.uint32(sign - 1)
    for i in range(len(old)):
        which = (np.uint32(old[i]) & mask) >> shift
        gap, same = since[which], np.uint64(old[i] == new[i])
        classes[count] = which
        changes[count] = gap << np.uint64(32) | _zigzag(old[i], new[i], sign, floating)
        count += 1 - np.int64(same)
        since[which] = (gap + np.uint64(1)) & (np.uint64(0) - same)


@kernel
def _emit(classes, changes, counts, low_bits, symbols, remainders, far, farther, large, larger):
    """Sort changes by class and write the fields of `Changes`. Returns the lengths of far, farther, large, larger and
    remainders."""
    n = len(classes)
    for i in range(n):
        counts[classes[i]] += 1
    offset = np.zeros(256, np.int64)
    for c in range(1, 256):
        offset[c] = offset[c - 1] + counts[c - 1]
    ordered = np.empty(n, np.uint64)
    for i in range(n):
        c = classes[i]
        ordered[offset[c]] = changes[i]
        offset[c] += 1
    a, b, c, d, byte = 0, 0, 0, 0, 0
    pending, held, i = np.uint64(0), 0, 0
    for which in range(256):
        if not counts[which]:
            continue
        end, span = i + counts[which], counts[which]
        for at in range(i, end):
            span += np.int64(ordered[at] >> np.uint64(32))
        mean, k = span // counts[which], 0
        while mean >= 4:
            mean >>= 1
            k += 1
        low_bits[which] = k
        for at in range(i, end):
            gap, zigzag = ordered[at] >> np.uint64(32), np.int64(ordered[at] & np.uint64(0xFFFFFFFF))
            quotient = np.int64(gap >> np.uint64(k))
            symbols[at] = min(quotient, LIMIT) * 16 + min(zigzag, LIMIT)
            far[a] = min(quotient - LIMIT, WIDE)  # written always, kept only if needed: a branch would mispredict
            a += np.int64(quotient >= LIMIT)
            if quotient >= LIMIT + WIDE:
                farther[b] = quotient - LIMIT - WIDE
                b += 1
            large[c] = min(zigzag - LIMIT, WIDE)
            c += np.int64(zigzag >= LIMIT)
            if zigzag >= LIMIT + WIDE:
                larger[d] = zigzag - LIMIT - WIDE
                d += 1
            pending |= (gap & np.uint64((1 << k) - 1)) << np.uint64(held)
            held += k
            while held >= 8:
                remainders[byte] = pending & np.uint64(255)
                pending >>= np.uint64(8)
                held -= 8
                byte += 1
        i = end
    if held:
        remainders[byte] = pending & np.uint64(255)
        byte += 1
    return a, b, c, d, byte


@kernel
def _expand(counts, low_bits, symbols, remainders, far, farther, large, larger, changes):
    """Each class's changes, gap and step in one number, followed by a sentinel whose gap is never reached.

    Returns False if an overflow is missing or left over.
    """
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
            step = -(zigzag >> 1) - 1 if zigzag & 1 else (zigzag >> 1) + 1
            changes[i + which] = min((quotient << k) + low, _NEVER) << _SHIFT | (min(max(step, -_BIAS), _BIAS) + _BIAS)
            i += 1
        changes[i + which] = _NEVER << _SHIFT
    return a == len(far) and b == len(farther) and c == len(large) and d == len(larger)


@kernel
def _apply(old, out, shift, sign, floating, counts, changes):
    """Apply changes to `out`, a copy of `old`. Returns their number; -1 if one leaves the dtype's range."""
    mask = np.uint32(sign - 1)
    left, cursor = _begin(counts, changes)
    applied = 0
    for i in range(len(old)):
        which = np.uint8((np.uint32(old[i]) & mask) >> shift)
        if left[which]:
            left[which] -= 1
            continue
        at = cursor[which]
        value = _order(np.int64(old[i]), sign, floating) + (changes[at] & _STEP) - _BIAS
        if value < -sign or value >= sign:
            return -1
        out[i] = _pattern(value, sign, floating)
        applied += 1
        cursor[which] = at + 1
        left[which] = changes[at + 1] >> _SHIFT
    return applied


@kernel
def _begin(counts, changes):
    """For each class, the elements until its next change, and that change's index."""
    left, cursor = np.full(256, _NEVER), np.zeros(256, np.int64)
    first = 0
    for which in range(len(counts)):
        cursor[which] = first
        left[which] = changes[first] >> _SHIFT
        first += counts[which] + 1
    return left, cursor


@kernel
def _pattern(value, sign, floating):
    if value >= 0:
        return value
    return sign - 1 - value if floating else value + 2 * sign


def find_changes(old: np.ndarray, new: np.ndarray, ordering: Ordering) -> Changes:
    """As `steps.find_changes`."""
    n = int(np.count_nonzero(old != new))
    classes, gaps_and_steps = np.empty(n + 1, np.uint8), np.empty(n + 1, np.uint64)
    counts, low_bits = np.zeros(256, np.int64), np.zeros(256, np.uint8)
    how = np.uint32(ordering.shift), 1 << (ordering.bits - 1), ordering.floating
    if n * _DENSE > len(old):
        _scan_dense(old, new, *how, classes, gaps_and_steps)
    else:
        _scan_sparse(old, new, _words(old), _words(new), *how, classes, gaps_and_steps)
    symbols, remainders = np.empty(n, np.uint8), np.empty(3 * n + 8, np.uint8)  # gaps within a chunk have < 24 bits
    far, farther = np.empty(n + 1, np.uint8), np.empty(n, "<u4")
    large, larger = np.empty(n + 1, np.uint8), np.empty(n, "<u4")
    lengths = _emit(classes[:n], gaps_and_steps, counts, low_bits, symbols, remainders, far, farther, large, larger)
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


def _words(patterns: np.ndarray) -> np.ndarray:
    """The patterns as words of four elements each, without the last few that fill none."""
    words = patterns[: len(patterns) // 4 * 4].view(f"<u{4 * patterns.itemsize}")
    return words if words.flags.aligned else words.copy()


def apply_changes(old: np.ndarray, changes: Changes, ordering: Ordering, out: np.ndarray) -> bool:
    """As `steps.apply_changes`."""
    n = len(changes.symbols)
    gaps_and_steps = np.empty(n + ordering.classes, np.int64)
    whole = _expand(
        changes.counts, changes.low_bits, changes.symbols, changes.remainders,
        changes.far, changes.farther, changes.large, changes.larger, gaps_and_steps,
    )  # fmt: skip
    if not whole:
        return False
    how = np.uint32(ordering.shift), 1 << (ordering.bits - 1), ordering.floating
    np.copyto(out, old)
    return _apply(old, out, *how, changes.counts, gaps_and_steps) == n
