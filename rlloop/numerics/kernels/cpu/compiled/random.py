"""`rlloop.numerics.random` for kernels: the same bits."""

from __future__ import annotations

import numpy as np

from rlloop.numerics.kernels.cpu.compiled.jit import kernel
from rlloop.numerics.random import MASK, MULTIPLIERS, ROUNDS, WEYL

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
