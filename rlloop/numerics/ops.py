"""The operations a model is written in, dispatched by its profile. The only door of this package for models.

Shapes: T flat tokens, H query heads, G key-value heads, D head width, V vocabulary, E experts, k of them a token.
Compute dtype is that of the tensors; logits, logprobs, scores and weights of experts are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlloop.numerics import logprob, reference, stock
from rlloop.numerics.kernels.cpu import fused
from rlloop.numerics.kernels.cpu.contract import on_cuda
from rlloop.numerics.layout import AttentionLayout, Carried, LogitsWarp, Reach
from rlloop.numerics.profile import NumericsProfile
from rlloop.numerics.routing import Clamped, Routing
from rlloop.numerics.tp_reduction import sum_over_ranks


def _backend(name: str) -> ModuleType:
    if name == "rlloop":
        from rlloop.numerics.kernels.cpu import contract

        return contract
    if name == "huggingface":
        from rlloop.numerics import huggingface

        return huggingface
    return {"stock": stock, "reference": reference}[name]


def _mixture_backend(name: str) -> ModuleType:
    if name == "rlloop":
        from rlloop.numerics.kernels.cpu import mixture

        return mixture
    return _backend(name)


def _indexer_backend(name: str) -> ModuleType:
    if name == "rlloop":
        from rlloop.numerics.kernels.cpu import indexing

        return indexing
    return _backend(name)


def _recurrent_backend(name: str) -> ModuleType:
    if name == "rlloop":
        from rlloop.numerics.kernels.cpu import recurrent

        return recurrent
    return _backend(name)


def _logprob_backend(name: str) -> ModuleType:
    return logprob if name == "rlloop" else _backend(name)


def _fused(x: Tensor, name: str) -> Callable[..., Any]:
    return on_cuda(name) if x.is_cuda else getattr(fused, name)


class Ops:
    """The operations under one `NumericsProfile`."""

    def __init__(self, profile: NumericsProfile) -> None:
        self.profile = profile
        self._linear = _backend(profile.linear).linear
        self._rms_norm = _backend(profile.rms_norm).rms_norm
        self._silu_mul = _backend(profile.activation).silu_mul
        self._rope = _backend(profile.rope).rope
        self._attention = _backend(profile.attention).attention
        self._sparse_attention = _indexer_backend(profile.attention).sparse_attention
        self._split = 0 if profile.attention_splits == "default" else int(profile.attention_splits)
        if self._split and profile.attention in ("rlloop", "reference"):
            self._sparse_attention = functools.partial(self._sparse_attention, split=self._split)
        self._logits = _logprob_backend(profile.token_logprob).logits
        self._token_logprob = _logprob_backend(profile.token_logprob).token_logprob
        self._sample = _logprob_backend(profile.token_logprob).sample

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, across: bool = False) -> Tensor:
        """`x @ weight.T + bias`. x [T, K], weight [N, K], bias [N] -> [T, N].

        `across`: tensor-parallel ranks share the K terms. `profile.tp_segments` says how many, `all_reduce` how their
        sums are added.
        """
        ranks = int(self.profile.tp_segments)
        if not across or ranks == 1:
            return self._linear(x, weight, bias)
        exact = functools.partial(_mixture_backend(self.profile.linear).router_logits, exact=True)
        return sum_over_ranks(
            x, weight, bias, ranks, self._linear if self.profile.all_reduce == "rounded_chain" else None, exact
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Root-mean-square norm of `x + residual`. x [..., D] -> (normed [..., D], the sum itself [..., D]).

        `profile.residual_norm` says whether the norm reads the sum as it is stored, or in float32.
        """
        if residual is None or self.profile.residual_norm == "rounded":
            return self._rms_norm(x, weight, eps, residual)
        total = reference.widen(x) + reference.widen(residual)
        return self._rms_norm(total, weight, eps, None)[0].to(x.dtype), total.to(x.dtype)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`. [T, F] each -> [T, F]."""
        return self._silu_mul(gate, up)

    def sigmoid_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`sigmoid(gate) * up`. Two tensors of one shape."""
        return _backend(self.profile.activation).sigmoid_mul(gate, up)

    def relu_squared(self, x: Tensor) -> Tensor:
        """`max(x, 0) ** 2`, the same in every implementation: one exact choice and one rounded product a number."""
        return x.relu().square()

    @property
    def fuses(self) -> bool:
        """Whether operations that follow one another may be one kernel, as `enter` is: without gradients."""
        return self.profile.holds_contract and not torch.is_grad_enabled()

    def three_linears(self, x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`linear` of one input by three weights, without biases; for where `fuses` says so."""
        return _fused(x, "three_linears")(x, first, second, third)

    def gated_linear(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """`silu_mul` of two linears of one input, without biases; for where `fuses` says so."""
        return _fused(x, "gated_linear")(x, gate, up)

    def enter(
        self, q: Tensor, k: Tensor, v: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, positions: Tensor,
        rope: tuple[Tensor, Tensor], slots: Tensor, keys: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        """Norm and rotate queries and keys, and put keys and values into their stores. Returns the queries.

        For where `fuses` says so. q [T, H, D], k and v [T, G, D]; `norms` are the weights [D] of queries' and keys',
        slots [T] int64, the stores [slots, G, D]. Bits are those of `rms_norm` and then `rope`.
        """
        return _fused(q, "enter")(q, k, v, *(norms or (None, None)), eps, positions, *rope, slots, keys, values)

    def cached(self, x: Tensor) -> Tensor:
        """Keys, values or latents as the cache is to keep them: as they are."""
        return x

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding, halves paired. x [T, H, D], positions [T] int64, tables [P, D / 2] float32 -> [T, H, D]."""
        return self._rope(x, positions, cos, sin)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, sinks: Tensor | None = None,
        window: int = 0,
    ) -> Tensor:  # fmt: skip
        """Causal attention of ragged sequences. q [T, H, D]; k, v [slots, G, D], sinks [H] -> [T, H, D].

        `layout.Reach` says what sinks and windows are.
        """
        return self._attention(q, k, v, layout, scale, Reach(self._split, window, sinks))

    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, layout: AttentionLayout, scale: float
    ) -> Tensor:
        """`attention` in which each query reads its selected positions only, in ascending order.

        G is 1; selected [T, S] int64, ascending, then −1. Where all positions are selected, the bits of `attention`.
        """
        return self._sparse_attention(q, k, v, selected, layout, scale)

    def head_linear(self, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        """Each head times its own matrix. x [T, H, K], weight [H, N, K] (if not by_row [H, K, N]) -> [T, H, N]."""
        return _mixture_backend(self.profile.linear).head_linear(x, weight, by_row)

    def router_logits(self, x: Tensor, weight: Tensor, exact: bool, bias: Tensor | None = None) -> Tensor:
        """The gate's sums in float32; where not exact, rounded to the compute type. [T, K], [E, K] -> [T, E].

        `bias` [E] is added to the sums in float32; where not exact, what comes of it is rounded as well.
        """
        return _mixture_backend(self.profile.router).router_logits(x, weight, exact, bias)

    def route(
        self, logits: Tensor, bias: Tensor | None, routing: Routing, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose each token's experts and weigh them. logits [T, E], bias [E], both float32.

        `given` [T, k] is a choice to weigh in place of one to make (replay). Returns (weights [T, k], chosen [T, k]
        int64, the scores of all experts [T, E]); weights and scores are differentiable.
        """
        return _mixture_backend(self.profile.router).route(logits, bias, routing, given)

    def experts(
        self, x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool = True, clamped: Clamped | None = None
    ) -> Tensor:
        """What each chosen expert makes of its tokens: `down @ silu_mul(gate, up)`, or `down @ relu_squared(up)`.

        x [T, D], up [E, 2F, D] with the gate first (not gated: [E, F, D]), down [E, D, F], chosen [T, k] -> [T, k, D].
        `clamped` experts have other shapes and another activation.
        """
        return _mixture_backend(self.profile.experts).experts(x, up, down, chosen, gated, clamped)

    def combine(self, slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
        """The experts' weighted sum, in ascending order of expert, then `shared` [T, D]. slots [T, k, D] -> [T, D].

        `profile.expert_combine` says when it is rounded: once at the end, or each product and each sum.
        """
        return _mixture_backend(self.profile.combine).combine(
            slots, chosen, weights, shared, self.profile.expert_combine == "bf16_each"
        )

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layout: AttentionLayout, states: Carried | None
    ) -> Tensor:
        """Each channel's last K inputs, weighed, oldest first. x [T, C], weight [C, 1, K], bias [C] -> [T, C] float32.

        `states` [R, K - 1, C]: the inputs that a sequence ends with.
        """
        return _recurrent_backend(self.profile.recurrent).causal_conv(x, weight, bias, layout, states)

    def recurrent_gates(self, a: Tensor, rate: Tensor, bias: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
        """A head's step `max(softplus(a + bias), floor)`, and its decay `exp(-exp(rate) step)`.

        a [T, H], rate and bias [H] -> (decay, step), both [T, H] float32.
        """
        return _recurrent_backend(self.profile.recurrent).recurrent_gates(a, rate, bias, floor)

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, layout: AttentionLayout,
        states: Carried | None,
    ) -> Tensor:  # fmt: skip
        """A state [K, V] for each head, which tokens read, one after the other: S <- decay S + k (beta value)^T.

        The value is v, or v - S^T k where it corrects what the faded state has for that key (the delta rule); the
        result is S^T q. q, k [T, G, K], v [T, H, V], decay and beta [T, H] -> [T, H, V] float32. `states` [R, H, K, V].
        """
        return _recurrent_backend(self.profile.recurrent).scan(q, k, v, decay, beta, corrects, layout, states)

    def index_weights(self, x: Tensor, weight: Tensor) -> Tensor:
        """What an indexer's heads weigh: sums in float32. [T, K], [H, K] -> [T, H]; without a gradient."""
        return _indexer_backend(self.profile.indexer).index_weights(x, weight)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Of an indexer's keys; without a gradient. [T, D] -> [T, D]."""
        return _indexer_backend(self.profile.indexer).layer_norm(x, weight, bias, eps)

    def select(
        self, q: Tensor, k: Tensor, weights: Tensor, layout: AttentionLayout, scale: float, count: int
    ) -> Tensor:
        """The `count` positions up to its own that matter most to each query; without a gradient.

        Position j scores the sum over heads, in order, of weights[h] relu(q[h] . k[j] scale). Value descending, index
        ascending; −0 is +0 and NaN −inf. q [T, H, D], k [slots, 1, D], weights [T, H] float32 -> [T, count] int64,
        ascending, then −1.
        """
        return _indexer_backend(self.profile.indexer).select(q, k, weights, layout, scale, count)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits of the vocabulary, as `token_logprob` makes them. hidden [T, K], weight [V, K] -> [T, V] float32."""
        return self._logits(hidden, weight)

    def token_logprob(self, hidden: Tensor, weight: Tensor, targets: Tensor, warp: LogitsWarp) -> tuple[Tensor, Tensor]:
        """Logprob of each target under the warped distribution, and that distribution's entropy in nats.

        hidden [T, K], weight [V, K], targets [T] int64 -> ([T] float32, [T] float32), both differentiable.
        """
        return self._token_logprob(hidden, weight, targets, warp)

    def token_redraw(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, warp: LogitsWarp, seeds: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`token_logprob`, and beside it, of the same logits and without a gradient, what `sample` did there.

        Two results more: each target's raw logprob [T] float32, and the token [T] int64 that (seed, position) draws;
        −1 where nothing is drawn: without seeds [T], for a negative one, and under a profile whose sampler is not ours.
        """
        if self.profile.token_logprob == "rlloop":
            return logprob.token_redraw(hidden, weight, targets, warp, seeds, positions)
        logprobs, entropies = self.token_logprob(hidden, weight, targets, warp)
        with torch.no_grad():
            raw = self.token_logprob(hidden, weight, targets, LogitsWarp())[0]
        return logprobs, entropies, raw, torch.full_like(targets, -1)

    def score_logits(self, logits: Tensor, targets: Tensor, warp: LogitsWarp) -> tuple[Tensor, Tensor]:
        """`token_logprob` of logits [T, V] that are made already; without a gradient."""
        if self.profile.token_logprob == "rlloop":
            return logprob.score_logits(logits, targets, warp)
        every = stock.warped(logits, warp).log_softmax(-1)
        return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every.nan_to_num(neginf=0.0)).sum(-1)

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
