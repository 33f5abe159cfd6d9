"""A trainer's model and its drifted copy."""

from __future__ import annotations

import torch

from rlloop.models import Model, new_model, token_logprobs
from rlloop.numerics.profile import Drift, NumericsProfile
from rlloop.rollout import Engine
from rlloop.study.drifted import DriftedSync, drifted_copy
from rlloop.study.drifted_ops import drifted_ops
from rlloop.types import SamplingParams

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32,
    "tie_word_embeddings": True, "attention_bias": False, "initializer_range": 0.5, "eos_token_id": 0,
}  # fmt: skip
LINEAR, EMBEDDING, NORM = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"


class Pair:
    """A trained model, an engine that drifts from it, and one that shares its weights."""

    def __init__(self, **drift) -> None:
        self.model: Model = new_model(CONFIG, 0)
        view = drifted_copy(self.model).with_profile(NumericsProfile(drift=Drift(**drift)), drifted_ops)
        self.engine, self.twin = Engine(view), Engine(self.model)
        self.sync = DriftedSync(self.model, self.engine, self.twin)

    def weight(self, name: str) -> torch.Tensor:
        return dict(self.model.named_parameters())[name].detach()

    def served(self, name: str) -> torch.Tensor:
        return dict(self.engine.model.named_parameters())[name].detach()

    def train(self, by: float = 0.01) -> None:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(by)

    def differs(self) -> bool:
        """True if a sampled token's logprob has other bits in the trainer."""
        [made] = self.engine.generate([[1, 2, 3]], SamplingParams(8, seed=1, ignore_eos=True))
        [scored] = token_logprobs(self.model, [(made.prompt_ids, made.token_ids)])
        return (scored.detach().numpy() != made.logprobs).any()
