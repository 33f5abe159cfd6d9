"""`rlloop.sync.steps`, compiled: one pass over all elements, everything else over the changed ones only."""

from __future__ import annotations

import threading

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.blocks import classes, lowest, population, where_changed, where_equal
from rlloop.numerics.kernels.cpu.compiled.jit import inlined, kernel
from rlloop.sync.steps import Changes, Ordering, Patch
from rlloop.sync.words import outside, select

RANGE = 1 << 18  # elements processed at a time: source and copy fit a core's cache
SPAN = 512  # elements whose classes are compared at once: eight blocks
SLOTS = 32  # classes at most that are counted by blocks
_NEVER = np.int64(1) << 40  # a gap larger than any chunk
_DENSE = 16  # above one change in this many elements, visiting changes is slower than visiting elements


@inlined
def _order(pattern, sign, floating):  # branch-free here and below: signs of weights and steps are random
    negative = (sign - 1 - pattern) >> 63  # mask of all bits or none, since LLVM turns a comparison into a branch
    low = pattern & (sign - 1)
    return low ^ negative if floating else low + (negative & -sign)


@inlined
def _pattern(value, sign, floating):
    negative = value >> 63
    return (value ^ negative) | (negative & sign) if floating else value & (2 * sign - 1)


@inlined
def _within(value, sign):
    """Modulo the type's width, around 0."""
    return ((value + sign) & (2 * sign - 1)) - sign


@inlined
def _change(old, new, gap, sign, floating):
    """A change in one number, gap above zigzag."""
    step = _within(_order(np.int64(new), sign, floating) - _order(np.int64(old), sign, floating), sign)
    zigzag = np.uint64(((step << 1) ^ (step >> 63)) + 2 * (-step >> 63))
    return np.uint64(gap) << np.uint64(32) | zigzag


@kernel
def _window(patterns, shift, mask):
    """The first of the classes that are counted by blocks, and their number: those of one element in 1,024 and more,
    estimated from every 509th, and those in between."""
    counts = np.zeros(256, np.int64)
    for i in range(0, len(patterns), 509):
        counts[(np.uint32(patterns[i]) & mask) >> shift] += 1
    least, most = max(1, len(patterns) // (509 * 1024)), 0
    for which in range(256):
        if counts[which] > counts[most]:
            most = which
    first = last = most
    for which in range(256):
        if counts[which] >= least and which < first and last - which < SLOTS:
            first = which
            break
    for which in range(255, last, -1):
        if counts[which] >= least and which - first < SLOTS:
            last = which
            break
    return np.uint8(first), last - first + 1


@inlined
def _masks(patterns, at, mask, shift, first, slots, masks, before, rest):
    """Of `SPAN` elements: where each of the window's classes is, and how many of it are before each block; where none
    of them is."""
    a, b = classes(patterns, at, mask, shift), classes(patterns, at + 64, mask, shift)
    c, d = classes(patterns, at + 128, mask, shift), classes(patterns, at + 192, mask, shift)
    e, f = classes(patterns, at + 256, mask, shift), classes(patterns, at + 320, mask, shift)
    g, h = classes(patterns, at + 384, mask, shift), classes(patterns, at + 448, mask, shift)
    for slot in range(slots):
        which = np.uint8(first + slot)
        masks[slot, 0], masks[slot, 1] = where_equal(a, which), where_equal(b, which)
        masks[slot, 2], masks[slot, 3] = where_equal(c, which), where_equal(d, which)
        masks[slot, 4], masks[slot, 5] = where_equal(e, which), where_equal(f, which)
        masks[slot, 6], masks[slot, 7] = where_equal(g, which), where_equal(h, which)
    last = np.uint8(first + slots - 1)
    rest[0], rest[1], rest[2], rest[3] = (
        outside(a, first, last), outside(b, first, last), outside(c, first, last), outside(d, first, last)
    )  # fmt: skip
    rest[4], rest[5], rest[6], rest[7] = (
        outside(e, first, last), outside(f, first, last), outside(g, first, last), outside(h, first, last)
    )  # fmt: skip
    for slot in range(slots):
        count = np.int64(0)
        for block in range(8):
            before[slot, block] = count
            count += np.int64(population(masks[slot, block]))
        before[slot, 8] = count


@kernel
def _scan(old, new, shift, sign, floating, indices, class_of, changes):
    """Every change: its index, its class, its gap within the class and its step. Returns their number.

    Those of a class are in order. Elements of frequent classes are counted by blocks, as the bits of one number each;
    others one by one.
    """
    seen = np.zeros(256, np.int64)  # elements of each class before the span
    since = np.zeros(256, np.int64)  # those up to its last change
    mask, count = np.uint32(sign - 1), 0
    first, slots = _window(old, shift, mask)
    masks, before, rest = np.empty((SLOTS, 8), np.uint64), np.empty((SLOTS, 9), np.int64), np.empty(8, np.uint64)
    whole = len(old) // SPAN * SPAN
    for at in range(0, whole, SPAN):
        _masks(old, at, mask, shift, first, slots, masks, before, rest)
        for block in range(8):
            start = at + 64 * block
            others = rest[block]
            changed = where_changed(old, new, start) & ~others
            while changed:
                bit = lowest(changed)
                i = start + np.int64(bit)
                which = np.int64((np.uint32(old[i]) & mask) >> shift)
                slot = which - first
                below = masks[slot, block] & ((np.uint64(1) << bit) - np.uint64(1))
                index = seen[which] + before[slot, block] + np.int64(population(below))
                indices[count], class_of[count] = i, which
                changes[count] = _change(old[i], new[i], index - since[which], sign, floating)
                since[which] = index + 1
                count += 1
                changed &= changed - np.uint64(1)
            while others:
                count = _scan_one(
                    old, new, start + np.int64(lowest(others)), shift, sign, floating, indices, class_of, changes, seen,
                    since, count,
                )  # fmt: skip
                others &= others - np.uint64(1)
        for slot in range(slots):
            seen[first + slot] += before[slot, 8]
    for i in range(whole, len(old)):
        count = _scan_one(old, new, i, shift, sign, floating, indices, class_of, changes, seen, since, count)
    return count


@inlined
def _scan_one(old, new, i, shift, sign, floating, indices, class_of, changes, seen, since, count):
    which = np.int64((np.uint32(old[i]) & np.uint32(sign - 1)) >> shift)
    if old[i] != new[i]:
        indices[count], class_of[count] = i, which
        changes[count] = _change(old[i], new[i], seen[which] - since[which], sign, floating)
        since[which] = seen[which] + 1
        count += 1
    seen[which] += 1
    return count


@kernel
def _by_class(class_of, changes, counts, gaps, zigzags):
    """Sort changes by class, stably."""
    for which in class_of:
        counts[which] += 1
    offset = np.zeros(256, np.int64)
    for which in range(1, len(counts)):
        offset[which] = offset[which - 1] + counts[which - 1]
    for i in range(len(class_of)):
        at = offset[class_of[i]]
        gaps[at], zigzags[at] = changes[i] >> np.uint64(32), changes[i] & np.uint64(0xFFFFFFFF)
        offset[class_of[i]] = at + 1


@kernel
def _begin(counts, gaps, cursor, ends, left):
    """For each class, the index of its next change, of the one after its last, and the elements before its next."""
    at = 0
    for which in range(256):
        cursor[which] = at
        if which < len(counts):
            at += counts[which]
        ends[which] = at
        left[which] = np.int64(gaps[cursor[which]]) if cursor[which] < at else _NEVER


@inlined
def _apply_one(work, i, base, which, sign, floating, gaps, zigzags, cursor, ends, left, indices, values, applied):
    at = cursor[which]
    zigzag = np.int64(zigzags[at])
    step = (((zigzag >> 1) + 1) ^ -(zigzag & 1)) + (zigzag & 1)  # 1 for 0, −1 for 1, 2 for 2
    work[i] = _pattern(_within(_order(np.int64(work[i]), sign, floating) + step, sign), sign, floating)
    indices[applied], values[applied] = base + i, work[i]
    at += 1
    cursor[which] = at
    left[which] += 1 + np.int64(gaps[at]) if at < ends[which] else _NEVER


@kernel
def _apply(work, base, shift, sign, floating, window, gaps, zigzags, cursor, ends, left, indices, values, applied):
    """Make the changes that fall into `work`, elements of the chunk from `base` on. Returns how many have been made.

    `left` [256], elements of each class before its next change, goes on from range to range, as does `cursor`.
    """
    mask = np.uint32(sign - 1)
    first, slots = window
    masks, before, rest = np.empty((SLOTS, 8), np.uint64), np.empty((SLOTS, 9), np.int64), np.empty(8, np.uint64)
    whole = len(work) // SPAN * SPAN if slots else 0
    for at in range(0, whole, SPAN):
        _masks(work, at, mask, shift, first, slots, masks, before, rest)
        for slot in range(slots):
            which = first + slot
            while left[which] < before[slot, 8]:
                block = 0
                for other in range(1, 8):
                    block += np.int64(left[which] >= before[slot, other])
                i = at + 64 * block + select(masks[slot, block], left[which] - before[slot, block])
                _apply_one(
                    work, i, base, which, sign, floating, gaps, zigzags, cursor, ends, left, indices, values, applied
                )
                applied += 1
            left[which] -= before[slot, 8]
        for block in range(8):
            others = rest[block]
            while others:
                i = at + 64 * block + np.int64(lowest(others))
                others &= others - np.uint64(1)
                which = np.int64((np.uint32(work[i]) & mask) >> shift)
                if left[which] == 0:
                    _apply_one(
                        work, i, base, which, sign, floating, gaps, zigzags, cursor, ends, left, indices, values,
                        applied,
                    )  # fmt: skip
                    applied += 1
                left[which] -= 1
    for i in range(whole, len(work)):
        which = np.int64((np.uint32(work[i]) & mask) >> shift)
        if left[which] == 0:
            _apply_one(
                work, i, base, which, sign, floating, gaps, zigzags, cursor, ends, left, indices, values, applied
            )
            applied += 1
        left[which] -= 1
    return applied


@kernel
def put(flat, indices, values):
    """flat[indices] = values"""
    for i in range(len(indices)):
        flat[indices[i]] = values[i]


@kernel
def adopt(flat, indices, source):
    """flat[indices] = source[indices]"""
    for index in indices:
        flat[index] = source[index]


@kernel
def holds(flat, indices, values):
    """True if flat[indices] is `values`."""
    same = True
    for i in range(len(indices)):
        same &= flat[indices[i]] == values[i]
    return same


class _Workspace(threading.local):
    """A thread's arrays for the changes of a chunk: fresh memory costs more than writing to it."""

    elements = 0

    def __call__(self, elements: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self.elements < elements:
            self.elements = elements
            self.places = np.empty(elements, np.int32)
            self.found = np.empty(elements, np.uint8)
            self.changes = np.empty(elements, np.uint64)
        return self.places, self.found, self.changes


_workspace = _Workspace()


def find_changes(old: np.ndarray, new: np.ndarray, ordering: Ordering) -> tuple[Changes, np.ndarray]:
    """As `steps.find_changes`."""
    indices, class_of, changes = _workspace(len(old))
    n = _scan(
        old, new, np.uint32(ordering.shift), 1 << (ordering.bits - 1), ordering.floating, indices, class_of, changes
    )
    counts, gaps, zigzags = np.zeros(ordering.classes, np.int64), np.empty(n, np.uint32), np.empty(n, np.uint32)
    _by_class(class_of[:n], changes[:n], counts, gaps, zigzags)
    return Changes(counts, gaps, zigzags), indices[:n].copy()


class Applier:
    """Makes a chunk's changes range by range, in order; `old` is the whole chunk."""

    def __init__(self, old: np.ndarray, changes: Changes, ordering: Ordering) -> None:
        n = len(changes.gaps)
        self.patch = Patch(np.empty(n, np.uint32), np.empty(n, old.dtype))
        self.applied = self._base = 0
        shift, sign = np.uint32(ordering.shift), 1 << (ordering.bits - 1)
        window = _window(old, shift, np.uint32(sign - 1))
        if n * _DENSE > len(old):
            window = window[0], 0
        cursor, ends, left = (np.zeros(256, np.int64) for _ in range(3))
        _begin(changes.counts, changes.gaps, cursor, ends, left)
        self._arguments = (
            shift, sign, ordering.floating, window, changes.gaps, changes.zigzags, cursor, ends, left,
            self.patch.places, self.patch.values,
        )  # fmt: skip

    @property
    def complete(self) -> bool:
        """True when all changes have been made."""
        return self.applied == len(self.patch.places)

    def advance(self, work: np.ndarray) -> None:
        """Make the changes that fall into the next elements of the chunk, in place."""
        self.applied = _apply(work, self._base, *self._arguments, self.applied)
        self._base += len(work)


def apply_changes(array: np.ndarray, changes: Changes, ordering: Ordering) -> Patch | None:
    """As `steps.apply_changes`; the patch is not in order."""
    applier = Applier(array, changes, ordering)
    applier.advance(array)
    return applier.patch if applier.complete else None
