"""The operations a model is written in, dispatched by its profile. The only door of this package for models.

Shapes: T flat tokens, H query heads, G key-value heads, D head width, V vocabulary. Compute dtype is that of the
tensors; logits and logprobs are float32.
"""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

from rlloop.numerics import logprob, reference, stock
from rlloop.numerics.layout import AttentionLayout, LogitsWarp
from rlloop.numerics.profile import NumericsProfile


def _backend(name: str) -> ModuleType:
    if name == "rlloop":
        from rlloop.numerics.cpu import contract

        return contract
    return {"stock": stock, "reference": reference}[name]


def _logprob_backend(name: str) -> ModuleType:
    return logprob if name == "rlloop" else _backend(name)


class Ops:
    """The operations under one `NumericsProfile`."""

    def __init__(self, profile: NumericsProfile) -> None:
        self.profile = profile
        self._linear = _backend(profile.linear).linear
        self._rms_norm = _backend(profile.rms_norm).rms_norm
        self._silu_mul = _backend(profile.activation).silu_mul
        self._rope = _backend(profile.rope).rope
        self._attention = _backend(profile.attention).attention
        self._logits = _logprob_backend(profile.token_logprob).logits
        self._token_logprob = _logprob_backend(profile.token_logprob).token_logprob
        self._sample = _logprob_backend(profile.token_logprob).sample

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`. x [T, K], weight [N, K], bias [N] -> [T, N]."""
        return self._linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Root-mean-square norm of `x + residual`. x [..., D] -> (normed [..., D], the sum itself [..., D])."""
        return self._rms_norm(x, weight, eps, residual)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`. [T, F] each -> [T, F]."""
        return self._silu_mul(gate, up)

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding, halves paired. x [T, H, D], positions [T] int64, tables [P, D / 2] float32 -> [T, H, D]."""
        return self._rope(x, positions, cos, sin)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
        """Causal attention of ragged sequences. q [T, H, D]; k, v [slots, G, D] -> [T, H, D]."""
        return self._attention(q, k, v, layout, scale)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits of the vocabulary, as `token_logprob` makes them. hidden [T, K], weight [V, K] -> [T, V] float32."""
        return self._logits(hidden, weight)

    def token_logprob(self, hidden: Tensor, weight: Tensor, targets: Tensor, warp: LogitsWarp) -> tuple[Tensor, Tensor]:
        """Logprob of each target under the warped distribution, and that distribution's entropy in nats.

        hidden [T, K], weight [V, K], targets [T] int64 -> ([T] float32, [T] float32), both differentiable.
        """
        return self._token_logprob(hidden, weight, targets, warp)

    def sample(
        self, logits: Tensor, warp: LogitsWarp, seeds: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw one token a row with the random number that (seed, position) names.

        logits [T, V] float32, seeds and positions [T] int64 -> (ids [T] int64, logprobs [T], raw logprobs [T] float32).
        `logprobs` has the bits of `token_logprob` of the same rows; the raw ones are at temperature 1, untruncated.
        """
        return self._sample(logits, warp, seeds, positions)


@functools.cache
def ops_for(profile: NumericsProfile) -> Ops:
    if profile.drift is not None:
        from rlloop.numerics.drift import DriftedOps

        return DriftedOps(profile)
    return Ops(profile)
