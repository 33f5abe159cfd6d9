"""Tiny models, their samples and the trainer's scores of them, for tests of the parity doctor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlloop.models import Model, token_logprobs
from rlloop.parity.first_difference import Finding, diagnose
from rlloop.parity.monitor import compare
from rlloop.rollout import Engine
from rlloop.types import Example, ModelInput, RewardResult, Sample, SamplingParams

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,  # likewise for the sum over the vocabulary
    "hidden_size": 64,
    "intermediate_size": 640,  # long sums, so that a stock product rounds otherwise whatever its number of rows
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


PROMPTS = [[1 + i, 2, 3 + i, 5] for i in range(4)]


def sampled(engine: Engine, prompts: Sequence[ModelInput | list[int]] = PROMPTS) -> list[Sample]:
    params = [SamplingParams(max_tokens=12, temperature=0.8, seed=i, ignore_eos=True) for i in range(len(prompts))]
    return [
        Sample(f"1/{i}/0", Example(str(i), made.prompt_ids, "", {}), made, "", RewardResult(0.0), group=i)
        for i, made in enumerate(engine.generate(prompts, params))
    ]


def rescored(model: Model, samples: list[Sample]) -> list[np.ndarray]:
    completions = [sample.completion for sample in samples]
    sequences = [(made.model_input or made.prompt_ids, made.token_ids) for made in completions]
    scored = token_logprobs(model, sequences, sampling=[sample.completion.sampling for sample in samples])
    return [logprobs.detach().numpy() for logprobs in scored]


MIXTURE = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 320,
    "moe_intermediate_size": 200,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 1,  # one head: half of all scores are exactly 0, and tied
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


def diagnosed(engine: Engine, trainer: Model, samples: list[Sample] | None = None) -> Finding:
    """The doctor's finding for the first token that differs in the engine's samples; there is one."""
    samples = sampled(engine) if samples is None else samples
    first = compare(samples, rescored(trainer, samples)).first
    assert first is not None, "no logprob differs"
    return diagnose(engine.model, trainer, next(sample for sample in samples if sample.uid == first.uid), first)
