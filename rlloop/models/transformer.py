"""The one definition: training, prefill and decode are this code with other metadata.

Every number is made by an operation of `rlloop.numerics`; what is written here is only which operation follows which.
Parameters have Hugging Face's names. Shapes: T flat tokens, D hidden width, H heads, G key-value heads, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlloop.models.config import ModelConfig, RopeConfig
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import Ops, ops_for
from rlloop.numerics.profile import NumericsProfile


class Cache(Protocol):
    """Where an engine keeps keys and values between steps."""

    def write(self, layer: int, **tensors: Tensor) -> tuple[Tensor, ...]:
        """Puts this step's tensors [T, ...] into their slots; returns the whole stores [slots, ...], in order."""
        ...


class Linear(nn.Module):
    """Holds a weight [N, K] and perhaps a bias [N]; the product is the operations' business."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Weight(nn.Module):
    """A norm's or an embedding's weight under its Hugging Face name."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eps = layer, config.rms_norm_eps
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, width, config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, config.output_bias)
        self.q_norm = Weight(config.head_dim) if config.qk_norm else None
        self.k_norm = Weight(config.head_dim) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rope: tuple[Tensor, Tensor],
        layout: AttentionLayout,
        cache: Cache | None,
        ops: Ops,
    ) -> Tensor:
        q, k, v = (
            project(x, ops).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, _ = ops.rms_norm(q, self.q_norm.weight, self.eps)
            k, _ = ops.rms_norm(k, self.k_norm.weight, self.eps)
        q, k = ops.rope(q, positions, *rope), ops.rope(k, positions, *rope)
        keys, values = (k, v) if cache is None else cache.write(self.layer, k=k, v=v)
        return self.o_proj(ops.attention(q, keys, values, layout, self.scale).flatten(1), ops)


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return self.down_proj(ops.silu_mul(self.gate_proj(x, ops), self.up_proj(x, ops)), ops)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm = Weight(config.hidden_size)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Weight(config.hidden_size)
        self.mlp = Mlp(config)

    def forward(
        self,
        delta: Tensor,
        stream: Tensor | None,
        positions: Tensor,
        rope: tuple[Tensor, Tensor],
        layout: AttentionLayout,
        cache: Cache | None,
        ops: Ops,
    ) -> tuple[Tensor, Tensor]:
        """`delta` is what the layer below adds to `stream`; so is the first result to the second."""
        x, stream = ops.rms_norm(delta, self.input_layernorm.weight, self.eps, stream)
        attended = self.self_attn(x, positions, rope, layout, cache, ops)
        x, stream = ops.rms_norm(attended, self.post_attention_layernorm.weight, self.eps, stream)
        return self.mlp(x, ops), stream


class Decoder(nn.Module):
    """Hugging Face's `model.` prefix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = Weight(config.hidden_size)


class RopeTable(nn.Module):
    """cos and sin, [2, positions, head_dim / 2]: float32 whatever the model is cast to, and never in a checkpoint."""

    table: Tensor

    def __init__(self, config: ModelConfig, device: str | None = None) -> None:
        super().__init__()
        table = torch.stack(rope_table(config.rope, config.head_dim, config.max_positions, device))
        self.register_buffer("table", table, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = self.table
        super()._apply(fn, recurse)
        self.table = exact.to(self.table.device)
        return self


class Model(nn.Module):
    """A decoder of the Qwen3, Qwen2.5 or Llama 3 family. Its own parameters get the gradient.

    `load_model` and `new_model` make one; here its parameters are empty.

    `checkpoint_layers = True` recomputes each layer in the backward pass instead of keeping its activations; the same
    operations run again, so the gradient keeps its bits.
    """

    def __init__(self, config: ModelConfig, profile: NumericsProfile | None = None) -> None:
        super().__init__()
        self.config = config
        self.profile = profile or NumericsProfile()
        self.ops = ops_for(self.profile)
        self.checkpoint_layers = False
        self.model = Decoder(config)
        self.lm_head = None if config.tied else Weight(config.vocab_size, config.hidden_size)
        self.source_path: Path | None = None  # the folder it was loaded from
        self.rope = RopeTable(config)

    @property
    def head(self) -> nn.Parameter:
        """The output projection [V, D]: the embedding itself where the two are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def cache_spec(self) -> list[dict[str, tuple[int, ...]]]:
        """What each layer keeps of a token: name -> shape, in the order in which `Cache.write` returns the stores."""
        shape = (self.config.num_kv_heads, self.config.head_dim)
        return [{"k": shape, "v": shape} for _ in range(self.config.num_layers)]

    def with_profile(self, profile: NumericsProfile) -> Model:
        """The same parameters under other arithmetic: a view, not a copy."""
        twin = copy.copy(self)
        twin.profile, twin.ops = profile, ops_for(profile)
        return twin

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the bits, the weights apart. JSON values."""
        facts = {
            "architecture": self.config.architecture,
            "dtype": str(self.dtype).removeprefix("torch."),
            "profile": self.profile.as_dict(),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "instruction_set": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "versions": {name: version(name) for name in ("rlloop", "torch", "numba", "llvmlite")},
        }
        # Ours never depend on them; stock operations do.
        return facts if self.profile.holds_contract else {**facts, "threads": torch.get_num_threads()}

    def hidden(self, tokens: Tensor, positions: Tensor, layout: AttentionLayout, cache: Cache | None = None) -> Tensor:
        """Last hidden states of flat tokens, normed. tokens and positions [T] int64 -> [T, D].

        Without a cache the layout must be the trainer's (`AttentionLayout.of_sequences`).
        """
        rope = (self.rope.table[0], self.rope.table[1])
        delta, stream = nn.functional.embedding(tokens, self.model.embed_tokens.weight), None
        for layer in self.model.layers:
            args = (delta, stream, positions, rope, layout, cache, self.ops)
            if self.checkpoint_layers and torch.is_grad_enabled():
                delta, stream = checkpoint(layer, *args, use_reentrant=False)
            else:
                delta, stream = layer(*args)
        return self.ops.rms_norm(delta, self.model.norm.weight, self.config.rms_norm_eps, stream)[0]


def rope_table(rope: RopeConfig, head_dim: int, positions: int, device: str | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim / 2] in float32, with transformers' order of operations.

    Llama 3's scaling divides frequencies of wavelengths above `original_positions / low_freq_factor` by `factor`,
    leaves those below `original_positions / high_freq_factor`, and blends between (Meta's llama-models,
    `apply_scaling`).
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    frequency = 1.0 / (rope.theta**steps)
    if (scaling := rope.scaling) is not None:
        wavelength = 2 * math.pi / frequency
        ratio = scaling.original_positions / wavelength
        smooth = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blended = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        low = wavelength > scaling.original_positions / scaling.low_freq_factor
        high = wavelength < scaling.original_positions / scaling.high_freq_factor
        frequency = torch.where(low, frequency / scaling.factor, torch.where(high, frequency, blended))
    angle = torch.outer(torch.arange(positions, device=device).float(), frequency)
    return angle.cos(), angle.sin()
