"""`rlloop.sync.steps`, compiled: one pass over all elements, everything else over the changed ones only."""

from __future__ import annotations

import threading

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.blocks import classes, lowest, population, where_changed, where_equal
from rlloop.numerics.kernels.cpu.compiled.jit import inlined, kernel
from rlloop.numerics.kernels.cpu.compiled.simd import prefetch
from rlloop.sync.steps import Changes, Ordering, Patch
from rlloop.sync.words import COUNTS, outside, select, up_to

RANGE = 1 << 17  # elements processed at a time: source and copy fit a core's cache
SPAN = 512  # elements whose classes are compared at once: eight blocks
STRETCH = 64 * COUNTS  # elements whose classes are counted before the changes among them are made
SLOTS = 32  # classes at most that are counted by blocks
_NEVER = np.int64(1) << 40  # a gap larger than any chunk
_PUT = 1024  # elements that are written before they are read back
_AHEAD = 1 << 11  # elements that are fetched ahead of a pass


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
    estimated from one in 509, 16 at a time since a cache line has 32, and those in between."""
    counts = np.zeros(256, np.int64)
    for start in range(0, len(patterns), 16 * 509):
        for i in range(start, min(start + 16, len(patterns))):
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
def _masks(patterns, at, mask, shift, first, slots, masks, before, row, column, seen, rest):
    """Of `SPAN` elements: where each of the window's classes is, and how many of it are before each block, in
    its row of `row` numbers from `column` on; where none of them is. `seen` goes on."""
    a, b = classes(patterns, at, mask, shift), classes(patterns, at + 64, mask, shift)
    c, d = classes(patterns, at + 128, mask, shift), classes(patterns, at + 192, mask, shift)
    e, f = classes(patterns, at + 256, mask, shift), classes(patterns, at + 320, mask, shift)
    g, h = classes(patterns, at + 384, mask, shift), classes(patterns, at + 448, mask, shift)
    for slot in range(slots):
        which, i = np.uint8(first + slot), row * slot + column
        masks[i], masks[i + 1] = where_equal(a, which), where_equal(b, which)
        masks[i + 2], masks[i + 3] = where_equal(c, which), where_equal(d, which)
        masks[i + 4], masks[i + 5] = where_equal(e, which), where_equal(f, which)
        masks[i + 6], masks[i + 7] = where_equal(g, which), where_equal(h, which)
    last = np.uint8(first + slots - 1)
    rest[0], rest[1], rest[2], rest[3] = (
        outside(a, first, last), outside(b, first, last), outside(c, first, last), outside(d, first, last)
    )  # fmt: skip
    rest[4], rest[5], rest[6], rest[7] = (
        outside(e, first, last), outside(f, first, last), outside(g, first, last), outside(h, first, last)
    )  # fmt: skip
    for slot in range(slots):
        count, i = seen[first + slot], row * slot + column
        for block in range(8):
            before[i + block] = count
            count += np.int64(population(masks[i + block]))
        seen[first + slot] = count


@kernel
def _scan(old, new, shift, sign, floating, indices, class_of, changes):
    """Every change: its index, its class, its gap within the class and its step. Returns their number.

    Those of a class are in order. Elements of frequent classes are counted by blocks, as the bits of one number each;
    others one by one.
    """
    seen = np.zeros(256, np.int64)  # elements of each class so far
    since = np.zeros(256, np.int64)  # those up to its last change
    mask, count = np.uint32(sign - 1), 0
    first, slots = _window(old, shift, mask)
    masks, before, rest = np.empty(8 * SLOTS, np.uint64), np.empty(8 * SLOTS, np.int64), np.empty(8, np.uint64)
    whole = len(old) // SPAN * SPAN
    for at in range(0, whole, SPAN):
        _masks(old, at, mask, shift, first, slots, masks, before, 8, 0, seen, rest)
        for block in range(8):
            start = at + 64 * block
            others = rest[block]
            changed = where_changed(old, new, start) & ~others
            while changed:
                bit = lowest(changed)
                i = start + np.int64(bit)
                which = np.int64((np.uint32(old[i]) & mask) >> shift)
                slot = which - first
                below = masks[8 * slot + block] & ((np.uint64(1) << bit) - np.uint64(1))
                index = before[8 * slot + block] + np.int64(population(below))
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
def _stepped(pattern, zigzag, sign, floating):
    """The pattern after a step."""
    step = np.int64(zigzag)
    step = (((step >> 1) + 1) ^ -(step & 1)) + (step & 1)  # 1 for 0, −1 for 1, 2 for 2
    return _pattern(_within(_order(np.int64(pattern), sign, floating) + step, sign), sign, floating)


@inlined
def _locate_one(old, i, base, which, sign, floating, gaps, zigzags, cursor, ends, left, indices, values, found):
    """The element is its class's next change. Callers ask for that: an inlined function with a branch counts references
    to its arrays, by an atomic operation each."""
    at = cursor[which]
    indices[found], values[found] = base + i, _stepped(old[i], zigzags[at], sign, floating)
    at += 1
    cursor[which] = at
    left[which] += 1 + np.int64(gaps[at]) if at < ends[which] else _NEVER


@kernel
def _locate(old, base, shift, sign, floating, window, gaps, zigzags, cursor, ends, left, indices, values, found):
    """Write indices and new values of the changes among `old`, elements of the tensor from `base` on. Returns the
    number found so far.

    `left` [256], elements of each class before its next change, goes on from range to range, as does `cursor`.
    Classes are counted over a stretch first; then the changes of each class are found in turn. Whether a span has any
    is as good as random, so a branch on it would be mispredicted for most changes.
    """
    mask = np.uint32(sign - 1)
    first, slots = window
    masks, before = np.empty(COUNTS * SLOTS, np.uint64), np.empty(COUNTS * SLOTS, np.int16)
    seen, rest = np.empty(256, np.int64), np.empty(8, np.uint64)
    whole = len(old) // SPAN * SPAN
    for start in range(0, whole, STRETCH):
        end = min(start + STRETCH, whole)
        seen[:] = 0
        if end < start + STRETCH:
            before[:] = 0x7FFF  # above any count
        for at in range(start, end, SPAN):
            _masks(old, at, mask, shift, first, slots, masks, before, COUNTS, (at - start) // 64, seen, rest)
            for block in range(8):
                others, i = rest[block], at + 64 * block
                prefetch(old, i + _AHEAD)
                prefetch(old, i + _AHEAD + 32)
                while others:
                    one = i + np.int64(lowest(others))
                    others &= others - np.uint64(1)
                    which = np.int64((np.uint32(old[one]) & mask) >> shift)
                    if left[which] == 0:
                        _locate_one(
                            old, one, base, which, sign, floating, gaps, zigzags, cursor, ends, left, indices, values,
                            found,
                        )  # fmt: skip
                        found += 1
                    left[which] -= 1
        for slot in range(slots):
            which = first + slot
            rank, at, last, total = left[which], cursor[which], ends[which], seen[which]
            while rank < total:
                block = up_to(before, COUNTS * slot, rank) - 1
                below = np.int64(before[COUNTS * slot + block])
                i = start + 64 * block + select(masks[COUNTS * slot + block], rank - below)
                indices[found], values[found] = base + i, _stepped(old[i], zigzags[at], sign, floating)
                found += 1
                at += 1
                rank += 1 + np.int64(gaps[at]) if at < last else _NEVER
            cursor[which], left[which] = at, rank - total
    for i in range(whole, len(old)):
        which = np.int64((np.uint32(old[i]) & mask) >> shift)
        if left[which] == 0:
            _locate_one(old, i, base, which, sign, floating, gaps, zigzags, cursor, ends, left, indices, values, found)
            found += 1
        left[which] -= 1
    return found


@kernel
def _put_range(work, base, indices, values, start, end):
    """work[indices - base] = values, for some of them."""
    for change in range(start, end):
        work[np.int64(indices[change]) - base] = values[change]


@kernel
def put(flat, indices, values):
    """flat[indices] = values. Returns whether they can be read back; a few at a time are, while the cache has them."""
    same, last = True, len(indices) - 1
    for start in range(0, len(indices), _PUT):
        end = min(start + _PUT, len(indices))
        for i in range(start, end):
            prefetch(flat, indices[min(i + 32, last)])
            flat[indices[i]] = values[i]
        for i in range(start, end):
            same &= flat[indices[i]] == values[i]
    return same


@kernel
def adopt(flat, indices, source):
    """flat[indices] = source[indices]"""
    for index in indices:
        flat[index] = source[index]


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
    """Makes a chunk's changes range by range, in order; `old` is the whole chunk.

    `patch` gets the changes; `base` is added to its places.
    """

    def __init__(self, old: np.ndarray, changes: Changes, ordering: Ordering, patch: Patch, base: int = 0) -> None:
        self._old, self._patch, self._base, self._at, self._found = old, patch, base, 0, 0
        shift, sign = np.uint32(ordering.shift), 1 << (ordering.bits - 1)
        window = _window(old, shift, np.uint32(sign - 1))
        cursor, ends, left = (np.zeros(256, np.int64) for _ in range(3))
        _begin(changes.counts, changes.gaps, cursor, ends, left)
        self._arguments = (
            shift, sign, ordering.floating, window, changes.gaps, changes.zigzags, cursor, ends, left, *patch
        )  # fmt: skip

    @property
    def complete(self) -> bool:
        """True when all changes have been made."""
        return self._found == len(self._patch.places)

    def advance(self, work: np.ndarray) -> None:
        """The next elements of the chunk, changed, into `work`, which may be the same memory."""
        old, base, known = self._old[self._at : self._at + len(work)], self._base + self._at, self._found
        self._found = _locate(old, base, *self._arguments, known)
        np.copyto(work, old)  # four times as fast as a compiled loop
        _put_range(work, base, *self._patch, known, self._found)
        self._at += len(work)


def apply_changes(array: np.ndarray, changes: Changes, ordering: Ordering) -> Patch | None:
    """As `steps.apply_changes`; the patch is not in order."""
    patch = new_patch(len(changes.gaps), array)
    applier = Applier(array, changes, ordering, patch)
    applier.advance(array)
    return patch if applier.complete else None


def new_patch(changes: int, array: np.ndarray) -> Patch:
    """Memory for so many changes of a flat array."""
    places = np.empty(changes, np.uint32 if len(array) <= 1 << 32 else np.int64)
    return Patch(places, np.empty(changes, array.dtype))
