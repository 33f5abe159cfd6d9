"""The operations of an engine that keeps its activations or logits in a narrower type: an honest drift, and declared.

Each operation runs by its own contract; what differs is only what is stored between one and the next.
"""

from __future__ import annotations

from torch import Tensor

from rlloop.numerics import logprob, stock
from rlloop.numerics.layout import AttentionLayout, LogitsWarp
from rlloop.numerics.ops import Ops
from rlloop.numerics.profile import NumericsProfile
from rlloop.numerics.quantize import rounded_activation
from rlloop.numerics.routing import Clamped


class DriftedOps(Ops):
    """`Ops` with what `profile.drift` says about activations and logits. For engines: without gradients."""

    def __init__(self, profile: NumericsProfile) -> None:
        super().__init__(profile)
        assert profile.drift is not None
        self._activations = profile.drift.activations
        self._rounds_logits = profile.drift.logits == "bfloat16"

    def _stored(self, x: Tensor) -> Tensor:
        return rounded_activation(x, "bf16") if self._activations == "bf16" else x

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, across: bool = False) -> Tensor:
        entering = rounded_activation(x, "fp8") if self._activations == "fp8" else x
        return self._stored(super().linear(entering, weight, bias, across))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self._activations != "bf16":
            return super().rms_norm(x, weight, eps, residual)
        stream = self._stored(x if residual is None else x + residual)  # what is normed is what was stored
        return self._stored(super().rms_norm(stream, weight, eps)[0]), stream

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._stored(super().silu_mul(gate, up))

    def sigmoid_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._stored(super().sigmoid_mul(gate, up))

    def relu_squared(self, x: Tensor) -> Tensor:
        return self._stored(super().relu_squared(x))

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._stored(super().rope(x, positions, cos, sin))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, sinks: Tensor | None = None,
        window: int = 0,
    ) -> Tensor:  # fmt: skip
        return self._stored(super().attention(q, k, v, layout, scale, sinks, window))

    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, layout: AttentionLayout, scale: float
    ) -> Tensor:
        return self._stored(super().sparse_attention(q, k, v, selected, layout, scale))

    def head_linear(self, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        return self._stored(super().head_linear(x, weight, by_row))

    def experts(
        self, x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool = True, clamped: Clamped | None = None
    ) -> Tensor:
        entering = rounded_activation(x, "fp8") if self._activations == "fp8" else x
        return self._stored(super().experts(entering, up, down, chosen, gated, clamped))

    def combine(self, slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
        return self._stored(super().combine(slots, chosen, weights, shared))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        made = super().logits(hidden, weight)
        return made.bfloat16().float() if self._rounds_logits else made

    def token_logprob(self, hidden: Tensor, weight: Tensor, targets: Tensor, warp: LogitsWarp) -> tuple[Tensor, Tensor]:
        if not self._rounds_logits:
            return super().token_logprob(hidden, weight, targets, warp)
        rounded = self.logits(hidden, weight).detach()
        if self.profile.token_logprob == "rlloop":
            return logprob.score_logits(rounded, targets, warp)
        every = stock.warped(rounded, warp).log_softmax(-1)
        return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every.nan_to_num(neginf=0.0)).sum(-1)
