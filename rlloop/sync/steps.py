"""The steps coder's arithmetic, in numpy: the reference that the compiled one (`steps_fast`) equals byte for byte.

Elements become ordered integers, so that neighbours in value are neighbours in number and −0 stands apart from +0; a
changed element's *step* is the difference of the two. Elements are sorted into *classes* by the old value's exponent,
which the receiver knows as well: small weights change far more often than large ones. Each class lists its changes as
gaps, the unchanged elements of the class in between.

A change is one symbol, min(gap >> k, 15) * 16 + min(zigzag(step), 15), and the gap's k low bits, where 2^k is a third
to a sixth of the class's mean gap: those bits are noise, and the symbols are what an entropy coder can use. What does
not fit a symbol follows as a byte, what does not fit that as 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LIMIT = 15  # of each half of a symbol; the limit itself says that more follows
WIDE = 255


class Ordering(NamedTuple):
    """How a type's bit patterns are ordered and classed."""

    bits: int
    floating: bool  # sign and magnitude; else two's complement
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
    """The changes of one chunk, by class and then by place."""

    counts: np.ndarray  # [classes] int64
    low_bits: np.ndarray  # [classes] uint8: k
    symbols: np.ndarray  # [n] uint8
    remainders: np.ndarray  # uint8: k low bits of each gap, least significant first
    far: np.ndarray  # uint8: (gap >> k) − 15 where the symbol says 15; 255 where more follows
    farther: np.ndarray  # uint32: that minus 255
    large: np.ndarray  # uint8: zigzag(step) − 15, likewise
    larger: np.ndarray  # uint32


def ordered(patterns: np.ndarray, ordering: Ordering) -> np.ndarray:
    """[n] int64. A bijection: o = b for positive, −1 − (b − sign) for negative floats, so −0 is −1."""
    sign = 1 << (ordering.bits - 1)
    wide = patterns.astype(np.int64)
    if ordering.floating:
        return np.where(wide < sign, wide, sign - 1 - wide)
    return np.where(wide < sign, wide, wide - 2 * sign)


def patterns_of(values: np.ndarray, ordering: Ordering) -> np.ndarray:
    """The inverse of `ordered`; values are in range."""
    sign = 1 << (ordering.bits - 1)
    back = sign - 1 - values if ordering.floating else values + 2 * sign
    return np.where(values >= 0, values, back).astype(f"<u{ordering.bits // 8}")


def classes_of(patterns: np.ndarray, ordering: Ordering) -> np.ndarray:
    return (patterns.astype(np.int64) & ((1 << (ordering.bits - 1)) - 1)) >> ordering.shift


def find_changes(old: np.ndarray, new: np.ndarray, ordering: Ordering) -> Changes:
    """What turns `old` into `new`, [n] patterns each."""
    steps = ordered(new, ordering) - ordered(old, ordering)
    counts = np.zeros(ordering.classes, np.int64)
    low_bits = np.zeros(ordering.classes, np.uint8)
    quotients, zigzags, bits = [], [], []
    classes = classes_of(old, ordering)
    for which in np.unique(classes):
        own = steps[classes == which]
        places = np.flatnonzero(own)
        if not len(places):
            continue
        mean = (int(places[-1]) + 1) // len(places)
        k = max(0, mean.bit_length() - 2)
        gaps = np.diff(places, prepend=-1) - 1
        step = own[places]
        counts[which], low_bits[which] = len(places), k
        quotients.append(gaps >> k)
        zigzags.append(np.where(step > 0, 2 * step - 2, -2 * step - 1))
        bits.append((gaps[:, None] >> np.arange(k) & 1).reshape(-1))
    quotient, zigzag = _joined(quotients), _joined(zigzags)
    symbols = np.minimum(quotient, LIMIT) * 16 + np.minimum(zigzag, LIMIT)
    remainders = np.packbits(_joined(bits).astype(np.uint8), bitorder="little")
    return Changes(counts, low_bits, symbols.astype(np.uint8), remainders, *_overflow(quotient), *_overflow(zigzag))


def apply_changes(old: np.ndarray, changes: Changes, ordering: Ordering, out: np.ndarray) -> bool:
    """`out` becomes `old` after the changes. False where they reach outside of it or of the type."""
    quotient = _refilled(changes.symbols >> 4, changes.far, changes.farther)
    zigzag = _refilled(changes.symbols & 15, changes.large, changes.larger)
    if quotient is None or zigzag is None:
        return False
    step = np.where(zigzag & 1, -(zigzag >> 1) - 1, (zigzag >> 1) + 1)
    bits = np.unpackbits(changes.remainders, bitorder="little").astype(np.int64)
    values, classes = ordered(old, ordering), classes_of(old, ordering)
    first, bit = 0, 0
    for which in np.flatnonzero(changes.counts):
        n, k = int(changes.counts[which]), int(changes.low_bits[which])
        low = (bits[bit : bit + n * k].reshape(n, k) << np.arange(k)).sum(1)
        places = np.cumsum((quotient[first : first + n] << k) + low + 1) - 1
        own = np.flatnonzero(classes == which)
        if places[-1] >= len(own):
            return False
        values[own[places]] += step[first : first + n]
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
    """None where the overflows are not as many as the symbols ask for."""
    values, rest = halves.astype(np.int64), byte.astype(np.int64)
    if np.count_nonzero(values == LIMIT) != len(rest) or np.count_nonzero(rest == WIDE) != len(word):
        return None
    rest[rest == WIDE] += word
    values[values == LIMIT] += rest
    return values
