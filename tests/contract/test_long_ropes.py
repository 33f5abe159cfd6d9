"""Stretched ropes far beyond the original context: transformers' values, and the engine's bits in the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlloop import Engine, ModelInput, SamplingParams, load_model, token_logprobs
from tests.support.checkpoints import LLAMA3_ROPE, SIZES, YARN_ROPE, make_checkpoint
from tests.support.family_checks import logprobs_of
from tests.support.image_models import image, make_image_checkpoint, prompt_with, theirs

ORIGINAL, PROMPT, COMPLETION = 64, 280, 30  # positions up to 4.8 times the original context
LOGPROB_ERROR = 5e-5  # measured: 7e-6, of DeepSeek 1.6e-5
YARN = {**YARN_ROPE, "original_max_position_embeddings": ORIGINAL}
PLAIN_YARN = {name: value for name, value in YARN.items() if "mscale" not in name}
CASES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA3_ROPE, "original_max_position_embeddings": ORIGINAL},
    "qwen3": PLAIN_YARN,
    "qwen3_moe": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
    "qwen2": PLAIN_YARN,
    "deepseek_v3": YARN,
    "gpt_oss": {**PLAIN_YARN, "truncate": False},
}
PICTURED: dict[str, dict[str, Any]] = {  # YaRN over positions of three axes
    "qwen3_vl": {**PLAIN_YARN, "factor": 4.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "qwen3_5_moe": {
        **PLAIN_YARN, "factor": 4.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip


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


def made_pictured(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    text = {"rope_parameters": PICTURED[family], "max_position_embeddings": 512}
    return make_image_checkpoint(folder, family, dtype=dtype, text=text)


def pictured(picture: bool) -> tuple[ModelInput, list[int]]:
    """A prompt and a completion; the text alone is longer than four original contexts."""
    ids = np.random.default_rng(0).integers(3, 90, PROMPT + COMPLETION).tolist()
    parts = [ids[:40], image(16, 12), ids[40:PROMPT]] if picture else [ids[:PROMPT]]
    return prompt_with(*parts), ids[PROMPT:]


@pytest.mark.parametrize("picture", [False, True], ids=["text", "picture"])
@pytest.mark.parametrize("family", PICTURED)
def test_logprobs_after_a_picture_far_beyond_it_are_transformers(tmp_path: Path, family: str, picture: bool) -> None:
    reference, (prompt, completion) = made_pictured(tmp_path, family), pictured(picture)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())

    def ours() -> torch.Tensor:
        with torch.no_grad():
            (row,) = token_logprobs(load_model(tmp_path), [(prompt, completion)])
        return row

    with torch.no_grad():
        logits = theirs(reference, prompt, completion)
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
    mine = ours()
    assert (mine - wanted).abs().max() < LOGPROB_ERROR
    rope = written["text_config"].pop("rope_parameters")
    written["text_config"] |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}  # as model cards write it
    path.write_text(json.dumps(written))
    assert torch.equal(ours(), mine)
    rope["factor"] *= 1.01
    path.write_text(json.dumps(written))
    assert (ours() - wanted).abs().max() > 10 * LOGPROB_ERROR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", PICTURED)
def test_the_trainer_recomputes_the_engines_bits_after_a_picture(tmp_path: Path, family: str, dtype: str) -> None:
    made_pictured(tmp_path, family, torch.bfloat16)
    model, prompts = load_model(tmp_path, dtype=dtype), [pictured(picture)[0] for picture in (False, True)]
    sampling = SamplingParams(max_tokens=COMPLETION, seed=1, ignore_eos=True)
    for prompt, each in zip(prompts, Engine(model, max_batch_tokens=64).generate(prompts, sampling), strict=True):
        (row,) = token_logprobs(model, [(prompt, each.token_ids)], sampling=[sampling])
        assert each.logprobs.tobytes() == row.detach().numpy().tobytes()
