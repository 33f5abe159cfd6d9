"""Random mixtures on a GPU, and requests for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlloop.models import new_model
from rlloop.types import SamplingParams

SIZES = {
    "vocab_size": 997, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 8,
    "max_position_embeddings": 2048, "initializer_range": 0.08, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 96}


LATENT = {
    **EXPERTS, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
INDEXER = {"index_topk": 24, "index_head_dim": 32, "index_n_heads": 16}


FAMILIES = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2, "head_dim": 64, "num_experts": 15,
        "norm_topk_prob": True, **EXPERTS,
    },
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **LATENT},
    "deepseek_v3 of real widths": {
        "architectures": ["DeepseekV3ForCausalLM"], **LATENT, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "num_attention_heads": 16,
    },
    "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"], **LATENT, **INDEXER},
    "glm_moe_dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"], **LATENT, **INDEXER, "indexer_types": ["full", "shared"],
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "num_key_value_heads": 2, "head_dim": 64, "rotary_dim": 32,
        "num_local_experts": 15, "num_experts_per_tok": 4, "intermediate_size": 96, "tie_word_embeddings": False,
    },
}  # fmt: skip

RECURRENT = {  # and those with sinks and windows
    "qwen3_5_moe_text": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8,
        "shared_expert_intermediate_size": 96, "linear_key_head_dim": 64, "linear_value_head_dim": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
        **EXPERTS,
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"], "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "ssm_state_size": 128,
        "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 96, "moe_latent_size": 128, "tie_word_embeddings": False, **EXPERTS,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 8,
        "num_experts_per_tok": 4, "intermediate_size": 96, "sliding_window": 40, "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


def model_of(family: str, dtype: str, config: dict[str, Any] | None = None):
    """`config`: of a family that does not stand here."""
    name = family.partition(" ")[0]
    return new_model({**SIZES, "model_type": name, **(config or FAMILIES[family])}, seed=0, dtype=dtype).to("cuda")


def traffic(count: int):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 900, int(rng.integers(1, 90))).tolist() for _ in range(count)]
    sampling = [
        SamplingParams(int(rng.integers(4, 24)), seed=i, temperature=(1.0, 0.7, 1.3, 0.0)[i % 4], ignore_eos=True)
        for i in range(count)
    ]
    return prompts, sampling
