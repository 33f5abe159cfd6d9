"""Dataclasses that describe a decoder's shape, with one set of names for all families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlloop.numerics.routing import Routing


@dataclass(frozen=True)
class LinearScaling:
    """Rope positions divided by a factor (rope_type `linear`; Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


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
    attention_factor: float  # multiplies cos and sin
    truncate: bool
    score_factor: float = 1.0  # multiplies the scores of latent attention


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    share: float = 1.0  # fraction of a head's width, from the first number on, that is rotated; 0: no rope
    # Of positions with three axes (time, height, width), the frequencies that turn by each; they alternate. None: one.
    sections: tuple[int, ...] | None = None


@dataclass(frozen=True)
class MixtureConfig:
    """Mixture-of-experts layers."""

    num_experts: int
    expert_size: int  # hidden width of one expert
    routing: Routing
    layers: tuple[int, ...]  # that have experts; the others are dense
    shared_size: int = 0  # hidden width of the expert that every token goes to; 0: there is none
    bias: bool = False  # experts are ranked by score plus bias (DeepSeek's e_score_correction_bias)
    exact_gate: bool = False  # the family's gate is float32 by definition
    shared_gate: bool = False  # a sigmoid gate scales the shared expert's output
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
    interleaved: bool  # rope pairs neighbours, not halves
    layers: tuple[int, ...]  # that have an indexer; the others reuse the selection of the nearest one below


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention."""

    q_rank: int | None  # None: queries are projected from the hidden state directly
    kv_rank: int
    nope_dim: int  # of a head's query and key, without rope
    rope_dim: int
    v_dim: int
    scale: float
    interleaved: bool  # rope pairs neighbours, not halves
    indexer: IndexerConfig | None = None


@dataclass(frozen=True)
class DeltaConfig:
    """Gated delta networks, in place of attention in some layers."""

    num_heads: int  # value heads
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # taps of the causal convolution
    layers: tuple[int, ...]  # that are recurrent; the others have attention


@dataclass(frozen=True)
class MambaConfig:
    """Mamba-2 layers."""

    num_heads: int
    head_dim: int
    num_groups: int  # heads of one group share B and C
    state_dim: int
    conv_width: int
    conv_bias: bool
    bias: bool  # of the projections
    least_step: float  # lower bound of the time step


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower: one feature for each `merge_size` x `merge_size` patches of an image."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    channels: int
    patch_size: int  # pixels of a patch's side
    temporal_patch_size: int  # frames of a patch; an image is as many times the same frame
    merge_size: int
    out_size: int  # width of a feature
    side: int  # of the square table of learned positions, which each image's grid interpolates
    deepstack: tuple[int, ...]  # blocks whose output is a feature, too; layer i of the decoder adds the i-th
    rope_theta: float
    image_token_id: int  # the placeholder
    video_token_id: int | None = None  # that of videos, which rlloop does not read
    # [channels, 256] float32: what the folder's image processor makes of each byte; None: it has none, or no folder
    numbers: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def placeholders(self) -> dict[str, int]:
        """Ids that stand for content other than text, by their names in config.json."""
        ids = {"image_token_id": self.image_token_id, "video_token_id": self.video_token_id}
        return {name: id for name, id in ids.items() if id is not None}

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder: what `transformer.Model` is built from."""

    architecture: str  # Hugging Face's name, a key of `families.FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False  # queries and keys are normed a head at a time, before the rope
    whole_norm: bool = False  # they are normed over all heads at once
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
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
    blocks: tuple[str, ...] | None = (
        None  # the single block of each layer: linear_attention, full_attention, moe or mlp
    )
    sinks: bool = False  # each head has a learned score that takes softmax mass and has no value
    window: int = 0  # tokens of the sliding window
    windowed: tuple[int, ...] = ()  # layers that have one
    output_gate: bool = False  # attention's output is gated by the hidden state
    centred_norms: bool = False  # a norm scales by 1 + weight
    vision: VisionConfig | None = None  # of a model that reads images
    further_layers: int = field(default=0, compare=False)  # multi-token-prediction layers in the files, left out
    left_out: Mapping[str, str] = field(default_factory=dict, compare=False)  # other parts, and their tensors' prefixes
    quantization: Any = field(default=None, repr=False, compare=False)  # quantization_config, of packed weights
    raw: Mapping[str, Any] = field(repr=False, compare=False)  # the content of config.json

    @property
    def attention_layers(self) -> tuple[int, ...]:
        if self.blocks is not None:
            return tuple(layer for layer, kind in enumerate(self.blocks) if kind == "full_attention")
        without = () if self.delta is None else self.delta.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in without)

    @property
    def rope_dim(self) -> int:
        return int(self.head_dim * self.rope.share) if self.latent is None else self.latent.rope_dim
