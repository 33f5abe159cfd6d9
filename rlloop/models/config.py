"""A Hugging Face config.json as the few numbers that the definition needs; anything else that alters it is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlloop.errors import ModelError

# architecture -> (q/k norm, bias on q, k and v)
FAMILIES = {
    "Qwen3ForCausalLM": (True, False),
    "Qwen2ForCausalLM": (False, True),
    "LlamaForCausalLM": (False, False),
}

# Read by `parse_config`, below.
_READ = {
    "architectures", "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "mlp_bias", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "tie_word_embeddings", "use_sliding_window", "vocab_size", "eos_token_id", "initializer_range",
    "partial_rotary_factor",
}  # fmt: skip
# Of no consequence for what the model computes here.
_INERT = {
    "_name_or_path", "attention_dropout", "attn_implementation", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "id2label", "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states",
    "pad_token_id", "pretraining_tp", "problem_type", "return_dict", "torch_dtype", "transformers_version", "use_cache",
    "_attn_implementation_autoset", "unsloth_fixed", "auto_map", "tokenizer_class", "finetuning_task",
}  # fmt: skip


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and, for Llama 3, the smoothed stretching of low frequencies."""

    theta: float
    factor: float = 1.0  # 1: no scaling
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: what `transformer.Model` is built from. `raw` is config.json as it was read."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    raw: dict[str, Any]


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a Hugging Face folder.

    Raises ModelError for a folder or file that is missing, and for whatever this definition does not cover, by name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; give a Hugging Face folder with config.json")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; a Hugging Face model folder is needed")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    generation = folder / "generation_config.json"
    eos = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    return parse_config(raw, eos_token_id=eos)


def parse_config(raw: dict[str, Any], *, eos_token_id: int | list[int] | None = None) -> ModelConfig:
    """config.json's content, checked. `eos_token_id` (of generation_config.json) wins over the one in it."""
    architectures = raw.get("architectures") or [None]
    architecture = architectures[0]
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture} is not supported; supported are {', '.join(FAMILIES)}")
    if unknown := sorted(set(raw) - _READ - _INERT):
        raise ModelError(
            f"config.json has {', '.join(unknown)}, which rlloop does not know for {architecture}: it may change what the "
            "model computes, so it is refused rather than ignored"
        )
    if (act := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"hidden_act {act!r} is not supported; only silu is")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or []):
        raise ModelError("sliding-window attention is not supported; use_sliding_window must be false")
    if raw.get("sliding_window") and architecture == "LlamaForCausalLM":
        raise ModelError("sliding_window is not supported for LlamaForCausalLM")
    qk_norm, qkv_bias = FAMILIES[architecture]
    attention_bias = bool(raw.get("attention_bias", False))
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden // heads
    head_dim = raw.get("head_dim") or default_head_dim
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{heads} heads of width {head_dim} over {kv_heads} key-value heads: the heads must divide, the width be even"
        )
    eos = eos_token_id if eos_token_id is not None else raw.get("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_positions=raw.get("max_position_embeddings", 32768 if qk_norm or qkv_bias else 2048),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias or attention_bias,
        # Llama and Qwen3 put the bias on the output projection too; Qwen2 never does.
        output_bias=attention_bias and not qkv_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        rope=_parse_rope(raw),
        initializer_range=raw.get("initializer_range", 0.02),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        raw=raw,
    )


def _parse_rope(raw: dict[str, Any]) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling`."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported; only 1 is")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "llama3":
        return RopeConfig(
            theta,
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_positions=int(rope["original_max_position_embeddings"]),
        )
    raise ModelError(f"rope type {kind!r} is not supported; supported are default and llama3")
