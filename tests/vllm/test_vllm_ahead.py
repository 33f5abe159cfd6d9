"""vLLM's asynchronous scheduling, as it is on a GPU: a step begins before the host knows what the last one drew.

The CPU build leaves it off; it is turned on here, with streams and events that do nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rlloop import Engine, load_model
from rlloop.rollout.vllm.engine import VllmEngine
from tests.support.checkpoints import make_checkpoint
from tests.support.vllm_traffic import bits, traffic


class Idle:
    """A stream, or an event, of a device that is always done."""

    def __init__(self, **unused: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


@pytest.fixture
def ahead(monkeypatch) -> None:
    from rlloop.rollout.vllm.platform import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))
    for place, name in ((torch.cuda, "Event"), (torch.cuda, "Stream"), (torch, "Event")):
        monkeypatch.setattr(place, name, Idle)
    monkeypatch.setattr(torch.cuda, "current_stream", Idle)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_bits_are_the_embedded_engines(tmp_path, ahead, monkeypatch, family):
    """Prompts are cut, and so small a cache preempts; requests end at stop tokens and are aborted."""
    make_checkpoint(tmp_path, family, vocab_size=300)
    model = load_model(tmp_path)
    prompts, sampling = traffic(15)
    expected = bits(Engine(model).generate(prompts, sampling))
    engine = VllmEngine(model, max_batch_tokens=64, max_running=12, max_cache_tokens=256)
    assert engine._llm.vllm_config.max_concurrent_batches == 2
    assert bits(engine.generate(prompts, sampling)) == expected
    ids = [engine.add_request(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
    made = dict(pair for _ in range(9) for pair in engine.step())
    assert {each.finish_reason for each in made.values()} <= {"stop", "length"}
    for id, part in engine.abort_all():
        assert part.token_ids == expected[ids.index(id)][1][: len(part.token_ids)]
    engine.set_version(1)  # what was begun for requests that ended holds nothing back
    assert bits(engine.generate(prompts, sampling)) == expected
    with monkeypatch.context() as patch:
        patch.setattr(model, "hidden", None)
        with pytest.raises(TypeError):
            engine.generate(prompts, sampling)
    assert bits(engine.generate(prompts, sampling)) == expected  # nor what was begun before a step that raised
    engine.close()
