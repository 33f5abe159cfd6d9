"""A model with an adapter inside vLLM: the embedded engine's bits, hence the trainer's, while the adapter trains."""

from __future__ import annotations

from rlloop import Engine, load_model
from rlloop.algorithms import get_loss
from rlloop.config.run import LoraSection, TrainerConfig
from rlloop.launch.workers import with_lora
from rlloop.models import save_model
from rlloop.rollout.vllm.engine import VllmEngine
from rlloop.trainer import Trainer
from tests.support.samples import as_sample, different
from tests.support.tiny_models import tiny_qwen3
from tests.support.vllm_traffic import bits, traffic


def test_it_samples_the_trainers_bits_while_the_adapter_trains(tmp_path):
    save_model(tiny_qwen3(dtype="bfloat16"), tmp_path / "base")
    base = load_model(tmp_path / "base", dtype="bfloat16")
    model = with_lora(base, LoraSection(rank=4, targets=["all-linear", "lm_head"]), 0)
    trainer, embedded = Trainer(model, TrainerConfig(lr=3e-2, max_batch_tokens=400)), Engine(model)
    engine = VllmEngine(model, max_batch_tokens=64, max_running=32, max_cache_tokens=400)
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
    engine.close()
    assert seen[0] != seen[1] != seen[2]
    assert bits(Engine(base).generate(prompts, sampling)) == seen[0]  # B was 0
