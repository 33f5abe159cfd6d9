"""Stretched ropes far beyond the original context: transformers' values, and the engine's bits in the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlloop import Engine, SamplingParams, load_model, token_logprobs
from tests.support.checkpoints import LLAMA3_ROPE, SIZES, YARN_ROPE, make_checkpoint
from tests.support.family_checks import logprobs_of

ORIGINAL, PROMPT, COMPLETION = 64, 280, 30  # positions up to 4.8 times the original context
LOGPROB_ERROR = 5e-5  # measured: 7e-6, of DeepSeek 1.6e-5
YARN = {**YARN_ROPE, "original_max_position_embeddings": ORIGINAL}
PLAIN_YARN = {name: value for name, value in YARN.items() if "mscale" not in name}
CASES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA3_ROPE, "original_max_position_embeddings": ORIGINAL},
    "qwen3": PLAIN_YARN,
    "qwen2": PLAIN_YARN,
    "deepseek_v3": YARN,
    "gpt_oss": {**PLAIN_YARN, "truncate": False},
}


def made(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return make_checkpoint(folder, family, dtype=dtype, rope_parameters=CASES[family], max_position_embeddings=512)


def tokens() -> list[int]:
    return np.random.default_rng(0).integers(3, SIZES["vocab_size"], PROMPT + COMPLETION).tolist()


@pytest.mark.parametrize("family", CASES)
def test_logprobs_far_beyond_the_original_context_are_transformers(tmp_path: Path, family: str) -> None:
    reference, ids = made(tmp_path, family), tokens()
    pair = (ids[:1], ids[1:])
    with torch.no_grad():
        (mine,), wanted = token_logprobs(load_model(tmp_path), [pair]), logprobs_of(reference, *pair)
    assert (mine - wanted).abs().max() < LOGPROB_ERROR
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["factor"] *= 1.01  # which the bound must see
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        (other,) = token_logprobs(load_model(tmp_path), [pair])
    assert (other - wanted).abs()[4 * ORIGINAL :].max() > 10 * LOGPROB_ERROR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CASES)
def test_the_trainer_recomputes_the_engines_bits_there(tmp_path: Path, family: str, dtype: str) -> None:
    made(tmp_path, family, torch.bfloat16)
    model = load_model(tmp_path, dtype=dtype)
    sampling = SamplingParams(max_tokens=COMPLETION, seed=1, ignore_eos=True)
    for each in Engine(model, max_batch_tokens=64).generate([tokens()[:PROMPT], tokens()[5:PROMPT]], sampling):
        assert len(each.prompt_ids) + len(each.token_ids) > 4 * ORIGINAL
        (row,) = token_logprobs(model, [(each.prompt_ids, each.token_ids)], sampling=[sampling])
        assert each.logprobs.tobytes() == row.detach().numpy().tobytes()
