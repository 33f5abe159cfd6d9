"""rlloop's model inside vLLM on a GPU: the embedded engine's tokens, logprobs and choices, whatever vLLM does."""

import numpy as np
import pytest
import torch

from rlloop.errors import ConfigError
from rlloop.models import token_logprobs
from rlloop.rollout.engine.engine import Engine
from rlloop.types import SamplingParams
from tests.support.gpu_mixtures import model_of, traffic
from tests.support.gpu_models import dense_model as dense_model_of
from tests.support.traffic import bits
from tests.support.traffic import traffic as every_kind
from tests.support.vllm_traffic import check_same

pytest.importorskip("vllm", reason="vLLM 0.26 is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v32"])
def test_vllm_samples_the_embedded_engine_s_bits(family):
    from rlloop.rollout.vllm.engine import VllmEngine

    model = model_of(family, "bfloat16")
    prompts, sampling = traffic(40)
    engine = VllmEngine(model, max_cache_tokens=8192)
    try:
        for version in (0, 1):
            expected = Engine(model).generate(prompts, sampling)
            made = engine.generate(prompts, sampling)
            check_same(made, expected)
            scored = token_logprobs(model, [(c.prompt_ids, c.token_ids) for c in made], sampling=sampling)
            for a, c in zip(made, scored, strict=True):
                assert a.logprobs.tobytes() == c.detach().cpu().numpy().tobytes()
            model.model.norm.weight.data.mul_(1.25)  # in place, as an update is
            engine.set_version(version + 1)
    finally:
        engine.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_begin_before_the_last_ones_tokens_are_known(dtype):
    """Every kind of sampling, stop tokens, prefixes in the cache, prompts that are cut, preemption."""
    from rlloop.rollout.vllm.engine import VllmEngine

    model = dense_model_of(dtype)
    prompts, sampling = every_kind(96)
    expected = [(bits(c), c.finish_reason) for c in Engine(model).generate(prompts, sampling)]
    engine = VllmEngine(model, max_cache_tokens=1024, max_batch_tokens=256, max_running=40)
    try:
        assert engine._llm.vllm_config.scheduler_config.async_scheduling
        for version in (1, 2):
            assert [(bits(c), c.finish_reason) for c in engine.generate(prompts, sampling)] == expected
            engine.set_version(version)
    finally:
        engine.close()


def test_weights_that_are_not_finite_are_refused():
    from rlloop.rollout.vllm.engine import VllmEngine

    model = model_of("qwen3_moe", "bfloat16")
    prompts, sampling = traffic(6)
    expected = Engine(model).generate(prompts, sampling)
    norm = model.model.norm.weight.data
    good = norm.clone()
    engine = VllmEngine(model, max_cache_tokens=4096)
    try:
        norm.fill_(float("nan"))
        with pytest.raises(ValueError, match="no distribution"):
            engine.generate([[5, 6, 7]], SamplingParams(4, seed=0))
        norm.copy_(good)
        engine.set_version(1)
        check_same(engine.generate(prompts, sampling), expected)
    finally:
        engine.close()


def test_choices_outlive_preemption_and_come_with_an_abort():
    from rlloop.rollout.vllm.engine import VllmEngine

    model = model_of("qwen3_moe", "bfloat16")
    prompts, sampling = traffic(40)
    expected = Engine(model).generate(prompts, sampling)
    engine = VllmEngine(model, max_cache_tokens=1024, max_batch_tokens=128, max_running=32)
    try:
        check_same(engine.generate(prompts, sampling), expected)
        ids = [engine.add_request(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
        made = {}
        for _ in range(12):
            made.update(engine.step())
        made.update(engine.abort_all())
        assert any(made[id].finish_reason == "abort" and made[id].token_ids for id in ids)
        for id, whole in zip(ids, expected, strict=True):
            part, count = made[id], len(made[id].token_ids)
            assert part.token_ids == whole.token_ids[:count]
            rows = len(part.prompt_ids) + count - 1
            assert (part.routed_experts is None) == (count == 0)
            if count:
                assert np.array_equal(np.sort(part.routed_experts), np.sort(whole.routed_experts[:rows]))
    finally:
        engine.close()


def test_a_sleeping_engine_holds_no_cache():
    from rlloop.rollout.vllm.engine import VllmEngine

    model = model_of("qwen3_moe", "bfloat16")
    prompts, sampling = traffic(24)
    expected = Engine(model).generate(prompts, sampling)
    engine = VllmEngine(model, max_cache_tokens=1 << 20, sleep=True)
    try:
        check_same(engine.generate(prompts, sampling), expected)
        torch.cuda.empty_cache()
        asleep = torch.cuda.mem_get_info()[0]
        engine.wake_up()
        size = asleep - torch.cuda.mem_get_info()[0]
        assert size > 0.9 * (1 << 20) * sum(
            2 * 2 * 64 * 2 for _ in range(2)
        )  # two heads of keys and values, two layers
        for _ in range(2):
            check_same(engine.generate(prompts, sampling), expected)
            assert torch.cuda.mem_get_info()[0] > asleep - 0.1 * size
        model.model.norm.weight.data.mul_(1.25)
        engine.set_version(1)
        check_same(engine.generate(prompts, sampling), Engine(model).generate(prompts, sampling))
        with pytest.raises(ConfigError, match="another vLLM engine with sleep=True"):
            VllmEngine(model, sleep=True)
    finally:
        engine.close()
