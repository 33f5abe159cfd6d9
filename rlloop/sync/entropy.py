"""Entropy coder of a chunk's changes: range asymmetric numeral systems (Duda, arXiv:1311.2540), compiled.

A gap is split into `gap >> k`, which is coded, and its k low bits, which are stored raw; a step's zigzag likewise with
m. Each class has its own k and m, chosen so that 2^k is an eighth to a quarter of the mean: lower bits are noise. Upper
parts of `ESCAPE` and more are followed by the remainder. Neighbouring classes with similar statistics share a frequency
table: one exponent less doubles the mean, so the upper parts of most classes have the same distribution.

The loops over changes inline nothing that has a branch and takes an array: numba would count references to it, by two
atomic operations, and those took three quarters of a loop's time.

A chunk, numbers in LEB128:

    changes; if there are any: first class, number of classes less one
    for each class: changes; if there are any: k + 32 if there is an m, and that m
    number of tables; for each: classes with changes that it serves, then of gaps and of steps: entries, a byte each
    number of 32-bit words; final states of the two coders, for gaps and for steps
    the words, then the low bits and the rests, least significant first

An entry is a frequency's logarithm in eighths, 0 for a symbol that does not occur. Everything is checked when read: no
content makes the decoder read or write outside its arrays, and the final state must be the encoder's initial one.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.jit import inlined, kernel
from rlloop.sync.frequency_tables import BITS, SYMBOLS, TOTAL, entry_count, entry_of, frequencies_of, grouped
from rlloop.sync.steps import Changes
from rlloop.sync.words import PADDING, length, load, store

ESCAPE = SYMBOLS - 1
MAX_LOW = 31  # low bits at most
_LEAST = 1 << 30  # a state is at least that, and below its square's quarter, so that it fits 63 bits
_WORD = (1 << 32) - 1


class Damage(IntEnum):
    """Reasons for which a chunk is refused."""

    none = 0
    number = 1  # does not end, or is out of range
    counts = 2
    table = 3
    words = 4
    low_bits = 5
    large = 6
    end = 7


REASONS = {
    Damage.number: "a number does not end, or is above its limit",
    Damage.counts: "the classes' changes do not add up to the chunk's",
    Damage.table: "a table of frequencies is invalid",
    Damage.words: "the content ends before its words do",
    Damage.low_bits: "the content ends before its low bits do",
    Damage.large: "a gap or a step is out of range",
    Damage.end: "the content does not end as an encoder's does",
}


def encode(changes: Changes) -> bytes:
    """A chunk's changes as bytes."""
    n = len(changes.gaps)
    if n == 0:
        return b"\0"
    head, words = np.empty(1 << 15, np.uint8), np.empty(n + 4, np.uint32)
    raw = np.empty(16 * n + PADDING, np.uint8)
    lengths = _encode(changes.counts, changes.gaps, changes.zigzags, head, words, raw)
    return b"".join((head[: lengths[0]].data, words[lengths[1] :].data, raw[: lengths[2]].data))


def decode(content: memoryview, classes: int, bits: int, elements: int) -> Changes | Damage:
    """The changes in a chunk of `elements` elements of `bits` bits in `classes` classes; or the damage found."""
    plain, cursor = np.zeros(len(content) + PADDING, np.uint8), np.zeros(1, np.int64)
    plain[: len(content)] = np.frombuffer(content, np.uint8)
    n = int(_number(plain[: len(content)], cursor, elements))
    if n < 0:
        return Damage.number
    counts, gaps, zigzags = np.zeros(classes, np.int64), np.empty(n, np.uint32), np.empty(n, np.uint32)
    damage = Damage(int(_decode(plain, len(content), cursor, counts, gaps, zigzags, elements, (1 << bits) - 1)))
    return damage or Changes(counts, gaps, zigzags)


# ---------------------------------------------------------------------------------------------------- numbers


@kernel
def _low(mean):
    """Number of low bits that are noise in numbers of this mean."""
    return max(length(mean) - 3, 0)


@kernel
def _put(out, offset, value):
    while value >= 128:
        out[offset] = value & 127 | 128
        value >>= 7
        offset += 1
    out[offset] = value
    return offset + 1


@kernel
def _number(content, cursor, limit):
    """The next number, −1 if it does not end or is above `limit`; `cursor` [1] moves on."""
    value = shift = 0
    while cursor[0] < len(content) and shift <= 56:
        byte = np.int64(content[cursor[0]])
        cursor[0] += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value if value <= limit else -1
    return -1


# ---------------------------------------------------------------------------------------------------- encoder


@kernel
def _split(counts, gaps, zigzags, lows, symbols, symbol_counts, raw):
    """Split changes into two symbols each, counted by class in `symbol_counts`, and raw bits in `raw`; returns raw's
    bytes."""
    pending, held, byte, i = 0, 0, 0, 0  # pending bits, their number, bytes written
    for which in range(len(counts)):
        end, n = i + counts[which], counts[which]
        if n == 0:
            continue
        total, weight = 0, 0
        for at in range(i, end):
            total += np.int64(gaps[at])
            weight += np.int64(zigzags[at])
        k, m = _low(total // n), _low(weight // n)
        lows[which, 0], lows[which, 1] = k, m
        for at in range(i, end):
            for half in range(2):
                value, low = (np.int64(zigzags[at]), m) if half else (np.int64(gaps[at]), k)
                pending |= (value & ((1 << low) - 1)) << held
                held += low
                store(raw, byte, pending)
                byte += held >> 3
                pending >>= held & ~7
                held &= 7
                upper = value >> low
                if upper >= ESCAPE:
                    rest = upper - ESCAPE
                    width = length(rest)
                    pending |= (width | rest << 6) << held
                    held += 6 + width
                    store(raw, byte, pending)
                    byte += held >> 3
                    pending >>= held & ~7
                    held &= 7
                    upper = ESCAPE
                symbols[at, half] = upper
                symbol_counts[which, half * SYMBOLS + upper] += 1
        i = end
    raw[byte] = pending
    return byte + np.int64(held > 0)


@inlined
def _push(x, frequency, start):
    upper = np.int64(np.uint64(x) // np.uint64(frequency))
    return (upper << BITS) + (x - upper * frequency) + start


@kernel
def _encode(counts, gaps, zigzags, head, words, raw):
    """Lengths of `head` and `raw`; `words` is filled from its end, from the second number on."""
    n, classes = len(gaps), len(counts)
    lows, symbols = np.zeros((classes, 2), np.int64), np.empty((n, 2), np.uint8)
    symbol_counts, table_of = np.zeros((classes, 2 * SYMBOLS), np.int64), np.empty(classes, np.int64)
    raw_bytes = _split(counts, gaps, zigzags, lows, symbols, symbol_counts, raw)
    tables = grouped(symbol_counts, table_of)
    first, last = 0, classes - 1
    while counts[first] == 0:
        first += 1
    while counts[last] == 0:
        last -= 1
    offset = _put(head, _put(head, _put(head, 0, n), first), last - first)
    for which in range(first, last + 1):
        offset = _put(head, offset, counts[which])
        if counts[which]:
            k, m = lows[which]
            offset = _put(head, offset, k | (32 if m else 0))
            if m:
                offset = _put(head, offset, m)
    frequencies = np.empty((len(tables), 2, SYMBOLS), np.int64)
    starts, entries = np.empty_like(frequencies), np.empty(SYMBOLS, np.int64)
    offset = _put(head, offset, len(tables))
    for table in range(len(tables)):
        offset = _put(head, offset, np.sum(table_of == table))
        for half in range(2):
            own = tables[table, half * SYMBOLS : (half + 1) * SYMBOLS]
            size = entry_count(own)
            offset = _put(head, offset, size)
            for s in range(SYMBOLS):
                entries[s] = entry_of(own[s])
                if s < size:
                    head[offset] = entries[s]
                    offset += 1
            frequencies_of(entries, frequencies[table, half], starts[table, half])
    one, other, at, i = _LEAST, _LEAST, len(words), n
    for which in range(last, first - 1, -1):
        if counts[which] == 0:
            continue
        frequency, start = frequencies[table_of[which]], starts[table_of[which]]
        for change in range(i - 1, i - counts[which] - 1, -1):
            gap, step = symbols[change, 0], symbols[change, 1]
            if other >= frequency[1, step] << (62 - BITS):
                at -= 1
                words[at] = other & _WORD
                other >>= 32
            other = _push(other, frequency[1, step], start[1, step])
            if one >= frequency[0, gap] << (62 - BITS):
                at -= 1
                words[at] = one & _WORD
                one >>= 32
            one = _push(one, frequency[0, gap], start[0, gap])
        i -= counts[which]
    offset = _put(head, _put(head, _put(head, offset, len(words) - at), one), other)
    return offset, at, raw_bytes


# ---------------------------------------------------------------------------------------------------- decoder


@kernel
def _table(content, cursor, lookup):
    """Read a table into `lookup` [2^BITS], for each slot its symbol (5 bits), frequency (13) and distance from the
    symbol's first slot; False if it is invalid."""
    entries = np.zeros(SYMBOLS, np.int64)
    frequencies, starts = np.empty(SYMBOLS, np.int64), np.empty(SYMBOLS, np.int64)
    size = _number(content, cursor, SYMBOLS)
    if size < 0 or cursor[0] + size > len(content):
        return False
    for s in range(size):
        entries[s] = content[cursor[0] + s]
    cursor[0] += size
    if not frequencies_of(entries, frequencies, starts):
        return False
    for s in range(SYMBOLS):
        for slot in range(frequencies[s]):
            lookup[starts[s] + slot] = s | frequencies[s] << 5 | slot << 18
    return True


@kernel
def _decode(padded, size, cursor, counts, gaps, zigzags, elements, largest):
    """Fill `counts`, `gaps` and `zigzags` from the first `size` bytes of `padded`, after their first number. Returns a
    `Damage`."""
    content, n, classes = padded[:size], len(gaps), len(counts)
    if n == 0:
        return 0 if cursor[0] == len(content) else 7
    first = _number(content, cursor, classes - 1)
    if first < 0:
        return 1
    span = _number(content, cursor, classes - 1 - first)
    if span < 0:
        return 1
    lows, total, present = np.zeros((classes, 2), np.int64), 0, 0
    for which in range(first, first + span + 1):
        counts[which] = _number(content, cursor, n)
        if counts[which] < 0:
            return 1
        total += counts[which]
        if counts[which]:
            present += 1
            low = _number(content, cursor, 32 | MAX_LOW)
            if low < 0:
                return 1
            lows[which, 0] = low & MAX_LOW
            if low & 32:
                lows[which, 1] = _number(content, cursor, MAX_LOW)
                if lows[which, 1] < 0:
                    return 1
    if total != n:
        return 2
    number = _number(content, cursor, present)
    if number < 1:
        return 3
    lookup = np.empty((number, 2, TOTAL), np.uint32)
    ends, served = np.empty(number, np.int64), 0
    for table in range(number):
        each = _number(content, cursor, present - served)
        if each < 1:
            return 3
        served += each
        ends[table] = served
        for half in range(2):
            if not _table(content, cursor, lookup[table, half]):
                return 3
    if served != present:
        return 3
    words = _number(content, cursor, len(content) // 4)
    one, other = _number(content, cursor, (1 << 62) - 1), _number(content, cursor, (1 << 62) - 1)
    if words < 0 or one < _LEAST or other < _LEAST:
        return 1
    at = cursor[0]
    last = at + 4 * words
    if last > len(content):
        return 4
    bit, i, served, table = 8 * last, 0, 0, 0
    for which in range(first, first + span + 1):
        if counts[which] == 0:
            continue
        if served == ends[table]:
            table += 1
        served += 1
        k, m, end = lows[which, 0], lows[which, 1], i + counts[which]
        of_gaps, of_steps = lookup[table, 0], lookup[table, 1]
        for change in range(i, end):
            entry = np.int64(of_gaps[one & (TOTAL - 1)])
            symbol = entry & ESCAPE
            one = (entry >> 5 & (2 * TOTAL - 1)) * (one >> BITS) + (entry >> 18)
            if one < _LEAST:
                one = one << 32 | (load(padded, at) & _WORD)
                at += 4
            entry = np.int64(of_steps[other & (TOTAL - 1)])
            step = entry & ESCAPE
            other = (entry >> 5 & (2 * TOTAL - 1)) * (other >> BITS) + (entry >> 18)
            if other < _LEAST:
                other = other << 32 | (load(padded, at) & _WORD)
                at += 4
            if at > last:
                return 4
            gap = symbol << k | (load(padded, bit >> 3) >> (bit & 7)) & ((1 << k) - 1)
            bit += k
            if symbol == ESCAPE:
                gap, bit = _rest(padded, bit, gap, k)
            zigzag = step << m | (load(padded, bit >> 3) >> (bit & 7)) & ((1 << m) - 1)
            bit += m
            if step == ESCAPE:
                zigzag, bit = _rest(padded, bit, zigzag, m)
            if bit > 8 * size:
                return 5
            if gap < 0 or gap >= elements or zigzag < 0 or zigzag > largest:
                return 6
            gaps[change], zigzags[change] = gap, zigzag
        i = end
    left = 8 * size - bit
    spent = left < 8 and (left == 0 or content[size - 1] >> (8 - left) == 0)
    return 0 if one == _LEAST and other == _LEAST and at == last and spent else 7


@kernel
def _rest(padded, bit, value, low):
    """A value above its last symbol, from what it is by that symbol, and the position after it; negative if invalid."""
    width = (load(padded, bit >> 3) >> (bit & 7)) & 63
    bit += 6
    if width > 32:
        return np.int64(-1), bit
    return value + (((load(padded, bit >> 3) >> (bit & 7)) & ((1 << width) - 1)) << low), bit + width
