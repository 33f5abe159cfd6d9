"""Every family: the trainer recomputes the bits that the engine sampled with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlloop import Engine, SamplingParams, load_model, token_logprobs
from tests.checkpoints import EVERY, make_checkpoint

PROMPTS = [[5], list(range(3, 20)), list(range(10, 80)), [9, 8, 7]]
SAMPLING = [
    SamplingParams(max_tokens=30, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=20, seed=2, temperature=0.8, top_p=0.9),
    SamplingParams(max_tokens=25, seed=3, temperature=1.2, top_k=30, min_tokens=10),
    SamplingParams(max_tokens=20, seed=4, temperature=0.0),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EVERY)
def test_the_trainer_recomputes_the_engines_bits(tmp_path: Path, family: str, dtype: str) -> None:
    make_checkpoint(tmp_path, family, dtype=torch.bfloat16, tie_word_embeddings=dtype == "float32")
    model = load_model(tmp_path, dtype=dtype)
    made = Engine(model, max_batch_tokens=32).generate(PROMPTS, SAMPLING)
    assert sum(len(completion.token_ids) for completion in made) > 40
    pairs = [(completion.prompt_ids, completion.token_ids) for completion in made]
    for completion, sampled, raw in zip(
        made, token_logprobs(model, pairs, sampling=SAMPLING), token_logprobs(model, pairs), strict=True
    ):
        assert completion.logprobs.tobytes() == sampled.detach().numpy().tobytes()
        assert completion.raw_logprobs.tobytes() == raw.detach().numpy().tobytes()
    assert made[3].logprobs.tobytes() == made[3].raw_logprobs.tobytes()  # greedy
