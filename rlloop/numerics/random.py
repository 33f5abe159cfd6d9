"""Random numbers by name: a pure function of (seed, position, stream), so neighbours and schedules cannot move them.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11). The key is the
64-bit seed; the counter is the 64-bit position, then the 64-bit stream. Low words come first.
"""

from __future__ import annotations

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
