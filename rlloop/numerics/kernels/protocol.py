"""The functions that a backend's package has, with their shapes.

They are plain functions on tensors of one device: no gradients (unless said), no schemas. `rlloop.numerics.operators`
calls them, and `docs/numerics.md` says what each sums, in which order, and rounds when. A backend may leave some out:
operators then raise NotImplementedError with the name of what is missing.

Shapes: T flat tokens, H query heads, G key-value heads, D head width, S sequences, V vocabulary, E experts, k of them a
token, R rows sorted by group. Offsets, ids and positions are int64. Tensors need not be contiguous unless said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.kernels.protocol_fused import FusedKernels
from rlloop.numerics.layout import AdapterSlots, AttentionLayout, Factors
from rlloop.numerics.packed import PackedWeight


class SamplePart(Protocol):
    def __call__(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, settings: Tensor, banned_start: Tensor,
        banned_ids: Tensor, first: int, gather: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`Kernels.sample` of a vocabulary that ranks share, of rows at temperature 1 without truncation
        or bans; logits stay where they are.

        logits [T, V of this rank] are whole blocks of `VOCABULARY_BLOCK` from token `first` on. `gather` joins what
        ranks measured, [T, 2, 3, B of this rank] float32 -> [T, 2, 3, B]. -> (ids, logprobs), each [T]; −1 and NaN
        where the token is another rank's, or a row holds no distribution.
        """
        ...


class Kernels(FusedKernels, Protocol):
    """One backend. `rlloop.numerics.kernels.cpu` has every function."""

    # Products ------------------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K], weight [N, K], bias [N] -> [T, N] in the type of x, rounded once."""
        ...

    def linear_float32(self, x: Tensor, weight: Tensor) -> Tensor:
        """The float32 sums of `linear`. [T, K], [N, K] -> [T, N] float32."""
        ...

    def product(self, rows: Tensor, by_row: bool, lanes: Tensor, lanes_by_row: bool, dtype: torch.dtype) -> Tensor:
        """For gradients: rows [M, K] times lanes [N, K] -> [M, N]. Not `by_row`: rows are [K, M]; so for lanes."""
        ...

    def sum_of_rows(self, x: Tensor) -> Tensor:
        """For gradients of what every token reads: [T, N] -> [N]."""
        ...

    def squares_of_rows(self, x: Tensor) -> Tensor:
        """Sums of squares, for norms of gradients: [N, K] float32 or float64 -> [N] float64.

        The bits of one row depend on nothing else.
        """
        ...

    @property
    def wide_sum(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Two gradients of one 16-bit type -> their sum in float32, into which they are widened first."""
        ...

    def embedding_backward(self, grad: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
        """Rows of grad [T, D] added to those of their tokens [T]. -> [V, D] in the type of grad."""
        ...

    def grouped_linear(self, rows: Tensor, weight: Tensor, by_row: bool, offsets: Tensor) -> Tensor:
        """Rows `offsets[g]` up to `offsets[g + 1]` times matrix g. rows [R, K], offsets [G + 1] -> [R, N].

        weight [G, N, K], or [G, K, N] where not `by_row`. Each row has the bits of `linear`.
        """
        ...

    def grouped_rows_gradient(self, rows: Tensor, weight: Tensor, by_row: bool, offsets: Tensor) -> Tensor:
        """As `grouped_linear`, summed as gradients are."""
        ...

    def grouped_weight_gradient(self, left: Tensor, right: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Each group's `left.T @ right`. [R, N], [R, K], offsets [G + 1] -> [G, N, K]; 0 for a group without rows."""
        ...

    # Products whose sums go on over the terms of adapters (z, up, up_by_row, slots, ranks: `layout.AdapterTerms`)

    def adapted_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, z: Tensor, up: Tensor,
        up_by_row: bool, slots: Tensor, ranks: Tensor,
    ) -> Tensor:  # fmt: skip
        """`linear`, in `dtype`: the terms follow the last of K, before the bias and the one rounding."""
        ...

    def adapted_grouped_linear(
        self, rows: Tensor, weight: Tensor, by_row: bool, offsets: Tensor, z: Tensor, up: Tensor, up_by_row: bool,
        slots: Tensor, ranks: Tensor,
    ) -> Tensor:  # fmt: skip
        """`grouped_linear`, likewise."""
        ...

    # Products of 8-bit floats (`numerics.fp8` has the definition): codes are E4M3, scales float32 powers of 2

    def fp8_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, K] -> (codes [T, K], scales [T, ceil(K / 128)])."""
        ...

    def fp8_product(
        self, codes: Tensor, scales: Tensor, weight: Fp8Weight, offsets: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Rows of `fp8_rows` times a weight [N, K]; with offsets one a group, [G, N, K]. -> [T, N] in `dtype`."""
        ...

    def fp8_dequantised(self, codes: Tensor, scales: Tensor, span: int, dtype: torch.dtype) -> Tensor:
        """The weight of codes [..., N, K] in `dtype`, exact where that holds it."""
        ...

    # Norms, activations, positions ---------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., D], weight [D] -> (normed, x + residual or empty, 1 / rms of each row [rows] float32)."""
        ...

    def rms_norm_backward(
        self, stream: Tensor, weight: Tensor, scales: Tensor, grad: Tensor, grad_stream: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`stream` is what was normed, `grad_stream` its own gradient. -> (of it [..., D], of the weight [D])."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """[T, D], [D], [D] -> [T, D]."""
        ...

    def layer_norm_backward(self, x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> (of x, of weight, of bias)."""
        ...

    def gelu(self, x: Tensor, tanh: bool) -> Tensor:
        """`Ops.gelu`."""
        ...

    def gelu_backward(self, x: Tensor, tanh: bool, grad: Tensor) -> Tensor: ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`. Two tensors of one shape."""
        ...

    def silu_mul_backward(self, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """-> (of gate, of up)."""
        ...

    def sigmoid_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`sigmoid(gate) * up`. Two tensors of one shape."""
        ...

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        """x [T, H, D], positions [T], tables [P, D / 2] float32 -> [T, H, D]. Sign −1 turns back, as gradients are."""
        ...

    # Attention -----------------------------------------------------------------------------------------------------

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, context: Tensor, block_start: Tensor,
        block_size: int, scale: float, split: int, window: int, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(out [T, H, Dv], log-sum-exp of the scaled scores [T, H] float32).

        q [T, H, D], k [slots, G, D], v [slots, G, Dv]. `layout.AttentionLayout` says what query_start [S + 1], context
        [S] and block_start [S, B] are, `layout.AttentionMask` what split, window and sinks [H].
        """
        ...

    def attention_backward(
        self, q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
        scale: float, window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Of whole sequences, whose keys and values are the flat tokens. -> (of q, of k, of v)."""
        ...

    def families_backward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, out: Tensor, lse: Tensor, grad: Tensor,
        scale: float, window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`attention_backward` of a layout with families: a prefix's keys and values add up over its own queries, then
        over those of each sequence that goes on from it, in order."""
        ...

    def full_attention(
        self, q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, longest: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`attention` of whole sequences in which each query reads all keys of its own, in both directions. The host
        knows that none has more than `longest`."""
        ...

    def full_attention_backward(
        self, q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """-> (of q, of k, of v)."""
        ...

    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, query_start: Tensor, block_start: Tensor,
        block_size: int, scale: float, split: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`attention` (G is 1) over selected [T, S]: positions ascending, then −1."""
        ...

    def sparse_attention_backward(
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, query_start: Tensor, out: Tensor, lse: Tensor,
        grad: Tensor, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """-> (of q, of k, of v)."""
        ...

    def select(
        self, q: Tensor, k: Tensor, weights: Tensor, layout: AttentionLayout, scale: float, count: int
    ) -> Tensor:
        """`Ops.select`. q [T, H, D], k [slots, 1, D], weights [T, H] float32 -> [T, count] int64."""
        ...

    # Mixture of experts --------------------------------------------------------------------------------------------

    def route(
        self, logits: Tensor, bias: Tensor, given: Tensor, top_k: int, sigmoid: bool, groups: int, top_groups: int,
        normalise: bool, epsilon: float, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`routing.Routing`'s rule: logits [T, E] float32 -> (weights [T, k], chosen [T, k] int64, scores [T, E]).

        An empty `bias` means none, an empty `given` that experts are to be chosen; else given [T, k] are they.
        """
        ...

    def combine(self, slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None, each: bool) -> Tensor:
        """`Ops.combine`. slots [T, k, D], chosen and weights [T, k], shared [T, D] -> [T, D]; `each`: round each."""
        ...

    def combine_backward(self, slots: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """-> (of slots [T, k, D], of weights [T, k])."""
        ...

    # Packed weights (`numerics.packed.PackedWeight`)

    @property
    def READS_PACKED(self) -> Collection[str]:
        """Functions that take packed weights; others get dequantised ones. `gated_experts` without a gradient alone."""
        ...

    @property
    def dequantised(self) -> Callable[[PackedWeight], Tensor] | None:
        """The weight in its type; None: by plain PyTorch."""
        ...

    # Whole operations with gradients of their own, or None: operators make them of the functions above.

    @property
    def adapted_rows(
        self,
    ) -> Callable[[Tensor, Tensor, Tensor | None, torch.dtype, Factors, AdapterSlots], Tensor] | None:
        """`operators.adapted_linear` of rows with slots of their own, in forwards without a gradient."""
        ...

    @property
    def adapted_products(
        self,
    ) -> (
        Callable[
            [Tensor, tuple[Tensor, ...], Tensor | None, torch.dtype, tuple[Factors, ...], AdapterSlots, bool],
            tuple[Tensor, ...] | None,
        ]
        | None
    ):
        """Products of one input with one, two or three adapted weights in few launches, without a gradient: in one
        where rows have one adapter or none (`which.single`). Of two it is their `silu_mul` where the last argument is
        true. It returns None for shapes, types and factors that it has no kernel for.
        """
        ...

    @property
    def gated_experts(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
        """`Ops.experts(x, up, down, chosen)` of gated experts, differentiable, even of no rows."""
        ...

    @property
    def fp8_gated_experts(self) -> Callable[[Tensor, Fp8Weight, Fp8Weight, Tensor], Tensor] | None:
        """The same by weights in 8 bits."""
        ...

    @property
    def head_linear(self) -> Callable[[Tensor, Tensor, bool], Tensor] | None:
        """`Ops.head_linear(x, weight, by_row)`, differentiable, even of no rows."""
        ...

    # Recurrence ----------------------------------------------------------------------------------------------------

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, query_start: Tensor, context: Tensor | None = None,
        states: Tensor | None = None, rows: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [T, C], weight [C, 1, K], bias [C], all float32 -> [T, C]. Reads and leaves `states` where there are."""
        ...

    def causal_conv_backward(
        self, x: Tensor, weight: Tensor, query_start: Tensor, grad: Tensor, of_bias: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of whole sequences. -> (of x [T, C], of the weight [C, 1, K], of a bias [C] or [0])."""
        ...

    def recurrent_gates(self, a: Tensor, rate: Tensor, bias: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        """a [T, H], rate and bias [H], all float32 -> (decay, step), both [T, H]."""
        ...

    def scan_state(self, groups: int, heads: int, key_width: int, width: int) -> tuple[int, ...]:
        """Shape of the float32 numbers that `scan` keeps of a sequence. Those of one that begins are never read."""
        ...

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, query_start: Tensor,
        context: Tensor | None = None, states: Tensor | None = None, rows: Tensor | None = None,
        settled: bool = False,
    ) -> Tensor:  # fmt: skip
        """`Ops.scan` in float32: q, k [T, G, K], v [T, H, V], decay and beta [T, H] -> [T, H, V]."""
        ...

    def scan_backward(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, query_start: Tensor,
        grad: Tensor, begun: Tensor | None = None, of_states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """-> (of q, of k, of v, of decay, of beta).

        `begun` [S, *scan_state]: states that sequences begin with, at a multiple of `layout.SHARED_TILE` tokens; None:
        0. `of_states` [S, H, K, V]: gradients of the states that they end with; those of the begun ones are left there.
        None: 0, and they are not made.
        """
        ...

    # The distribution sampled from. settings [T, 4] float64 are temperature, top-k, top-p and min-p, and row t may not
    # take banned_ids[banned_start[t]:banned_start[t + 1]].

    def token_logprob(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor,
        banned_ids: Tensor, seeds: Tensor | None, positions: Tensor | None, raw: bool, *terms: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """hidden [T, K], weight [V, K] -> (logprobs [T], entropies [T], raw logprobs if asked for, ids if seeded).

        `terms`: z, up, slots and ranks of the head's adapters, or four times None.
        """
        ...

    @property
    def kept_token_logprob(self) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor] | None] | None:
        """`token_logprob` without terms, differentiable, that keeps the logits' gradients; None where it does not."""
        ...

    def token_logprob_backward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor,
        banned_ids: Tensor, entropies: Tensor, grad_logprobs: Tensor, grad_entropies: Tensor, of_weight: bool,
        z: Tensor | None, up: Tensor | None, slots: Tensor | None, ranks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """-> (of hidden [T, K], of weight [V, K] or [0, K] unless `of_weight`, of z and of up or [0])."""
        ...

    def score_logits_backward(
        self, logits: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor,
        entropies: Tensor, grad_logprobs: Tensor, grad_entropies: Tensor, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Of logits [T, V], whose memory may be reused. -> [T, V] in the type that `token_logprob_backward` multiplies,
        where hidden states have type `dtype`."""
        ...

    def logits_rows(self, vocabulary: int) -> int:
        """Rows of logits that `token_logprob` and its backward make at a time."""
        ...

    def sample(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, settings: Tensor, banned_start: Tensor,
        banned_ids: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """logits [T, V] float32 -> (ids, −1 where a row holds no distribution; logprobs; raw logprobs), each [T]."""
        ...

    @property
    def sample_part(self) -> SamplePart | None: ...

    def score_logits(
        self, logits: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """logits [T, V] float32 -> (logprobs [T], entropies [T])."""
        ...
