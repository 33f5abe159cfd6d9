"""Recurrent layers inside vLLM: their states live outside of its pages, and the bits are the embedded engine's."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from rlloop import ConfigError, Engine, Model, SamplingParams, load_model, token_logprobs
from rlloop.rollout.vllm.engine import VllmEngine
from rlloop.rollout.vllm.stock_engine import StockVllmEngine
from rlloop.types import Completion
from tests.support.checkpoints import RECURRENT, make_checkpoint
from tests.support.vllm_traffic import bits, traffic


@pytest.fixture(scope="module", params=RECURRENT)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, request.param, dtype=torch.bfloat16, vocab_size=300)
    return load_model(folder, dtype="bfloat16")


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[VllmEngine]:
    """Prompts are cut, more wait than may run, and so small a cache preempts."""
    engine = VllmEngine(model, page_size=8, max_batch_tokens=48, max_running=12, max_cache_tokens=256)
    yield engine
    engine.close()


def test_tokens_and_bits_are_the_embedded_engines_and_the_trainers(model: Model, engine: VllmEngine) -> None:
    prompts, sampling = traffic(24)
    for version in (1, 2):
        expected, made = Engine(model).generate(prompts, sampling), engine.generate(prompts, sampling)
        assert bits(made) == bits(expected)
        scored = token_logprobs(model, [(each.prompt_ids, each.token_ids) for each in made], sampling=sampling)
        assert [each.logprobs.tobytes() for each in made] == [each.detach().numpy().tobytes() for each in scored]
        with torch.no_grad():  # in place, as an update is
            for name, parameter in model.named_parameters():
                if "A_log" in name or "conv1d.weight" in name:
                    parameter.mul_(1.1)
        engine.set_version(version)
    assert engine.stats().cached_tokens == 0


def test_requests_are_preempted_and_end_early(model: Model, engine: VllmEngine) -> None:
    """A row of states is another's at once; one that was preempted begins again."""
    prompts, sampling = traffic(24)
    expected = Engine(model).generate(prompts, sampling)
    core = engine._llm.engine_core.engine_core
    states = core.model_executor.driver_worker.worker.states
    ids = [engine.add_request(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
    made: dict[int, Completion] = {}
    preempted = 0
    for step in range(60):
        made.update(engine.step())
        preempted = max(preempted, sum(each.num_preemptions for each in core.scheduler.requests.values()))
        if step % 9 == 5 and (running := [id for id in ids if id not in made]):
            aborted = engine.abort(running[0])
            assert aborted is not None
            made[running[0]] = aborted
    made.update(engine.abort_all())
    assert preempted > 0
    for id, whole in zip(ids, expected, strict=True):
        count = len(made[id].token_ids)
        assert made[id].token_ids == whole.token_ids[:count]
        assert made[id].logprobs.tobytes() == whole.logprobs[:count].tobytes()
    assert bits(engine.generate(prompts, sampling)) == bits(expected)
    assert len(states._row_of) + len(states._free) == 12


def test_a_step_that_does_not_end_leaves_no_state(
    model: Model, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, sampling = traffic(12)
    expected = bits(Engine(model).generate(prompts, sampling))
    for prompt, params in zip(prompts, sampling, strict=True):
        engine.add_request(prompt, params)
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model, "hidden", None)
        with pytest.raises(TypeError):
            engine.step()
    assert not engine.has_work
    assert bits(engine.generate(prompts, sampling)) == expected


def test_sleep_frees_the_states(model: Model, engine: VllmEngine) -> None:
    prompts, sampling = traffic(6)
    expected = bits(engine.generate(prompts, sampling))
    states = engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.states
    assert states._stores
    engine.sleep()
    assert not states._stores
    assert bits(engine.generate(prompts, sampling)) == expected


def test_the_prefix_cache_is_off(model: Model, engine: VllmEngine, caplog: pytest.LogCaptureFixture) -> None:
    from rlloop.rollout.vllm.model import RlloopForCausalLM

    config = engine._llm.vllm_config
    assert not config.cache_config.enable_prefix_caching
    with caplog.at_level(logging.WARNING, "rlloop"):
        other = VllmEngine(model, max_running=2)
        other.close()
    assert [each.message for each in caplog.records if "its prefix cache is off" in each.message]
    config.cache_config.enable_prefix_caching = True  # as a server's
    try:
        with pytest.raises(ValueError, match="start vLLM with --no-enable-prefix-caching"):
            RlloopForCausalLM(vllm_config=config)
    finally:
        config.cache_config.enable_prefix_caching = False
    with pytest.raises(ConfigError, match="vLLM's own recurrent layers were not tried"):
        StockVllmEngine(model)
    assert engine.generate([[5, 6]], SamplingParams(max_tokens=2, seed=0))
