"""What a decoder is built from, whatever its family calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlloop.numerics.routing import Routing


@dataclass(frozen=True)
class Llama3Scaling:
    """Rope frequencies stretched for a longer context, as Llama 3.1 does (rope_type `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Rope frequencies stretched for a longer context by YaRN (Peng et al. 2023, arXiv:2309.00071)."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float  # of cos and sin
    truncate: bool
    score_factor: float = 1.0  # of the scores of latent attention


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None
    share: float = 1.0  # of a head's width: the first numbers have a rope, the others none; 0: no rope


@dataclass(frozen=True)
class MixtureConfig:
    """Mixture-of-experts layers."""

    num_experts: int
    expert_size: int  # hidden width of one expert
    routing: Routing
    layers: tuple[int, ...]  # which layers have experts; the others are dense
    shared_size: int = 0  # hidden width of the expert that every token goes to; 0: there is none
    bias: bool = False  # experts are ranked by their score plus a bias of their own
    exact_gate: bool = False  # the family's gate is float32 by definition
    shared_gate: bool = False  # a gate says how much the shared expert counts
    gated: bool = True  # experts are `down silu(gate) up`; else `down relu(up) ** 2`
    router_bias: bool = False  # of the gate's logits
    clamp: tuple[float, float] | None = None  # (limit, alpha) of experts as `numerics.routing.Clamped` has them
    latent_size: int | None = None  # experts read and write latents of the hidden state; None: the hidden state itself


@dataclass(frozen=True)
class IndexerConfig:
    """A lightning indexer: which past tokens each query reads."""

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool  # how its rope pairs numbers
    layers: tuple[int, ...]  # that have an indexer; the others read what the one below them selected


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention."""

    q_rank: int | None  # None: queries come from the hidden state at once
    kv_rank: int
    nope_dim: int  # of a head's query and key, without rope
    rope_dim: int
    v_dim: int
    scale: float
    interleaved: bool  # rope pairs neighbours, not halves
    indexer: IndexerConfig | None = None


@dataclass(frozen=True)
class DeltaConfig:
    """Gated delta networks in place of attention."""

    num_heads: int  # of values
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # how many inputs the short convolution reads
    layers: tuple[int, ...]  # that have no attention


@dataclass(frozen=True)
class MambaConfig:
    """Mamba-2 layers."""

    num_heads: int
    head_dim: int
    num_groups: int  # heads of one group share what they write to and read from
    state_dim: int
    conv_width: int
    conv_bias: bool
    bias: bool  # of the projections
    least_step: float


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder: what `transformer.Model` is built from."""

    architecture: str  # Hugging Face's: a key of `families.FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool  # queries and keys are normed a head at a time, before the rope
    whole_norm: bool = False  # they are normed over all heads at once
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tied: bool  # the output projection is the embedding
    initializer_range: float  # standard deviation of a new model's matrices
    eos_token_ids: tuple[int, ...]
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    blocks: tuple[str, ...] | None = None  # layers are one block each: linear_attention, full_attention, moe or mlp
    sinks: bool = False  # each head of attention has a score that takes mass and has no value
    window: int = 0  # the last so many tokens are what the layers of `windowed` read
    windowed: tuple[int, ...] = ()
    output_gate: bool = False  # attention's output is gated by the hidden state
    centred_norms: bool = False  # a norm's weight is what is added to 1
    further_layers: int = field(default=0, compare=False)  # of heads in the files that predict further tokens
    raw: Mapping[str, Any] = field(repr=False, compare=False)  # config.json as it was

    @property
    def attention_layers(self) -> tuple[int, ...]:
        if self.blocks is not None:
            return tuple(layer for layer, kind in enumerate(self.blocks) if kind == "full_attention")
        without = () if self.delta is None else self.delta.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in without)

    @property
    def rope_dim(self) -> int:
        return int(self.head_dim * self.rope.share) if self.latent is None else self.latent.rope_dim
