"""Every family: the trainer recomputes the bits that the engine sampled with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlloop import Engine, load_model, token_logprobs
from tests.support.checkpoints import EVERY, make_checkpoint
from tests.support.family_checks import PROMPTS, SAMPLING


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
