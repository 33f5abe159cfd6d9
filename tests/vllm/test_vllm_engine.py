"""vLLM around rlloop's model: the tokens and bits of the embedded engine, hence of the trainer, whatever vLLM does."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlloop import ConfigError, Engine, Model, SamplingParams, load_model, token_logprobs
from rlloop.models import new_model
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.vllm.engine import VllmEngine
from rlloop.rollout.vllm.stock_engine import StockVllmEngine
from rlloop.testing import plant_fault
from rlloop.types import Completion, Part, PromptScores
from tests.support.checkpoints import EVERY, make_checkpoint
from tests.support.tiny_models import tiny_qwen3
from tests.support.vllm_traffic import bits, traffic


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request) -> Model:
    return tiny_qwen3(dtype=request.param)


@pytest.fixture(scope="module")
def engine(model) -> Iterator[VllmEngine]:
    """Prompts are cut, and so small a cache preempts."""
    engine = VllmEngine(model, max_batch_tokens=64, max_running=32, max_cache_tokens=400)
    yield engine
    engine.close()


def test_tokens_and_bits_are_the_embedded_engines_and_the_trainers(model, engine):
    prompts, sampling = traffic(40)
    expected = Engine(model).generate(prompts, sampling)
    for _ in range(2):  # once more, with prefixes in the cache
        made = engine.generate(prompts, sampling)
        assert bits(made) == bits(expected)
    assert engine.stats().cached_tokens > 500
    pairs = [(each.prompt_ids, each.token_ids) for each in made]
    scored = token_logprobs(model, pairs, sampling=[each.sampling for each in made])
    assert [each.logprobs.tobytes() for each in made] == [each.detach().numpy().tobytes() for each in scored]
    assert engine.fingerprint() == Engine(model).fingerprint()


def test_a_prefix_cache_does_not_outlive_its_weights(model, engine):
    prompts, sampling = traffic(8)
    engine.generate(prompts, sampling)
    with torch.no_grad():
        model.head.mul_(1.01)
    expected = Engine(model).generate(prompts, sampling)
    assert bits(engine.generate(prompts, sampling)) != bits(expected)  # the keys of the old weights are still there
    engine.set_version(engine.policy_version + 1)
    made = engine.generate(prompts, sampling)
    assert bits(made) == bits(expected)
    assert {each.policy_version for each in made} == {engine.policy_version}


def test_an_aborted_request_leaves_what_it_has(engine):
    prompts, sampling = traffic(3)
    whole = engine.generate(prompts, sampling)
    ids = [engine.add_request(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
    for _ in range(4):
        assert engine.step() == []
    with pytest.raises(ConfigError, match="while 3 requests are in flight"):
        engine.set_version(9)
    first = engine.abort(ids[0])
    assert first is not None
    assert engine.abort(ids[0]) is None
    rest = engine.abort_all()
    assert [id for id, _ in rest] == ids[1:]
    for part, all_of_it in zip((first, *(each for _, each in rest)), whole, strict=True):
        assert part.finish_reason == "abort"
        assert 1 <= len(part.token_ids) <= 4
        assert part.token_ids == all_of_it.token_ids[: len(part.token_ids)]
        assert part.logprobs.tobytes() == all_of_it.logprobs[: len(part.token_ids)].tobytes()
    assert not engine.has_work
    assert bits(engine.generate(prompts, sampling)) == bits(whole)


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_step_that_does_not_end_leaves_nothing_behind(model, engine, monkeypatch):
    """Neither requests nor pages, which vLLM knows by their prefix before anything is computed."""
    prompts, sampling = traffic(12)
    expected = bits(Engine(model).generate(prompts, sampling))
    service = EngineService(engine)

    def broken(*unused: object, **also_unused: object) -> None:
        raise MemoryError("on purpose")

    try:
        service.change_weights(lambda: engine.set_version(engine.policy_version + 1))
        with monkeypatch.context() as patch:
            patch.setattr(model, "hidden", broken)
            with pytest.raises(MemoryError):
                service.submit(prompts, sampling).result(60)
        assert bits(service.submit(prompts, sampling).result(60)) == expected
    finally:
        service.close()


@pytest.mark.parametrize("make", [VllmEngine, StockVllmEngine])
def test_a_sleeping_engine_holds_no_cache(make, monkeypatch):
    config = {**tiny_qwen3().config.raw, "hidden_size": 64, "head_dim": 32}
    prompts = traffic(8)[0]
    sampling = [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in range(len(prompts))]
    engine = make(new_model(config, seed=0), max_running=8, max_cache_tokens=100_000, sleep=True)
    runner = engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    expected = bits(engine.generate(prompts, sampling))
    assert runner.kv_caches == []
    engine.wake_up()
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in runner.kv_caches}
    size = sum(storages.values())
    assert size > 50 << 20
    for cache in runner.kv_caches:
        cache.fill_(1.0)  # so that it is really there
    before = resident()
    del cache
    engine.sleep()
    assert before - resident() > 0.9 * size
    for _ in range(2):
        assert bits(engine.generate(prompts, sampling)) == expected
        assert runner.kv_caches == []
    engine.add_request(prompts[0], sampling[0])
    with pytest.raises(ConfigError, match="while 1 requests are in flight"):
        engine.sleep()
    engine.abort_all()
    engine.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "collective_rpc", None)  # what sleeps is not put to sleep again
        assert engine.generate([], sampling[0]) == []
    engine.close()


def test_a_planted_fault_is_seen(model, engine):
    """The comparison can fail: one operation by its stock twin, behind the back of what is declared."""
    prompts, sampling = traffic(12)
    expected = bits(Engine(model).generate(prompts, sampling))
    plant_fault(engine, "attention")
    engine.set_version(engine.policy_version + 1)
    assert bits(engine.generate(prompts, sampling)) != expected
    engine.model = model
    engine.set_version(engine.policy_version + 1)
    assert bits(engine.generate(prompts, sampling)) == expected


def test_engines_come_and_go(model, engine):
    prompts, sampling = traffic(6)
    expected = bits(engine.generate(prompts, sampling))
    for end in (VllmEngine.close, lambda other: None):
        other = VllmEngine(model, page_size=1, max_running=8, max_cache_tokens=256)
        assert bits(other.generate(prompts, sampling)) == expected
        end(other)
        gone = weakref.ref(other)
        del other
        gc.collect()
        assert gone() is None
        assert bits(engine.generate(prompts, sampling)) == expected


def test_vllm_keeps_nothing_of_who_imported_it(engine):
    from vllm.multimodal.media import audio

    assert audio._torchcodec_import_exc is not None
    assert audio._torchcodec_import_exc.__traceback__ is None


def test_what_cannot_be_continued_is_refused(engine):
    sampling = SamplingParams(max_tokens=8)
    for prompt, params, named in (
        ([], sampling, "a prompt is empty"),
        ([5, 300], sampling, "token id 300"),
        ([5], SamplingParams(max_tokens=500), "the model has 256"),
        ([5], SamplingParams(max_tokens=8, temperature=0.001), "at least 0.01"),
    ):
        with pytest.raises(ConfigError, match=named):
            engine.generate([prompt], params)
    with pytest.raises(ConfigError, match="2 prompts came with 1"):
        engine.generate([[5], [6]], [sampling])


@pytest.mark.parametrize("family", EVERY)
def test_every_family(tmp_path, family):
    make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    model = load_model(tmp_path, dtype="bfloat16")
    prompts = [[5], list(range(3, 20)), list(range(10, 80)), [9, 8, 7]]
    sampling = [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in range(len(prompts))]
    engine = VllmEngine(model, max_batch_tokens=32, max_running=8)
    assert bits(engine.generate(prompts, sampling)) == bits(Engine(model).generate(prompts, sampling))
    engine.close()


def test_choices_outlive_preemption_and_come_with_an_abort(tmp_path):
    """Slots of a preempted request are others' by the time it is asked about."""
    make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    model = load_model(tmp_path, dtype="bfloat16")
    prompts = [list(range(10 + i, 40 + i)) for i in range(6)]
    sampling = [SamplingParams(max_tokens=30, seed=seed, ignore_eos=True) for seed in range(6)]
    expected = Engine(model).generate(prompts, sampling)
    engine = VllmEngine(model, max_cache_tokens=256, max_running=6, page_size=8)
    assert bits(engine.generate(prompts, sampling)) == bits(expected)
    ids = [engine.add_request(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
    runner = engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    while len(runner.input_batch.req_id_to_index) == len(ids) or len(runner.requests) < len(ids):
        engine.step()  # until one is preempted
    made = dict(engine.abort_all())
    for id, whole in zip(ids, expected, strict=True):
        part = made[id].routed_experts
        assert part is not None
        assert whole.routed_experts is not None
        assert len(part) == len(made[id].prompt_ids) + len(made[id].token_ids) - 1
        assert part.tobytes() == whole.routed_experts[: len(part)].tobytes()
    engine.close()


def test_behind_a_service_thread(model, engine):
    """As `rlloop serve engine --engine vllm` runs it."""
    prompts, sampling = traffic(10)
    expected = bits(Engine(model).generate(prompts, sampling))
    service = EngineService(engine)
    try:
        halves = [service.submit(prompts[part], sampling[part]) for part in (slice(0, 5), slice(5, 10))]
        assert bits([each for half in halves for each in half.result(60)]) == expected
        kept = service.submit(prompts[:5], sampling[:5])
        service.pause("keep")
        service.resume()
        assert bits(kept.result(60)) == expected[:5]
        service.change_weights(lambda: engine.set_version(77))
        assert service.submit(prompts[:1], sampling[:1], 77, 77).result(60)[0].policy_version == 77
    finally:
        service.close()


def test_it_tells_of_tokens_as_they_are_made(model, engine):
    prompts, sampling = traffic(10)
    expected = Engine(model).generate(prompts, sampling)
    heard: dict[int, list[Part]] = {}

    class Ear:
        def scored(self, index: int, scores: PromptScores) -> None:
            found = token_logprobs(model, [(prompts[index][:1], prompts[index][1:])])[0]
            assert scores.logprobs.tobytes() == found.detach().numpy().tobytes()

        def made(self, index: int, part: Part) -> int | None:
            heard.setdefault(index, []).append(part)
            return 3 if index == 4 and sum(len(each.token_ids) for each in heard[index]) >= 3 else None

        def finished(self, index: int, completion: Completion) -> None: ...

    service = EngineService(engine)
    try:
        made = service.submit(prompts, sampling, listener=Ear(), score=0).result(60)
        with pytest.raises(ConfigError, match="drawn one's logprob alone"):
            service.submit(prompts, sampling, top=2).result(60)
    finally:
        service.close()
    assert made[4].token_ids == expected[4].token_ids[:3]
    for index, (here, there) in enumerate(zip(made, expected, strict=True)):
        count = len(here.token_ids)
        assert here.token_ids == there.token_ids[:count]
        assert here.raw_logprobs.tobytes() == there.raw_logprobs[:count].tobytes()
        told = [token for part in heard.get(index, []) for token in part.token_ids]
        assert told == there.token_ids[: len(told)]
        assert len(told) >= count - 1
        assert b"".join(part.raw_logprobs.tobytes() for part in heard.get(index, [])) == (
            there.raw_logprobs[: len(told)].tobytes()
        )
        assert len(heard.get(index, [])) >= len(told) / 3, "they came together"


def test_a_server_refuses_what_the_trainer_does_not_know():
    from vllm.sampling_params import SamplingParams as VllmParams

    from rlloop.rollout.vllm.sampler import OnlyExact, ours

    OnlyExact.validate_params(VllmParams(temperature=0.7, top_p=0.9, seed=3, logprobs=0, min_tokens=2, max_tokens=4))
    for mistaken in (
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [1, 2]},
        {"prompt_logprobs": 1},
        {"logprobs": 2},
        {"logprobs": -1},
        {"seed": -4},
    ):
        with pytest.raises(ValueError, match=next(iter(mistaken))):
            OnlyExact.validate_params(VllmParams(**mistaken))
    drawn = {ours(VllmParams(), f"request {index}").seed for index in range(20)}
    assert len(drawn) == 20  # a request without a seed has one of its own


def test_a_server_of_several_ranks_is_not_followed(engine, monkeypatch):
    from rlloop.rollout.vllm.worker_replica import Following

    worker = Following()
    worker.model_runner = engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    worker.vllm_config, worker.recorder = engine._llm.vllm_config, None
    assert worker.rlloop_facts()["refused"] == ""
    monkeypatch.setattr(worker.vllm_config.parallel_config, "data_parallel_size", 2)
    assert worker.rlloop_facts()["refused"].startswith("it has 2 ranks")
