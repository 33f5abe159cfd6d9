"""Frequency tables of the entropy coder: from counts of symbols to entries, frequencies and shared tables.

Numba caches kernels by their own file: when one of these changes, touch `rlloop/sync/entropy.py`, which calls them.
"""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.jit import kernel
from rlloop.sync.words import length

SYMBOLS = 32
BITS = 12  # of a table's sum of frequencies
TOTAL = 1 << BITS
_EIGHTHS = np.array([256, 279, 304, 332, 362, 395, 431, 470])  # 2^(8 + j/8)
_BETWEEN = np.array([267, 291, 318, 347, 378, 413, 450, 491])  # 2^(8 + (j + 1/2)/8)


@kernel
def _log2(n):
    """log2 of 1 <= n < 2^31, in 4096ths."""
    exponent = length(n) - 1
    x, log = n << (30 - exponent), exponent
    for _ in range(12):
        x, log = x * x >> 30, log << 1
        if x >> 31:
            x, log = x >> 1, log | 1
    return log


@kernel
def entry_of(count):
    """A table's entry for a symbol that occurs `count` times."""
    if count == 0:
        return 0
    exponent, above = length(count) - 1, 0
    mantissa = (count << 8) >> exponent
    while above < 8 and mantissa >= _BETWEEN[above]:
        above += 1
    return 1 + 8 * exponent + above


@kernel
def frequencies_of(entries, frequencies, starts):
    """Frequencies, whose sum is `TOTAL`, and the sum of those before each. False for an empty table."""
    total, most = 0, 0
    for s in range(SYMBOLS):
        frequencies[s] = 0
        if entries[s]:
            frequencies[s] = _EIGHTHS[(entries[s] - 1) & 7] << ((entries[s] - 1) >> 3)
            total += frequencies[s]
        if frequencies[s] > frequencies[most]:
            most = s
    if total == 0:
        return False
    left = TOTAL
    for s in range(SYMBOLS):
        if entries[s]:
            frequencies[s] = max(frequencies[s] * (TOTAL - SYMBOLS) // total, 1)
            left -= frequencies[s]
    frequencies[most] += left
    start = 0
    for s in range(SYMBOLS):
        starts[s] = start
        start += frequencies[s]
    return True


@kernel
def _cost(counts):
    """Coded size of two alphabets' symbols, in 4096ths of bits, without their tables."""
    cost = 0
    for first in range(0, 2 * SYMBOLS, SYMBOLS):
        total = 0
        for s in range(first, first + SYMBOLS):
            if counts[s]:
                cost -= counts[s] * _log2(counts[s])
                total += counts[s]
        cost += total * _log2(total)
    return cost


@kernel
def entry_count(counts):
    """Number of entries up to the last nonzero one."""
    n = len(counts)
    while counts[n - 1] == 0:
        n -= 1
    return n


@kernel
def grouped(counts, table_of):
    """Group classes with changes into shared tables: `counts` [classes, 64] -> counts of the G tables [G, 64], and each
    class's table index in `table_of` (-1: no changes)."""
    tables, last, own = np.zeros_like(counts), -1, 0
    both = np.empty(2 * SYMBOLS, np.int64)
    for which in range(len(counts)):
        table_of[which] = -1
        if not counts[which, :SYMBOLS].any():
            continue
        alone = _cost(counts[which])
        if last >= 0:
            both[:] = tables[last] + counts[which]
            joint = _cost(both)
            table = entry_count(counts[which, :SYMBOLS]) + entry_count(counts[which, SYMBOLS:]) + 3
            if joint <= own + alone + (table << 15):
                tables[last], own, table_of[which] = both, joint, last
                continue
        last += 1
        tables[last], own, table_of[which] = counts[which], alone, last
    return tables[: last + 1]
