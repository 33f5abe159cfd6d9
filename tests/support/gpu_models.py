"""Random models on a GPU, and requests for them."""

from __future__ import annotations

from rlloop.models import new_model

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 5001,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
    "eos_token_id": 2,
}


def dense_model(dtype: str, **changes):
    return new_model({**CONFIG, **changes}, seed=0, dtype=dtype).to("cuda")
