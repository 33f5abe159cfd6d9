"""`rlloop.sync.steps`, compiled: one pass over all elements, everything else over the changed ones only."""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.blocks import BLOCK, classes, lowest, population, where_changed, where_equal
from rlloop.numerics.kernels.cpu.compiled.jit import inlined, kernel
from rlloop.sync.steps import LIMIT, WIDE, Changes, Ordering

_NEVER = np.int64(1) << 40  # a gap larger than any chunk
_SHIFT = 20  # bits of the step below the gap, where one number holds both
_BIAS = np.int64(1) << 18  # added to that step; larger than any dtype's largest
_STEP = np.int64((1 << _SHIFT) - 1)
_DENSE = 16  # where more than one element in this many changes, a block's changes take longer than its elements
_ALL = ~np.uint64(0)


@inlined
def _order(pattern, sign, floating):  # without branches here and below: a weight's sign and a step's are random
    negative = (sign - 1 - pattern) >> 63  # all bits or none; LLVM makes a branch of a comparison
    low = pattern & (sign - 1)
    return low ^ negative if floating else low + (negative & -sign)


@inlined
def _change(old, new, gap, sign, floating):
    step = _order(np.int64(new), sign, floating) - _order(np.int64(old), sign, floating)
    zigzag = np.uint64(((step << 1) ^ (step >> 63)) + 2 * (-step >> 63))
    return np.uint64(gap) << np.uint64(32) | zigzag


@kernel
def _frequent(patterns, shift, mask):
    """The classes of at least one element in 1,024, estimated from every 61st."""
    counts, found = np.zeros(256, np.int64), np.empty(256, np.uint8)
    for i in range(0, len(patterns), 61):
        counts[(np.uint32(patterns[i]) & mask) >> shift] += 1
    n, least = 0, max(1, len(patterns) // (61 * 1024))
    for which in range(256):
        found[n] = which
        n += np.int64(counts[which] >= least)
    return found[: min(n, 64)]


@kernel
def _count(old, new):
    """Number of elements that differ."""
    whole, count = len(old) // BLOCK * BLOCK, np.uint64(0)
    for at in range(0, whole, BLOCK):
        count += population(where_changed(old, new, at))
    for i in range(whole, len(old)):
        count += np.uint64(old[i] != new[i])
    return np.int64(count)


@kernel
def _scan(old, new, shift, sign, floating, found, gaps_and_steps):
    """Every change in the order of elements: its class; its gap within the class (upper 32 bits) and its step.

    A block's elements of a frequent class are counted at once, as the bits of one number; others one by one.
    """
    seen = np.zeros(256, np.uint32)  # elements of each class before the block
    since = np.zeros(256, np.uint32)  # those up to its last change
    mask, count = np.uint32(sign - 1), 0
    frequent = _frequent(old, shift, mask)
    for at in range(0, len(old) - BLOCK + 1, BLOCK):
        block, changed, rest = classes(old, at, mask, shift), where_changed(old, new, at), _ALL
        while changed:
            bit = lowest(changed)
            i = at + np.int64(bit)
            which = (np.uint32(old[i]) & mask) >> shift
            before = where_equal(block, np.uint8(which)) & ((np.uint64(1) << bit) - np.uint64(1))
            index = seen[which] + np.uint32(population(before))
            found[count] = which
            gaps_and_steps[count] = _change(old[i], new[i], index - since[which], sign, floating)
            since[which] = index + np.uint32(1)
            count += 1
            changed &= changed - np.uint64(1)
        for which in frequent:
            own = where_equal(block, which)
            rest &= ~own
            seen[which] += np.uint32(population(own))
        while rest:
            seen[(np.uint32(old[at + np.int64(lowest(rest))]) & mask) >> shift] += np.uint32(1)
            rest &= rest - np.uint64(1)
    for i in range(len(old) // BLOCK * BLOCK, len(old)):
        which = (np.uint32(old[i]) & mask) >> shift
        if old[i] != new[i]:
            found[count] = which
            gaps_and_steps[count] = _change(old[i], new[i], seen[which] - since[which], sign, floating)
            since[which] = seen[which] + np.uint32(1)
            count += 1
        seen[which] += np.uint32(1)


@kernel
def _emit(found, changes, counts, low_bits, symbols, remainders, far, farther, large, larger):
    """Sort changes by class and write the fields of `Changes`. Returns the lengths of far, farther, large, larger and
    remainders."""
    n = len(found)
    for i in range(n):
        counts[found[i]] += 1
    offset = np.zeros(256, np.int64)
    for c in range(1, 256):
        offset[c] = offset[c - 1] + counts[c - 1]
    ordered = np.empty(n, np.uint64)
    for i in range(n):
        c = found[i]
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
    mask, applied = np.uint32(sign - 1), 0
    due, cursor = _begin(counts, changes)
    seen = np.zeros(256, np.int64)
    frequent = _frequent(old, shift, mask)
    if len(changes) * _DENSE > len(old):
        frequent = frequent[:0]
    for at in range(0, len(old), BLOCK):
        rest = _ALL
        if len(old) - at < BLOCK:
            rest = (np.uint64(1) << np.uint64(len(old) - at)) - np.uint64(1)
        else:
            block, waiting = classes(old, at, mask, shift), np.uint64(0)
            for f in range(len(frequent)):
                which = frequent[f]
                own = where_equal(block, which)
                rest &= ~own
                seen[which] += np.int64(population(own))
                waiting |= np.uint64(due[which] < seen[which]) << np.uint64(f)
            while waiting:
                which = frequent[lowest(waiting)]
                own = where_equal(block, which)
                i = at + _select(own, due[which] - seen[which] + np.int64(population(own)))
                if not _apply_one(old, out, i, which, sign, floating, due, cursor, changes):
                    return -1
                applied += 1
                if due[which] >= seen[which]:
                    waiting &= waiting - np.uint64(1)
        while rest:
            i = at + np.int64(lowest(rest))
            rest &= rest - np.uint64(1)
            which = np.uint8((np.uint32(old[i]) & mask) >> shift)
            if due[which] == seen[which]:
                if not _apply_one(old, out, i, which, sign, floating, due, cursor, changes):
                    return -1
                applied += 1
            seen[which] += 1
    return applied


@inlined
def _select(bits, n):
    """Index of the bit that is set and has n others set below it."""
    at = 0
    for step in range(6):
        width = 32 >> step
        low = np.int64(population((bits >> np.uint64(at)) & np.uint64((1 << width) - 1)))
        above = (low - n - 1) >> 63  # all bits or none
        n -= low & above
        at += width & above
    return at


@inlined
def _apply_one(old, out, i, which, sign, floating, due, cursor, changes):
    """False if the change leaves the dtype's range."""
    at = cursor[which]
    value = _order(np.int64(old[i]), sign, floating) + (changes[at] & _STEP) - _BIAS
    if value < -sign or value >= sign:
        return False
    out[i] = _pattern(value, sign, floating)
    cursor[which] = at + 1
    due[which] += 1 + (changes[at + 1] >> _SHIFT)
    return True


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


@inlined
def _pattern(value, sign, floating):
    negative = value >> 63
    return (value ^ negative) | (negative & sign) if floating else value & (2 * sign - 1)


def find_changes(old: np.ndarray, new: np.ndarray, ordering: Ordering) -> Changes:
    """As `steps.find_changes`."""
    n = _count(old, new)
    found, gaps_and_steps = np.empty(n, np.uint8), np.empty(n, np.uint64)
    counts, low_bits = np.zeros(256, np.int64), np.zeros(256, np.uint8)
    _scan(old, new, np.uint32(ordering.shift), 1 << (ordering.bits - 1), ordering.floating, found, gaps_and_steps)
    symbols, remainders = np.empty(n, np.uint8), np.empty(3 * n + 8, np.uint8)  # gaps within a chunk have < 24 bits
    far, farther = np.empty(n + 1, np.uint8), np.empty(n, "<u4")
    large, larger = np.empty(n + 1, np.uint8), np.empty(n, "<u4")
    lengths = _emit(found, gaps_and_steps, counts, low_bits, symbols, remainders, far, farther, large, larger)
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
