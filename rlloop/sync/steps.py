"""The steps coder in numpy: the reference that the compiled one (`steps_fast`) equals byte for byte.

Bit patterns are mapped to integers in the order of their values, with −0 apart from +0; a changed element's *step* is
the difference of its two integers. Elements are grouped into *classes* by the old value's exponent, which the receiver
has as well: small weights change far more often than large ones. Each class lists its changes by *gaps*, the number of
unchanged elements of the class since the last change.

A change is one symbol, min(gap >> k, 15) * 16 + min(zigzag(step), 15), and the gap's k low bits, where 2^k is a third
to a sixth of the class's mean gap: those bits are noise, and the symbols are what an entropy coder can compress. A half
that does not fit its symbol overflows into a byte, and that into 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LIMIT = 15  # of each half of a symbol; a half at the limit has an overflow byte
WIDE = 255  # of an overflow byte; one at the limit has an overflow word


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
    "F8_E4M3": Ordering(8, True, 3),
    "F8_E5M2": Ordering(8, True, 2),
    "I16": Ordering(16, False, 15),
    "U16": Ordering(16, False, 15),
    "I8": Ordering(8, False, 7),
    "U8": Ordering(8, False, 7),
}


@dataclass(frozen=True)
class Changes:
    """The n changes of one chunk, ordered by class and then by index."""

    counts: np.ndarray  # [classes] int64: changes of each class
    low_bits: np.ndarray  # [classes] uint8: k
    symbols: np.ndarray  # [n] uint8
    remainders: np.ndarray  # uint8: the k low bits of each gap, packed, least significant first
    far: np.ndarray  # uint8: (gap >> k) − 15 of each symbol at the limit; 255 if that overflows
    farther: np.ndarray  # uint32: that minus 255
    large: np.ndarray  # uint8: zigzag(step) − 15, likewise
    larger: np.ndarray  # uint32


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


def find_changes(old: np.ndarray, new: np.ndarray, ordering: Ordering) -> Changes:
    """The changes from `old` to `new`, [n] patterns each."""
    steps = ordered(new, ordering) - ordered(old, ordering)
    counts = np.zeros(ordering.classes, np.int64)
    low_bits = np.zeros(ordering.classes, np.uint8)
    quotients, zigzags, bits = [], [], []
    classes = classes_of(old, ordering)
    for class_ in np.unique(classes):
        own = steps[classes == class_]
        indices = np.flatnonzero(own)
        if not len(indices):
            continue
        mean = (int(indices[-1]) + 1) // len(indices)
        k = max(0, mean.bit_length() - 2)
        gaps = np.diff(indices, prepend=-1) - 1
        step = own[indices]
        counts[class_], low_bits[class_] = len(indices), k
        quotients.append(gaps >> k)
        zigzags.append(np.where(step > 0, 2 * step - 2, -2 * step - 1))
        bits.append((gaps[:, None] >> np.arange(k) & 1).reshape(-1))
    quotient, zigzag = _joined(quotients), _joined(zigzags)
    symbols = np.minimum(quotient, LIMIT) * 16 + np.minimum(zigzag, LIMIT)
    remainders = np.packbits(_joined(bits).astype(np.uint8), bitorder="little")
    return Changes(counts, low_bits, symbols.astype(np.uint8), remainders, *_overflow(quotient), *_overflow(zigzag))


def apply_changes(old: np.ndarray, changes: Changes, ordering: Ordering, out: np.ndarray) -> bool:
    """Write `old` with the changes to `out`. Returns False if they reach outside of the tensor or the dtype's range."""
    quotient = _refilled(changes.symbols >> 4, changes.far, changes.farther)
    zigzag = _refilled(changes.symbols & 15, changes.large, changes.larger)
    if quotient is None or zigzag is None:
        return False
    step = np.where(zigzag & 1, -(zigzag >> 1) - 1, (zigzag >> 1) + 1)
    bits = np.unpackbits(changes.remainders, bitorder="little").astype(np.int64)
    values, classes = ordered(old, ordering), classes_of(old, ordering)
    first, bit = 0, 0
    for class_ in np.flatnonzero(changes.counts):
        n, k = int(changes.counts[class_]), int(changes.low_bits[class_])
        low = (bits[bit : bit + n * k].reshape(n, k) << np.arange(k)).sum(1)
        indices = np.cumsum((quotient[first : first + n] << k) + low + 1) - 1
        own = np.flatnonzero(classes == class_)
        if indices[-1] >= len(own):
            return False
        values[own[indices]] += step[first : first + n]
        first, bit = first + n, bit + n * k
    sign = 1 << (ordering.bits - 1)
    if len(values) and (values.min() < -sign or values.max() >= sign):
        return False
    out[:] = patterns_of(values, ordering)
    return True


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _overflow(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rest = values[values >= LIMIT] - LIMIT
    return np.minimum(rest, WIDE).astype(np.uint8), (rest[rest >= WIDE] - WIDE).astype("<u4")


def _refilled(halves: np.ndarray, byte: np.ndarray, word: np.ndarray) -> np.ndarray | None:
    """Halves of symbols with their overflows added; None if these are not as many as the halves at the limit."""
    values, rest = halves.astype(np.int64), byte.astype(np.int64)
    if np.count_nonzero(values == LIMIT) != len(rest) or np.count_nonzero(rest == WIDE) != len(word):
        return None
    rest[rest == WIDE] += word
    values[values == LIMIT] += rest
    return values
