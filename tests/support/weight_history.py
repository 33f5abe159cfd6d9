"""Small sets of weights that take steps, for tests of the weight sync."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlloop.sync.bits import Bits

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key()


def first_weights(seed: int = 0) -> dict[str, Bits]:
    """Several types and sizes, one larger than the others."""
    rng = np.random.default_rng(seed)

    def some(dtype: str, kind: str, *shape: int) -> Bits:
        return Bits(dtype, rng.integers(0, 2 ** (8 * np.dtype(kind).itemsize), shape, kind))

    return {
        "model.embed_tokens.weight": some("BF16", "<u2", 60, 40),
        "model.layers.0.mlp.up_proj.weight": some("BF16", "<u2", 40, 30),
        "model.layers.0.mlp.experts.7.up_proj.weight": some("F8_E4M3", "u1", 16, 16),
        "model.layers.0.bias": some("F32", "<u4", 33),
        "model.norm.weight": some("BF16", "<u2", 40),
        "model.scale": some("F16", "<u2"),
    }


def next_weights(weights: dict[str, Bits], step: int) -> dict[str, Bits]:
    """A twentieth of all elements differs, by little; norms stay."""
    rng = np.random.default_rng(step)
    changed = {}
    for name, bits in weights.items():
        flips = (rng.random(bits.shape) < 0.05) & ("norm" not in name)
        changed[name] = Bits(bits.dtype, np.where(flips, bits.array ^ 1, bits.array).astype(bits.array.dtype))
    return changed


def history(steps: int, seed: int = 0) -> list[dict[str, Bits]]:
    weights = [first_weights(seed)]
    for step in range(1, steps + 1):
        weights.append(next_weights(weights[-1], step))
    return weights


def same(one: dict[str, Bits], other: dict[str, Bits]) -> bool:
    return one.keys() == other.keys() and all(one[name].same(other[name]) for name in one)
