"""Distance between an engine's and its trainer's logprobs."""

from __future__ import annotations

import numpy as np
import torch

from rlloop import Model, SamplingParams, token_logprobs
from rlloop.rollout.vllm.stock_engine import StockVllmEngine


def gaps(model: Model, engine: StockVllmEngine) -> np.ndarray:
    """Trainer's logprob minus the engine's, of each token."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 300, int(rng.integers(2, 60))).tolist() for _ in range(16)]
    sampling = [SamplingParams(max_tokens=30, seed=i, temperature=(1.0, 0.7)[i % 2]) for i in range(16)]
    made = engine.generate(prompts, sampling)
    scored = token_logprobs(model, [(each.prompt_ids, each.token_ids) for each in made], sampling=sampling)
    assert np.isnan(made[1].raw_logprobs).all()
    assert made[0].raw_logprobs.tobytes() == made[0].logprobs.tobytes()
    return torch.cat(scored).detach().double().numpy() - np.concatenate([each.logprobs for each in made])


def k3(gap: np.ndarray) -> float:
    return float((np.expm1(gap) - gap).mean())
