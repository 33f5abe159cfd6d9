"""An engine on CUDA gives its cache's memory back while its trainer works; graphs and bits stay."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.models import Model
from rlloop.rollout.engine.engine import Engine
from rlloop.rollout.engine.kv_cache import bytes_per_token
from rlloop.trainer import Trainer
from rlloop.types import SamplingParams
from tests.support.gpu_mixtures import RECURRENT, model_of
from tests.support.gpu_mixtures import traffic as few_tokens
from tests.support.gpu_models import dense_model
from tests.support.gpu_runs import train
from tests.support.samples import as_sample, different
from tests.support.tiny_run import history
from tests.support.traffic import bits, traffic

GIB = 1 << 30


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def small(family: str) -> Model:
    return dense_model("bfloat16") if family == "dense" else model_of(family, "bfloat16", RECURRENT[family])


def cached(model: Model, size: int) -> int:
    """Tokens whose keys and values take `size` bytes."""
    return size // bytes_per_token(model.cache_spec(), model.dtype)


@pytest.mark.parametrize("family", ["dense", *RECURRENT])
def test_the_memory_goes_and_comes_back_under_the_graphs(family):
    model = small(family)
    prompts, sampling = traffic(48) if family == "dense" else few_tokens(48)
    expected = [bits(each) for each in Engine(model).generate(prompts, sampling)]
    engine = Engine(model, max_cache_tokens=cached(model, 4 * GIB), max_running=64, sleep=True)
    assert [bits(each) for each in engine.generate(prompts, sampling)] == expected
    recorded = dict(engine._graphs._recorded)
    assert recorded
    size, given, seconds = engine._cache.memory.size, [], []
    assert size >= 0.99 * 4 * GIB
    for _ in range(3):
        awake, began = free(), time.perf_counter()
        engine.sleep()
        slept, asleep = time.perf_counter(), free()
        taken = torch.empty(size // 2, dtype=torch.uint8, device="cuda").fill_(255)  # as a trainer might
        del taken  # torch keeps it
        woken = time.perf_counter()
        engine.wake_up()
        torch.cuda.synchronize()
        seconds.append((slept - began, time.perf_counter() - woken))
        given.append((asleep - awake, asleep - free()))
        assert [bits(each) for each in engine.generate(prompts, sampling)] == expected
    print(f"{family}: {size / GIB:.2f} GiB, given and taken {given}, in seconds {seconds}")
    assert any(abs(size - one) + abs(size - other) < 0.02 * size for one, other in given)  # others may use the GPU
    assert all(engine._graphs._recorded[form] is step for form, step in recorded.items())


def test_a_gpu_that_is_full_is_an_error_and_no_end():
    model, whole = small("dense"), torch.cuda.mem_get_info()[1]
    prompts, sampling = traffic(12)
    engine = Engine(model, max_cache_tokens=cached(model, whole * 6 // 10), sleep=True)
    expected = [bits(each) for each in engine.generate(prompts, sampling)]
    engine.sleep()
    taken = torch.empty(whole // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(ConfigError, match=r"does not fit in memory: .* GiB are free; lower max_cache_tokens"):
        engine.generate(prompts, sampling)
    del taken
    assert [bits(each) for each in engine.generate(prompts, sampling)] == expected


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("family", ["dense", "qwen3_5_moe_text"])
def test_a_trainer_finds_the_room_and_the_bits_of_one_without(family):
    def steps(sleep: bool) -> list:
        model, made = small(family), []
        engine, trainer = Engine(model, max_running=64, sleep=sleep), Trainer(model, TrainerConfig(lr=3e-3))
        trainer.neighbours = [engine] if sleep else []
        prompts, sampling = few_tokens(24)
        for step in range(3):
            completions = engine.generate(prompts, sampling)
            made += [bits(each) for each in completions]
            samples = [as_sample(i, each, float(i % 3 - 1)) for i, each in enumerate(completions)]
            result = trainer.forward_backward(samples, get_loss("grpo"))
            assert engine._asleep == sleep
            assert different(samples, result.logprobs) == 0
            trainer.optim_step()
            engine.set_version(step + 1)
        return made

    assert steps(True) == steps(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("working_folder")
def test_runs_that_sleep_are_those_that_do_not():
    pytest.importorskip("hydra")
    train("asleep", "dense")
    train("awake", "dense", "rollout.sleep=false")
    assert history(Path("asleep")) == history(Path("awake"))


def test_prefixes_are_computed_again():
    engine, sampling = Engine(small("dense"), sleep=True), SamplingParams(2, seed=1, ignore_eos=True)
    prompt, found = list(range(3, 203)), []
    for rest in (False, True, True):
        engine.generate([prompt], sampling)
        found.append(engine.stats().cached_tokens)
        if rest:
            engine.sleep()
    assert found[0] == 0
    assert found[1] == found[2] > 100
