"""Small models of families that vLLM runs."""

from __future__ import annotations

SMALL = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "mixture": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
                "decoder_sparse_step": 1, "mlp_only_layers": []},
    "latent": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 8,
               "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 24,
               "head_dim": 8, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
               "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}  # fmt: skip
READS_IMAGES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe")  # of tests.support.image_models
