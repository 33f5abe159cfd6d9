"""`rlloop.numerics.random.uniform` for kernels: the same bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position):
    """A number in [0, 1) with 53 random bits, of the stream that draws tokens. int64, int64 -> float64."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
        m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
        high0, low0 = tl.umulhi(m0, c0), m0 * c0
        high1, low1 = tl.umulhi(m1, c2), m1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    words = ((c0 >> 5).to(tl.uint64) << 26) + (c1 >> 6).to(tl.uint64)
    return words.to(tl.float64) * (1.0 / 9007199254740992.0)
