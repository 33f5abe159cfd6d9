"""Recurrent layers, sinks with windows, and images inside vLLM on a GPU: the embedded engine's bits, and the trainer's.

Steps with recurrent layers or images are not replayed from CUDA graphs there; the others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.utils import logging

from rlloop import Engine, Model, ModelInput, SamplingParams, load_model, token_logprobs
from rlloop.types import Completion
from tests.support.gpu_mixtures import RECURRENT, model_of, traffic
from tests.support.image_models import FAMILIES, make_wide_image_checkpoint, wide_prompts
from tests.support.vllm_traffic import check_same

pytest.importorskip("vllm", reason="vLLM 0.26 is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
logging.disable_progress_bar()

Prompts = Sequence[ModelInput | list[int]]
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"max_cache_tokens": 16384},
    "cut and preempted": {"max_cache_tokens": 512, "max_batch_tokens": 96, "max_running": 24},
}
UPDATED = ("A_log", "conv1d.weight", "sinks", "model.norm.weight", "norm_f.weight", "pos_embed.weight")


def engine_of(model: Model, **settings: Any):
    from rlloop.rollout.vllm.engine import VllmEngine

    return VllmEngine(model, **settings)


def worker_of(engine: Any) -> Any:
    return engine._llm.engine_core.engine_core.model_executor.driver_worker.worker


def check_trainer(model: Model, prompts: Prompts, made: list[Completion]) -> None:
    pairs = [(prompt, each.token_ids) for prompt, each in zip(prompts, made, strict=True)]
    scored = token_logprobs(model, pairs, sampling=[each.sampling for each in made])
    for each, mine in zip(made, scored, strict=True):
        assert each.logprobs.tobytes() == mine.detach().cpu().numpy().tobytes()


def update(model: Model) -> None:
    """In place, as an optimizer's is."""
    changed = [parameter for name, parameter in model.named_parameters() if name.endswith(UPDATED)]
    assert changed
    with torch.no_grad():
        for parameter in changed:
            parameter.mul_(1.25)


def check_versions(model: Model, prompts: Prompts, sampling: list[SamplingParams], **settings: Any) -> Any:
    """Returns the engine, for more checks; the caller closes it."""
    engine = engine_of(model, **settings)
    first: list[Completion] = []
    try:
        for version in range(2):
            expected = Engine(model).generate(prompts, sampling)
            for _ in range(2):  # states and pages of the first are another's in the second
                made = engine.generate(prompts, sampling)
                check_same(made, expected)
            check_trainer(model, prompts, made)
            assert version == 0 or any(a.token_ids != b.token_ids for a, b in zip(made, first, strict=True))
            first = made
            update(model)
            engine.set_version(version + 1)
    except BaseException:
        engine.close()
        raise
    return engine


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("settings", SETTINGS)
def test_states_sinks_and_windows_have_the_embedded_engine_s_bits(family, settings):
    model = model_of(family, "bfloat16", RECURRENT[family])
    engine = check_versions(model, *traffic(40), **SETTINGS[settings])
    try:
        assert (worker_of(engine).states is not None) == model.recurrent
        assert (worker_of(engine).model_runner.get_model().graphs is None) == model.recurrent
    finally:
        engine.close()


def test_states_survive_steps_without_them_and_go_to_sleep():
    """Requests that end early give their states' rows to others; a sleeping engine holds no states."""
    model = model_of("qwen3_5_moe_text", "bfloat16", RECURRENT["qwen3_5_moe_text"])
    prompts, sampling = traffic(40)
    expected = Engine(model).generate(prompts, sampling)
    engine = engine_of(model, max_cache_tokens=2048, max_batch_tokens=96, max_running=8, sleep=True)
    try:
        states = worker_of(engine).states
        ids = [engine.add_request(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
        made: dict[int, Completion] = {}
        for step in range(40):
            made.update(engine.step())
            if step % 7 == 5 and (left := [id for id in ids if id not in made]):
                made[left[0]] = engine.abort(left[0])
        assert states._stores
        made.update(engine.abort_all())
        for id, whole in zip(ids, expected, strict=True):
            count = len(made[id].token_ids)
            assert made[id].token_ids == whole.token_ids[:count]
            assert made[id].logprobs.tobytes() == whole.logprobs[:count].tobytes()
        for _ in range(2):
            check_same(engine.generate(prompts, sampling), expected)
            assert not states._stores
    finally:
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_images_have_the_embedded_engine_s_bits(tmp_path, family, settings):
    make_wide_image_checkpoint(tmp_path, family, torch.bfloat16)
    model = load_model(tmp_path, dtype="bfloat16", device="cuda")
    prompts = wide_prompts()
    sampling = [
        SamplingParams(12 + i % 5, seed=i, temperature=(1.0, 0.7, 0.0)[i % 3], ignore_eos=True)
        for i in range(len(prompts))
    ]
    engine = check_versions(model, prompts, sampling, **SETTINGS[settings])
    try:
        texts, params = prompts[8:12], sampling[8:12]  # alone, and so from graphs where nothing is recurrent
        check_same(engine.generate(texts, params), Engine(model).generate(texts, params))
        mine, theirs = engine.prefill_logprobs(prompts), Engine(model).prefill_logprobs(prompts)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))
        assert (worker_of(engine).model_runner.get_model().graphs is None) == model.recurrent
    finally:
        engine.close()
