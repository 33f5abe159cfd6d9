"""Changes of a chunk as gaps and steps, in numpy: the reference that the compiled coder (`steps_fast`) equals.

Bit patterns are mapped to integers in the order of their values, with −0 apart from +0; a changed element's *step* is
the difference of its two integers, modulo the type's width. Elements are grouped into *classes* by the old value's
exponent, which the receiver has as well: small weights change far more often than large ones. Each class lists its
changes by *gaps*, the number of unchanged elements of the class since the last change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Ordering(NamedTuple):
    """The order of a dtype's bit patterns, and their classes."""

    bits: int
    floating: bool  # sign and magnitude; False: two's complement
    shift: int  # the class is (pattern without sign) >> shift

    @property
    def classes(self) -> int:
        return 1 << max(0, self.bits - 1 - self.shift)


ORDERINGS = {
    "BF16": Ordering(16, True, 7),
    "F16": Ordering(16, True, 10),
    "F32": Ordering(32, True, 23),
    "F8_E4M3": Ordering(8, True, 3),
    "F8_E5M2": Ordering(8, True, 2),
    "I16": Ordering(16, False, 15),
    "U16": Ordering(16, False, 15),
    "I8": Ordering(8, False, 7),
    "U8": Ordering(8, False, 7),
}


class Changes(NamedTuple):
    """The n changes of one chunk, ordered by class and then by index."""

    counts: np.ndarray  # [classes] int64: changes of each class
    gaps: np.ndarray  # [n] uint32
    zigzags: np.ndarray  # [n] uint32: 0 for a step of +1, 1 for −1, 2 for +2


class Patch(NamedTuple):
    """The elements of a flat array that change, and their new patterns."""

    places: Any  # [n] int64, an array, or a tensor on the weights' device
    values: Any  # [n] patterns, likewise


def ordered(patterns: np.ndarray, ordering: Ordering) -> np.ndarray:
    """[n] patterns -> [n] int64 in the order of values: b, but −1 − (b − sign) for negative floats, so −0 is −1."""
    sign = 1 << (ordering.bits - 1)
    wide = patterns.astype(np.int64)
    if ordering.floating:
        return np.where(wide < sign, wide, sign - 1 - wide)
    return np.where(wide < sign, wide, wide - 2 * sign)


def patterns_of(values: np.ndarray, ordering: Ordering) -> np.ndarray:
    """The inverse of `ordered`, for values in the dtype's range."""
    sign = 1 << (ordering.bits - 1)
    back = sign - 1 - values if ordering.floating else values + 2 * sign
    return np.where(values >= 0, values, back).astype(f"<u{ordering.bits // 8}")


def classes_of(patterns: np.ndarray, ordering: Ordering) -> np.ndarray:
    """[n] int64: the class of each pattern, its exponent for floats."""
    return (patterns.astype(np.int64) & ((1 << (ordering.bits - 1)) - 1)) >> ordering.shift


def find_changes(old: np.ndarray, new: np.ndarray, ordering: Ordering) -> tuple[Changes, np.ndarray]:
    """The changes from `old` to `new`, [n] patterns each, and the changed elements' indices, ascending."""
    steps = _within(ordered(new, ordering) - ordered(old, ordering), ordering)
    changed_indices = np.flatnonzero(old != new)
    classes = classes_of(old, ordering)
    counts, gaps, zigzags = np.zeros(ordering.classes, np.int64), [], []
    for class_ in np.unique(classes[changed_indices]):
        own = steps[classes == class_]
        indices = np.flatnonzero(own)
        step = own[indices]
        counts[class_] = len(indices)
        gaps.append(np.diff(indices, prepend=-1) - 1)
        zigzags.append(np.where(step > 0, 2 * step - 2, -2 * step - 1))
    return Changes(counts, _joined(gaps), _joined(zigzags)), changed_indices


def apply_changes(array: np.ndarray, changes: Changes, ordering: Ordering) -> Patch | None:
    """Apply the changes to `array` in place. None if they lie outside it."""
    zigzags = changes.zigzags.astype(np.int64)
    steps = np.where(zigzags & 1, -(zigzags >> 1) - 1, (zigzags >> 1) + 1)
    classes = classes_of(array, ordering)
    changed_indices, first = np.empty(len(steps), np.int64), 0
    for class_ in np.flatnonzero(changes.counts):
        n = int(changes.counts[class_])
        indices = np.cumsum(changes.gaps[first : first + n].astype(np.int64) + 1) - 1
        own = np.flatnonzero(classes == class_)
        if indices[-1] >= len(own):
            return None
        changed_indices[first : first + n] = own[indices]
        first += n
    values = patterns_of(_within(ordered(array[changed_indices], ordering) + steps, ordering), ordering)
    array[changed_indices] = values
    return Patch(changed_indices, values)


def _within(values: np.ndarray, ordering: Ordering) -> np.ndarray:
    """Modulo the type's width, around 0."""
    sign = 1 << (ordering.bits - 1)
    return (values + sign) % (2 * sign) - sign


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.uint32) if arrays else np.zeros(0, np.uint32)
