"""Small models, dense and with experts, for engines over ranks on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlloop.config.layout import World
from rlloop.models import Model, load_model, new_model
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from tests.support.traffic import VOCABULARY

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "initializer_range": 0.1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
CPU = torch.device("cpu")


def model(context: ParallelContext | None = None, more: dict[str, Any] | None = None) -> Model:
    return new_model({**CONFIG, **(more or {})}, seed=0, context=context)


def beside(folder: Path, trainer: Layout, engine: Layout) -> tuple[Model, Model]:
    """A folder's trained model, and its engine's, which shares weights as in `Colocated`."""
    context, engine_context = (join(CPU, each) for each in (trainer, engine))
    model = load_model(folder, dtype="bfloat16", context=context)
    if World.of(trainer, engine).stages_agree:
        return model, Model(model.config, model.profile, engine_context, weights_of=model)
    return model, load_model(folder, dtype="bfloat16", context=engine_context)
