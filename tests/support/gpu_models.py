"""Random models on a GPU, and requests for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu_shapes import random_model
from rlloop.models import Model, new_model
from tests.support.ranks import RANKS_PER_GPU

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
TEN_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 10, "num_experts_per_tok": 3,
    "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip


def need_gpus(count: int) -> None:
    """Skip the test on a machine with fewer, or with fewer ranks (`RANKS_PER_GPU`)."""
    if torch.cuda.device_count() * RANKS_PER_GPU < count:
        pytest.skip(f"{count} GPUs are needed, and there are {torch.cuda.device_count()}")


def dense_model(dtype: str, **changes):
    return new_model({**CONFIG, **changes}, seed=0, dtype=dtype).to("cuda")


def drawn_on_gpu(config: dict[str, Any]) -> Model:
    """A random Qwen3 in bfloat16: of widths for which a CPU draws for minutes."""
    return random_model({**CONFIG, **config, "tie_word_embeddings": False})
