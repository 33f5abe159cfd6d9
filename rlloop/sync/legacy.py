"""Reads chunks of the codec `steps`, with which stores of format 2 were written.

A change is one symbol, min(gap >> k, 15) * 16 + min(zigzag(step), 15), in a zstd frame, and the gap's k low bits. A
half at its limit has an overflow byte, and one of 255 an overflow word of 32 bits.
"""

from __future__ import annotations

import numpy as np

from rlloop.sync.framing import CodecError, Numbers, decompressed
from rlloop.sync.steps import Changes, Ordering

_LIMIT, _WIDE = 15, 255


def changes_of(content: memoryview, ordering: Ordering, elements: int) -> Changes:
    """The changes in a chunk of `elements`. Raises `CodecError`."""
    reader = Numbers(content)
    n = reader.next(elements)
    counts = np.zeros(ordering.classes, np.int64)
    if n == 0:
        if reader.rest():
            raise CodecError("bytes follow a chunk without changes")
        return Changes(counts, np.zeros(0, np.uint32), np.zeros(0, np.uint32))
    first = reader.next(ordering.classes - 1)
    last = first + reader.next(ordering.classes - 1 - first)
    lengths = [reader.next(n) for _ in range(4)]
    low_bits = np.zeros(ordering.classes, np.int64)
    for class_ in range(first, last + 1):
        counts[class_] = reader.next(n)
        if counts[class_]:
            low_bits[class_] = reader.next(21)
    if counts.sum() != n:
        raise CodecError(f"the classes have {counts.sum()} changes; the chunk has {n}")
    body = reader.bytes(reader.next(len(content)))
    remainders = np.frombuffer(reader.rest(), np.uint8)
    if len(remainders) != -(-int((counts * low_bits).sum()) // 8):
        raise CodecError(f"{len(remainders)} bytes of low bits do not fit the changes")
    sizes = (n, lengths[0], 4 * lengths[1], lengths[2], 4 * lengths[3])
    plain = np.frombuffer(decompressed(body, sum(sizes)), np.uint8)
    symbols, far, farther, large, larger = np.split(plain, np.cumsum(sizes)[:-1])
    gaps = _refilled(symbols >> 4, far, farther)
    zigzags = _refilled(symbols & 15, large, larger)
    bits, start, bit = np.unpackbits(remainders, bitorder="little"), 0, 0
    for class_ in np.flatnonzero(counts):
        end, k = start + int(counts[class_]), int(low_bits[class_])
        own = bits[bit : bit + (end - start) * k].reshape(end - start, k).astype(np.int64)
        gaps[start:end] = (gaps[start:end] << k) + (own << np.arange(k)).sum(1)
        start, bit = end, bit + (end - start) * k
    if gaps.max() >= elements or zigzags.max() >= 1 << ordering.bits + 1:
        raise CodecError("a gap or a step is out of range")
    return Changes(counts, gaps.astype(np.uint32), zigzags.astype(np.uint32))


def _refilled(halves: np.ndarray, byte: np.ndarray, word: np.ndarray) -> np.ndarray:
    """Halves of symbols with their overflows added."""
    values, rest, farthest = halves.astype(np.int64), byte.astype(np.int64), np.frombuffer(word.tobytes(), "<u4")
    if np.count_nonzero(values == _LIMIT) != len(rest) or np.count_nonzero(rest == _WIDE) != len(farthest):
        raise CodecError("the number of overflows is not that of the symbols that have one")
    rest[rest == _WIDE] += farthest
    values[values == _LIMIT] += rest
    return values
