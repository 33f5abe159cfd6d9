"""Random numbers by name: a pure function of (seed, position, stream), so neighbours and schedules cannot move them.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11). The key is the
64-bit seed; the counter is the 64-bit position, then the 64-bit stream. Low words come first.
"""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.jit import kernel

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF

SAMPLING = 0  # the stream that draws tokens


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words, in plain Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int = SAMPLING) -> float:
    """A number in [0, 1) with 53 random bits: the top 27 of the first word, then the top 26 of the second."""
    words = philox((position & MASK, position >> 32, stream & MASK, stream >> 32), (seed & MASK, seed >> 32))
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_W0, _W1 = (np.uint64(w) for w in WEYL)
_MASK, _32, _26, _6, _5 = (np.uint64(x) for x in (MASK, 32, 26, 6, 5))


@kernel
def philox_kernel(c0, c1, c2, c3, k0, k1):
    """`philox` for kernels. Words are held in uint64, whose products with the multipliers do not overflow."""
    for _ in range(ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _MASK, (p0 >> _32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@kernel
def uniform_kernel(seed, position, stream):
    """`uniform` for kernels: the same bits."""
    s, p, t = np.uint64(seed), np.uint64(position), np.uint64(stream)
    w0, w1, _, _ = philox_kernel(p & _MASK, p >> _32, t & _MASK, t >> _32, s & _MASK, s >> _32)
    return np.float64(((w0 >> _5) << _26) + (w1 >> _6)) * 2.0**-53
