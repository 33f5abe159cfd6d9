"""Random models on a GPU, and requests for them."""

from __future__ import annotations

from typing import Any

import torch

from rlloop.models import Model, new_model
from rlloop.models.config import parse_config
from rlloop.models.ropes import RopeTable
from rlloop.parallel.context import ParallelContext

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


def drawn_on_gpu(config: dict[str, Any], device: str = "cuda:0") -> Model:
    """A random Qwen3 in bfloat16: of widths for which a CPU draws for minutes."""
    parsed = parse_config({**CONFIG, **config, "tie_word_embeddings": False})
    context = ParallelContext(torch.device(device))
    with torch.device("meta"):
        model = Model(parsed, None, context)
    generator, state = torch.Generator(context.device).manual_seed(0), {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            state[name] = torch.ones(parameter.shape, device=context.device, dtype=torch.bfloat16)
        else:
            drawn = torch.randn(parameter.shape, device=context.device, dtype=torch.bfloat16, generator=generator)
            state[name] = drawn.mul_(parsed.initializer_range)
    model.load_state_dict(state, assign=True)
    model.rope = RopeTable(parsed, "cpu").to(context.device)
    return model
