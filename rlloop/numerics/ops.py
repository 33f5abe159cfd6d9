"""The operations a model is written in, dispatched by its profile. Models use this module only.

Shapes: T flat tokens, H query heads, G key-value heads, D head width, V vocabulary, E experts, k of them a token.
Compute dtype is that of the tensors; logits, logprobs, scores and weights of experts are float32.
"""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Self

import torch
from torch import Tensor

from rlloop.numerics import operators, reference, stock
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.fused_ops import FusedOps
from rlloop.numerics.implementations import OPERATIONS, implementation
from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.layout import (
    AdapterSlots,
    AttentionLayout,
    AttentionMask,
    Factors,
    LogitsProcessing,
    RecurrentState,
)
from rlloop.numerics.profile import NumericsProfile
from rlloop.numerics.routing import Clamped, Routing
from rlloop.numerics.tp_reduction import sum_over_ranks


class Ops(FusedOps):
    """The operations under one `NumericsProfile`."""

    def __init__(self, profile: NumericsProfile) -> None:
        self.profile = profile
        self._as = SimpleNamespace()
        for knob, names in OPERATIONS.items():
            vars(self._as).update((name, implementation(getattr(profile, knob), name)) for name in names)
        self._split = 0 if profile.attention_splits == "default" else int(profile.attention_splits)
        if self._split and profile.attention in ("rlloop", "reference"):
            self._as.sparse_attention = functools.partial(self._as.sparse_attention, split=self._split)
        self._ranks = int(profile.tp_segments)
        self._rank_sums = functools.partial(implementation(profile.linear, "router_logits"), exact=True)
        self._mask = AttentionMask(self._split)
        self._fuses = all(getattr(profile, knob) == "rlloop" for knob in OPERATIONS)
        self.adapters: AdapterSlots | None = None  # the rows'; None: no product has any

    def with_adapters(self, adapters: AdapterSlots | None) -> Self:
        """The same operations, whose products have the rows' adapters; None: none has one."""
        if adapters is self.adapters:
            return self
        view = copy.copy(self)
        view.adapters = adapters
        return view

    def row_slots(self, x: Tensor) -> Tensor | None:
        """[T] int64 the slots of the adapters of x [T, ...]; None where all rows have one adapter, or none."""
        return None if self.adapters is None or self.adapters.uniform else self.adapters.slots(x)

    def adapted(self, weight: Tensor | None) -> tuple[Factors, AdapterSlots] | None:
        """The factors of a weight and which each row has; None where it has none."""
        if self.adapters is None or weight is None or (factors := self.adapters.of(weight)) is None:
            return None
        return factors, self.adapters

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, across: bool = False) -> Tensor:
        """`x @ weight.T + bias`. x [T, K], weight [N, K], bias [N] -> [T, N].

        `across`: tensor-parallel ranks share the K terms. `profile.tp_segments` says how many, `all_reduce` how their
        sums are added.
        """
        if isinstance(weight, Fp8Weight):
            return operators.fp8_linear(x, weight, bias)
        if adapted := self.adapted(weight):
            return operators.adapted_linear(x, weight, bias, *adapted, x.dtype)
        if not across or self._ranks == 1:
            return self._as.linear(x, weight, bias)
        rounded = self._as.linear if self.profile.all_reduce == "rounded_chain" else None
        return sum_over_ranks(x, weight, bias, self._ranks, rounded, self._rank_sums)

    def unread_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, across: bool = False) -> Tensor:
        """`linear`, where nothing reads the result and only its gradient is wanted: its values may be undefined."""
        if type(self) is not Ops or self.profile.linear != "rlloop" or (across and self._ranks > 1):
            return self.linear(x, weight, bias, across)
        if isinstance(weight, Fp8Weight):
            return operators.fp8_linear(x, weight, bias, unread=True)
        if adapted := self.adapted(weight):
            return operators.adapted_linear(x, weight, bias, *adapted, x.dtype, unread=True)
        return operators.unread_linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Root-mean-square norm of `x + residual`. x [..., D] -> (normed [..., D], the sum itself [..., D]).

        `profile.residual_norm` says whether the norm reads the sum as it is stored, or in float32.
        """
        if residual is None or self.profile.residual_norm == "rounded":
            return self._as.rms_norm(x, weight, eps, residual)
        total = reference.widen(x) + reference.widen(residual)
        return self._as.rms_norm(total, weight, eps, None)[0].to(x.dtype), total.to(x.dtype)

    @property
    def norms_sums(self) -> bool:
        """True if `norm_of_sum` gives what `rms_norm` of the two terms does."""
        return self.profile.rms_norm == "rlloop" and self.profile.residual_norm == "rounded"

    def norm_of_sum(self, total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`rms_norm` of a residual sum [T, D] that exists already, with the bits of the gradient. Only if `norms_sums`.
        The rest of the layer has to go on from the sum that it returns."""
        return operators.norm_of_sum(total, weight, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`. [T, F] each -> [T, F]."""
        return self._as.silu_mul(gate, up)

    def sigmoid_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`sigmoid(gate) * up`. Two tensors of one shape."""
        return self._as.sigmoid_mul(gate, up)

    def gelu(self, x: Tensor, tanh: bool) -> Tensor:
        """`x (1 + erf(x / sqrt 2)) / 2` of any shape (Hendrycks and Gimpel, arXiv:1606.08415), or with `tanh` their
        approximation."""
        return self._as.gelu(x, tanh)

    def relu_squared(self, x: Tensor) -> Tensor:
        """`max(x, 0) ** 2`, the same in every implementation: one exact choice and one rounded product a number."""
        return x.relu().square()

    def cached(self, x: Tensor) -> Tensor:
        """Keys, values or latents as the cache stores them: unchanged. Subclasses may round them."""
        return x

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding, halves paired. x [T, H, D], positions [T] int64, tables [P, D / 2] float32 -> [T, H, D]."""
        return self._as.rope(x, positions, cos, sin)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, sinks: Tensor | None = None,
        window: int = 0,
    ) -> Tensor:  # fmt: skip
        """Causal attention of ragged sequences, with the sinks [H] and the window of an `AttentionMask`. q [T, H, D];
        k, v [slots, G, D] -> [T, H, D]."""
        mask = self._mask if sinks is None and not window else AttentionMask(self._split, window, sinks)
        return self._as.attention(q, k, v, layout, scale, mask)

    def full_attention(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
        """Attention in both directions within each sequence (`AttentionLayout.of_sequences`): the patches of an image.
        [T, H, D] each -> [T, H, D]."""
        return self._as.full_attention(q, k, v, layout, scale)

    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, layout: AttentionLayout, scale: float
    ) -> Tensor:
        """`attention` in which each query reads its selected positions only, in ascending order.

        G is 1; selected [T, S] int64, ascending, then −1. Where all positions are selected, the bits of `attention`.
        """
        return self._as.sparse_attention(q, k, v, selected, layout, scale)

    def head_linear(self, x: Tensor, weight: Tensor, by_row: bool, part_of: Tensor | None = None) -> Tensor:
        """Each head times its own matrix. x [T, H, K], weight [H, N, K] (if not by_row [H, K, N]) -> [T, H, N].

        `part_of`: the parameter that `weight` has the last rows of each head of, or, if not by_row, the first.
        """
        if adapted := self.adapted(part_of):
            return operators.adapted_head_linear(x, weight, by_row, *adapted)
        return self._as.head_linear(x, weight, by_row)

    def router_logits(self, x: Tensor, weight: Tensor, exact: bool, bias: Tensor | None = None) -> Tensor:
        """The gate's sums in float32, with `bias` [E]; where not exact, rounded to the compute type before and after
        the bias. [T, K], [E, K] -> [T, E]."""
        return self._as.router_logits(x, weight, exact, bias)

    def route(
        self, logits: Tensor, bias: Tensor | None, routing: Routing, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose each token's experts and their weights. logits [T, E], bias [E], both float32.

        `given` [T, k] is a choice to weigh in place of one to make (replay). Returns (weights [T, k], chosen [T, k]
        int64, the scores of all experts [T, E]); weights and scores are differentiable.
        """
        return self._as.route(logits, bias, routing, given)

    def experts(
        self, x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool = True, clamped: Clamped | None = None
    ) -> Tensor:
        """Outputs of each token's chosen experts: `down @ silu_mul(gate, up)`, or `down @ relu_squared(up)`.

        x [T, D], up [E, 2F, D] with the gate first (not gated: [E, F, D]), down [E, D, F], chosen [T, k] -> [T, k, D].
        `clamped` experts have other shapes and another activation. A choice of E stands for no expert, and its output
        is undefined (rlloop's operations, in forwards without a gradient).
        """
        if isinstance(up, Fp8Weight) and isinstance(down, Fp8Weight):
            return operators.fp8_experts(x, up, down, chosen, gated)
        of_up, of_down = self.adapted(up), self.adapted(down)
        if self.adapters is not None and (of_up or of_down):
            factors = (of_up and of_up[0], of_down and of_down[0])
            return operators.adapted_experts(x, up, down, chosen, gated, clamped, factors, self.adapters)
        return self._as.experts(x, up, down, chosen, gated, clamped)

    def combine(self, slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
        """The experts' weighted sum, in ascending order of expert, then `shared` [T, D]. slots [T, k, D] -> [T, D].

        `profile.expert_combine` says when it is rounded: once at the end, or each product and each sum.
        """
        return self._as.combine(slots, chosen, weights, shared, self.profile.expert_combine == "bf16_each")

    def unread_combine(self, slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
        """`combine`, as `unread_linear` is `linear`."""
        if type(self) is not Ops or self.profile.combine != "rlloop":
            return self.combine(slots, chosen, weights, shared)
        return operators.unread_combine(slots, chosen, weights, shared, self.profile.expert_combine == "bf16_each")

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layout: AttentionLayout, states: RecurrentState | None
    ) -> Tensor:
        """Each channel's last K inputs, weighed, oldest first. x [T, C], weight [C, 1, K], bias [C] -> [T, C] float32.

        `states` [R, K - 1, C]: the inputs that a sequence ends with.
        """
        return self._as.causal_conv(x, weight, bias, layout, states)

    def recurrent_gates(self, a: Tensor, rate: Tensor, bias: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
        """A head's step `max(softplus(a + bias), floor)`, and its decay `exp(-exp(rate) step)`.

        a [T, H], rate and bias [H] -> (decay, step), both [T, H] float32.
        """
        return self._as.recurrent_gates(a, rate, bias, floor)

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, layout: AttentionLayout,
        states: RecurrentState | None,
    ) -> Tensor:  # fmt: skip
        """A state [K, V] for each head, which tokens read, one after the other: S <- decay S + k (beta value)^T.

        The value is v, or v - S^T k where it corrects what the faded state has for that key (the delta rule); the
        result is S^T q. q, k [T, G, K], v [T, H, V], decay and beta [T, H] -> [T, H, V] float32. `states` [R, ...], of
        the shape of `scan_state`.
        """
        return self._as.scan(q, k, v, decay, beta, corrects, layout, states)

    def scan_state(self, groups: int, heads: int, key_width: int, width: int, device: torch.device) -> tuple[int, ...]:
        """Shape of the float32 numbers that `scan` keeps of a sequence; [H, K, V] but in rlloop's kernels for GPUs."""
        if self.profile.recurrent == "rlloop":
            return kernels_for(device).scan_state(groups, heads, key_width, width)
        return heads, key_width, width

    def index_weights(self, x: Tensor, weight: Tensor) -> Tensor:
        """Weights of an indexer's heads, as float32 sums. [T, K], [H, K] -> [T, H]; without a gradient."""
        return self._as.index_weights(x, weight)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer norm. x [T, D], weight and bias [D] -> [T, D]."""
        return self._as.layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Layer norm of `x + residual`, which is rounded before. x [T, D] -> (normed [T, D], the sum [T, D])."""
        if self.fuses and (work := kernels_for(x.device).add_layer_norm) is not None:
            return work(x, residual, weight, bias, eps)
        total = x + residual
        return self.layer_norm(total, weight, bias, eps), total

    def select(
        self, q: Tensor, k: Tensor, weights: Tensor, layout: AttentionLayout, scale: float, count: int
    ) -> Tensor:
        """The `count` positions up to its own that matter most to each query; without a gradient.

        Position j scores the sum over heads, in order, of weights[h] relu(q[h] . k[j] scale). Value descending, index
        ascending; −0 is +0 and NaN −inf. q [T, H, D], k [slots, 1, D], weights [T, H] float32 -> [T, count] int64,
        ascending, then −1.
        """
        return self._as.select(q, k, weights, layout, scale, count)

    def logits(self, hidden: Tensor, weight: Tensor, part_of: Tensor | None = None) -> Tensor:
        """Logits of the vocabulary, as `token_logprob` makes them: hidden [T, K], weight [V, K] -> [T, V] float32.
        `part_of`: the parameter whose rows `weight` is, where it is another tensor."""
        if adapted := self.adapted(weight if part_of is None else part_of):
            return operators.logits(hidden, weight, adapted)
        return self._as.logits(hidden, weight)

    def token_logprob(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, processing: LogitsProcessing
    ) -> tuple[Tensor, Tensor]:
        """Logprob of each target under the processed distribution, and that distribution's entropy in nats.

        hidden [T, K], weight [V, K], targets [T] int64 -> ([T] float32, [T] float32), both differentiable.
        """
        if adapted := self.adapted(weight):
            return operators.token_logprob(hidden, weight, targets, processing, adapted)
        return self._as.token_logprob(hidden, weight, targets, processing)

    def token_redraw(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, processing: LogitsProcessing, seeds: Tensor | None,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """`token_logprob`, and from the same logits, without a gradient, each target's raw logprob [T] float32 and the
        token [T] int64 that (seed, position) draws; −1 where nothing is drawn: without seeds [T], for a negative one,
        and under a profile whose sampler is not ours."""
        if self.profile.token_logprob == "rlloop":
            return operators.token_redraw(hidden, weight, targets, processing, seeds, positions, self.adapted(weight))
        logprobs, entropies = self.token_logprob(hidden, weight, targets, processing)
        with torch.no_grad():
            raw = self.token_logprob(hidden, weight, targets, LogitsProcessing())[0]
        return logprobs, entropies, raw, torch.full_like(targets, -1)

    def score_logits(self, logits: Tensor, targets: Tensor, processing: LogitsProcessing) -> tuple[Tensor, Tensor]:
        """`token_logprob` of logits [T, V] that are made already; without a gradient."""
        if self.profile.token_logprob == "rlloop":
            return operators.score_logits(logits, targets, processing)
        every = stock.processed(logits, processing).log_softmax(-1)
        return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every.nan_to_num(neginf=0.0)).sum(-1)

    def sample(
        self, logits: Tensor, processing: LogitsProcessing, seeds: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw one token a row with the random number that (seed, position) names.

        logits [T, V] float32, seeds and positions [T] int64 -> (ids [T] int64, logprobs [T], raw logprobs [T] float32).
        `logprobs` has the bits of `token_logprob` of the same rows; the raw ones are at temperature 1, untruncated.
        """
        return self._as.sample(logits, processing, seeds, positions)


@functools.cache
def ops_for(profile: NumericsProfile) -> Ops:
    """The operations of a profile. What departs from it on purpose is a subclass, given to `Model.with_profile`."""
    return Ops(profile)
