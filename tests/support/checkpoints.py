"""Random Hugging Face checkpoints of every supported family, made by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # small enough that frequencies are stretched, blended and left alone
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
    "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
# family -> (configuration class, what is its own). Heads are grouped; Qwen3's are wider than hidden_size / heads.
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen2": (Qwen2Config, {}),
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **MIXTURE, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
# Fewer positions than the sequences have; enough heads that no two positions have the same score.
INDEXER = {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 16}
MIXTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, {**MIXTURE, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True}),
    "deepseek_v3": (DeepseekV3Config, LATENT),
    "deepseek_v32": (DeepseekV32Config, {**LATENT, **INDEXER}),
    "glm_moe_dsa": (GlmMoeDsaConfig, {
        **LATENT, **INDEXER, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"],
    }),
    "minimax_m2": (MiniMaxM2Config, {
        "num_experts_per_tok": 2, "num_local_experts": 8, "intermediate_size": 24, "head_dim": 16, "rotary_dim": 8,
    }),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, {
        **MIXTURE, "head_dim": 32, "num_experts": 8, "shared_expert_intermediate_size": 20, "linear_key_head_dim": 12,
        "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    "nemotron_h": (NemotronHConfig, {
        **MIXTURE, "head_dim": 16, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 12, "mamba_num_heads": 4, "mamba_head_dim": 20, "n_groups": 2, "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 20, "moe_latent_size": 32,
    }),
    "gpt_oss": (GptOssConfig, {
        "num_experts_per_tok": 2, "num_local_experts": 8, "intermediate_size": 24, "head_dim": 16, "sliding_window": 20,
        "swiglu_limit": 1.0, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32,
            "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
        },
    }),
}  # fmt: skip
EVERY = {**FAMILIES, **MIXTURES}
RECURRENT = ("qwen3_5_moe", "nemotron_h")  # layers that keep a state
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
}
OURS = (
    (".mlp.e_score", ".mlp.gate.e_score"), (".embeddings.", ".embed_tokens."), (".norm_f.", ".norm."),
    (".mlp.router.", ".mlp.gate."),
)  # fmt: skip


def by_our_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' tensors in memory, by rlloop's names."""
    named = {}
    for name, tensor in tensors.items():
        for theirs, ours in OURS:
            name = name.replace(theirs, ours)
        named[name] = tensor
    return named


def random_model(family: str = "qwen3", *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """transformers' own model, float32. Every parameter is random: norms and biases are not ones and zeros."""
    make, own = EVERY[family]
    model = AutoModelForCausalLM.from_config(make(**{**SIZES, **own, **config}))
    return drawn(model, seed, centred=family == "qwen3_5_moe")


def drawn(model: PreTrainedModel, seed: int, *, centred: bool = False) -> PreTrainedModel:
    """The model with every parameter drawn; `centred`: norms are stored as what is added to 1, but for recurrent
    layers'."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [(name, tensor) for name, tensor in model.named_buffers() if "e_score" in name]
        for name, parameter in [*model.named_parameters(), *biases]:
            noise = torch.randn(parameter.shape, generator=generator)
            if "e_score" in name:
                parameter.copy_(0.1 * noise)
            elif ".gate.weight" in name or ".router.weight" in name:
                parameter.copy_(noise * 4 / parameter.shape[-1] ** 0.5)
            elif "norm" in name:
                parameter.copy_((0 if centred and "linear_attn" not in name else 1) + 0.2 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def make_checkpoint(
    folder: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    **config: Any,
) -> PreTrainedModel:
    """Write `random_model` of the same arguments, rounded to `dtype`; `max_shard_size="30KB"` makes shards."""
    model = random_model(family, seed=seed, **config).to(dtype)
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    return model
