"""The trainer's recomputed logprobs are the engine's sampled decode logprobs, bit for bit, before and after updates."""

from pathlib import Path

import numpy as np
import pytest

from rlloop import Engine, NumericsProfile, SamplingParams, load_model
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.trainer import Trainer
from rlloop.types import Sample
from tests.support.checkpoints import make_checkpoint
from tests.support.samples import as_sample, different

VOCAB = 97


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(path, vocab_size=VOCAB, tie_word_embeddings=True, eos_token_id=0)
    return path


def roll(engine: Engine, seed: int) -> list[Sample]:
    """Prompts of many lengths under every kind of sampling, with advantages that move the weights."""
    rng = np.random.default_rng(seed)
    kinds = [
        {},
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_tokens": 5},
    ]
    prompts = [rng.integers(1, VOCAB, n).tolist() for n in (1, 3, 15, 16, 17, 40, 70) for _ in range(2)]
    sampling = [
        SamplingParams(max_tokens=int(rng.integers(1, 30)) + 5, seed=i, **kinds[i % len(kinds)])
        for i in range(len(prompts))
    ]
    made = engine.generate(prompts, sampling)
    return [as_sample(i, completion, float(rng.normal())) for i, completion in enumerate(made)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("budget", [110, 4096])
def test_trainer_equals_engine_before_and_after_every_update(folder: Path, dtype: str, budget: int) -> None:
    model = load_model(folder, dtype=dtype)
    engine = Engine(model, page_size=16, max_batch_tokens=64)
    trainer = Trainer(model, TrainerConfig(lr=1e-2, max_batch_tokens=budget))
    means = []
    for step in range(3):
        samples = roll(engine, seed=step)
        assert different(samples, trainer.logprobs(samples)) == 0
        result = trainer.forward_backward(samples, get_loss("grpo"))
        assert sum(map(len, result.logprobs)) > 100
        assert different(samples, result.logprobs) == 0
        raw, drawn = result.recomputed.raw_logprobs, result.recomputed.redrawn
        assert raw is not None
        assert drawn is not None
        assert [each.tobytes() for each in raw] == [each.completion.raw_logprobs.tobytes() for each in samples]
        assert [each.tolist() for each in drawn] == [each.completion.token_ids for each in samples]
        assert trainer.optim_step()["loss/grad_norm"] > 0
        assert different(samples, trainer.logprobs(samples)) > 50  # the weights, and so the engine's, have moved
        engine.set_version(step + 1)
        means.append(np.concatenate(result.logprobs).mean())
    assert len(set(means)) == 3


def test_a_restored_trainer_equals_its_engine(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, dtype="bfloat16")
    trainer = Trainer(model, TrainerConfig(lr=1e-2))
    trainer.forward_backward(roll(Engine(model), seed=0), get_loss("grpo"))
    trainer.optim_step()
    trainer.save(tmp_path)

    fresh = load_model(folder, dtype="bfloat16")
    engine, restored = Engine(fresh), Trainer(fresh, TrainerConfig(lr=1e-2))
    restored.restore(tmp_path)
    engine.set_version(1)
    samples = roll(engine, seed=1)
    assert different(samples, restored.logprobs(samples)) == 0
    assert different(samples, trainer.logprobs(samples)) == 0


@pytest.mark.parametrize("op", ["rms_norm", "activation", "attention", "token_logprob"])
def test_one_stock_op_in_the_trainer_is_seen(folder: Path, op: str) -> None:
    model = load_model(folder)
    samples = roll(Engine(model), seed=0)
    faulty = Trainer(model.with_profile(NumericsProfile(**{op: "stock"})), TrainerConfig())
    assert different(samples, faulty.logprobs(samples)) > 0
    assert faulty.fingerprint() != Trainer(model, TrainerConfig()).fingerprint()
