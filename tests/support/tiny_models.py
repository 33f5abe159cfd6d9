"""Random checkpoints for the parity tests."""

from __future__ import annotations

from rlloop.models import Model, new_model


def tiny_qwen3(vocab_size: int = 300, dtype: str = "float32") -> Model:
    """Two layers, grouped heads, tied embeddings; weights wide enough for distributions that are far from flat."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "eos_token_id": 2,
    }
    return new_model(config, seed=0, dtype=dtype)
