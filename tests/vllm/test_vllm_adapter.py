"""Adapters inside vLLM: the embedded engine's bits, hence the trainer's; one that trains, and several by request."""

from __future__ import annotations

import pytest

from rlloop import Engine, load_model
from rlloop.algorithms import get_loss
from rlloop.config.model import LoraSection
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.launch.make import with_lora
from rlloop.models import save_model
from rlloop.rollout.vllm.engine import VllmEngine
from rlloop.trainer import Trainer
from tests.support.adapters import adapter_folder, random_adapter
from tests.support.samples import as_sample, different
from tests.support.tiny_models import tiny_qwen3
from tests.support.vllm_traffic import bits, traffic


def test_it_samples_the_trainers_bits_while_the_adapter_trains(tmp_path):
    save_model(tiny_qwen3(dtype="bfloat16"), tmp_path / "base")
    base = load_model(tmp_path / "base", dtype="bfloat16")
    model = with_lora(base, LoraSection(rank=4, targets=["all-linear", "lm_head"]), 0)
    trainer, embedded = Trainer(model, TrainerConfig(lr=3e-2, max_batch_tokens=400)), Engine(model)
    engine = VllmEngine(model, max_batch_tokens=64, max_running=32, max_cache_tokens=400, adapter_slots=1)
    prompts, sampling = traffic(12)
    seen = []
    for version in range(3):
        for each in (engine, embedded):
            each.set_version(version)
        made = engine.generate(prompts, sampling)
        assert bits(made) == bits(embedded.generate(prompts, sampling))
        samples = [as_sample(index, each, index - 5.5) for index, each in enumerate(made)]
        assert different(samples, list(trainer.forward_backward(samples, get_loss("grpo")).logprobs)) == 0
        trainer.optim_step()
        seen.append(bits(made))
    engine.add_adapter("a", random_adapter(model, 9, targets=("all-linear",)))
    with pytest.raises(ConfigError, match="takes the only slot; give the engine adapter_slots=2 or more"):
        engine.generate(prompts[:1], sampling[:1], adapters="a")
    engine.close()
    assert seen[0] != seen[1] != seen[2]
    assert bits(Engine(base).generate(prompts, sampling)) == seen[0]  # B was 0


def test_requests_with_several_adapters_have_the_embedded_engines_bits(tmp_path):
    save_model(tiny_qwen3(dtype="bfloat16"), tmp_path / "base")
    model, served = (load_model(tmp_path / "base", dtype="bfloat16") for _ in range(2))
    engine = VllmEngine(served, max_batch_tokens=64, max_running=32, max_cache_tokens=600, adapter_slots=2)
    embedded = Engine(model, adapter_slots=8)
    prompts, sampling = traffic(20)  # of prompts that begin alike
    adapters = [("a", "b", None, "c")[index % 4] for index in range(20)]

    def both(names: list[str | None]) -> list[tuple]:
        made = engine.generate(prompts, sampling, adapters=names)
        assert bits(made) == bits(embedded.generate(prompts, sampling, adapters=names))
        return bits(made)

    base = both([None] * 20)
    for seed, (name, rank) in enumerate({"a": 4, "b": 20, "c": 3}.items()):
        folder = adapter_folder(tmp_path / name, model, seed, rank=rank, targets=("all-linear", "lm_head"))
        for each in (engine, embedded):
            assert each.load_adapter(name, folder) == 1
    first = both(adapters)
    assert [each == plain for each, plain in zip(first, base, strict=True)] == [name is None for name in adapters]
    assert engine.stats().adapter_waits > 0 < engine.stats().adapter_swaps
    alone = engine.generate(prompts[:1], sampling[:1], adapters="a")
    assert bits(alone) == first[:1]
    for each in (engine, embedded):  # another version of one; its blocks are its own
        assert each.add_adapter("a", random_adapter(model, 9, targets=("all-linear",))) == 2
    again = both(adapters)
    assert [each == before for each, before in zip(again, first, strict=True)] == [name != "a" for name in adapters]
    assert both([None] * 20) == base
    engine.drop_adapter("b")
    with pytest.raises(ConfigError, match="no adapter is named 'b'"):
        engine.generate(prompts, sampling, adapters=adapters)
    engine.close()
