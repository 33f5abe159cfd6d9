"""Models that stock vLLM knows, on a GPU, and requests for them."""

from __future__ import annotations

import numpy as np

from rlloop import SamplingParams
from rlloop.models import Model, new_model

SHARED = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "eos_token_id": 1,
    "initializer_range": 0.05,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2, "norm_topk_prob": True}


KINDS = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, **EXPERTS,
        "decoder_sparse_step": 1, "mlp_only_layers": [1], "tie_word_embeddings": True,
    },
    "latent": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 8, **EXPERTS,
        "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 64,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 16, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc", "tie_word_embeddings": False,
    },
}  # fmt: skip


def model_of(kind: str) -> Model:
    config = {name: value for name, value in (SHARED | KINDS[kind]).items() if kind != "latent" or name != "head_dim"}
    return new_model(config, seed=0, dtype="bfloat16").to("cuda")


def traffic() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 300, int(rng.integers(2, 90))).tolist() for _ in range(24)]
    return prompts, [SamplingParams(max_tokens=40, seed=i, temperature=(1.0, 0.7)[i % 2]) for i in range(24)]
