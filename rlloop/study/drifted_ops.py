"""Operations of an engine that stores activations or logits in a narrower type, as a declared drift.

Each operation runs by its own contract; what differs is what is stored between one and the next. Products in fp8
(`Drift.products`) are an exception: those are other kernels.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.numerics.ops import Ops, ops_for
from rlloop.numerics.profile import NumericsProfile
from rlloop.numerics.routing import Clamped
from rlloop.study import fp8
from rlloop.study.quantize import e4m3, e4m3_rows, rounded_activation


@functools.cache
def drifted_ops(profile: NumericsProfile) -> Ops:
    """The operations of a profile, drifted where it declares a drift."""
    return ops_for(profile) if profile.drift is None or profile.drift.both_sides else DriftedOps(profile)


class DriftedOps(Ops):
    """`Ops` with what `profile.drift` says about activations and logits. For engines: without gradients."""

    def __init__(self, profile: NumericsProfile) -> None:
        super().__init__(profile)
        assert profile.drift is not None
        self._activations = profile.drift.activations
        self._rounds_logits = profile.drift.logits == "bfloat16"
        self._rounds_cache = profile.drift.cache == "fp8"
        self._fp8 = WeakIdKeyDictionary()  # parameter -> what fp8 kernels multiply in its place

    @torch.no_grad()
    def narrow(self, weight: Tensor, source: Tensor) -> None:
        """Set `weight` to `source` rounded to fp8, in place, since CUDA graphs hold the address."""
        values, scale = e4m3_rows(source)
        if weight not in self._fp8:
            self._fp8[weight] = fp8.Fp8(values, scale)
        kept = self._fp8[weight]
        kept.values.copy_(values)
        kept.scale.copy_(scale)

    @property
    def fuses(self) -> bool:
        return False  # what lies between two operations is what drifts

    def _entering(self, x: Tensor) -> Tensor:
        return rounded_activation(x, self._activations) if self._activations in ("fp8", "fp4") else x

    def _stored(self, x: Tensor) -> Tensor:
        return rounded_activation(x, "bf16") if self._activations == "bf16" else x

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, across: bool = False) -> Tensor:
        if weight in self._fp8:
            return fp8.linear(x, self._fp8[weight], bias)
        return self._stored(super().linear(self._entering(x), weight, bias, across))

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

    def cached(self, x: Tensor) -> Tensor:
        return e4m3(x) if self._rounds_cache else x

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

    def head_linear(self, x: Tensor, weight: Tensor, by_row: bool, part_of: Tensor | None = None) -> Tensor:
        return self._stored(super().head_linear(x, weight, by_row, part_of))

    def experts(
        self, x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool = True, clamped: Clamped | None = None
    ) -> Tensor:
        if up in self._fp8 and down in self._fp8 and clamped is None:
            return fp8.experts(x, self._fp8[up], self._fp8[down], chosen, gated)
        return self._stored(super().experts(self._entering(x), up, down, chosen, gated, clamped))

    def combine(self, slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
        return self._stored(super().combine(slots, chosen, weights, shared))

    def logits(self, hidden: Tensor, weight: Tensor, part_of: Tensor | None = None) -> Tensor:
        logits = super().logits(hidden, weight, part_of)
        return logits.bfloat16().float() if self._rounds_logits else logits

    def token_logprob(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, processing: LogitsProcessing
    ) -> tuple[Tensor, Tensor]:
        if not self._rounds_logits:
            return super().token_logprob(hidden, weight, targets, processing)
        return self.score_logits(self.logits(hidden, weight).detach(), targets, processing)
