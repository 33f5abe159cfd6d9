"""What a model chooses on its way: recorded by the engine, compared and replayed by the trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rlloop.algorithms import loss_for
from rlloop.config import AlgorithmConfig, TrainerConfig
from rlloop.errors import ConfigError
from rlloop.models import Model, load_model
from rlloop.numerics.profile import Drift
from rlloop.parity.monitor import compare
from rlloop.parity.replay import pack_experts, unpack_experts
from rlloop.rollout import Engine
from rlloop.sync.drifted import DriftedSync, drifted_copy
from rlloop.trainer import Trainer
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from tests.checkpoints import MIXTURES, make_checkpoint

PROMPTS = [list(range(3, 40)), list(range(3, 40)), [5, 9], list(range(50, 90)), [7]] * 2
SAMPLING = [SamplingParams(max_tokens=24, seed=seed, ignore_eos=True) for seed in range(len(PROMPTS))]
LOSS = loss_for(AlgorithmConfig(loss="reinforce", advantage="grpo"))


def samples_of(engine: Engine) -> list[Sample]:
    return [
        Sample(str(i), Example(str(i), made.prompt_ids, "", {}), made, "", RewardResult(0.0), 0, float((-1) ** i))
        for i, made in enumerate(engine.generate(PROMPTS, SAMPLING))
    ]


def trainer_of(model: Model, **settings: float) -> Trainer:
    return Trainer(model, TrainerConfig(lr=2e-2, max_batch_tokens=160, **settings))


@pytest.fixture(params=MIXTURES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    make_checkpoint(tmp_path, request.param)
    return load_model(tmp_path)


def test_choices_and_bits_agree_over_updates(model: Model) -> None:
    """Prefixes from the cache, preemption and chunks: every token's choices are those of the trainer's forward."""
    engine = Engine(model, max_batch_tokens=32, max_cache_tokens=208, page_size=8)
    trainer = trainer_of(model)
    layers, top_k, _ = model.route_shape() or (0, 0, 0)
    for version in range(3):
        engine.set_version(version)
        samples = samples_of(engine)
        for sample in samples:
            made = sample.completion
            assert made.routed_experts is not None
            assert made.routed_experts.dtype == np.uint8
            assert made.routed_experts.shape == (len(made.prompt_ids) + len(made.token_ids) - 1, layers, top_k)
        result = trainer.forward_backward(samples, LOSS)
        comparison = compare(samples, result.logprobs)
        assert comparison.equal
        assert comparison.metrics["parity/k3"] == 0
        wanted = {"parity/router_different": 0.0}
        if model.indexed_layers():
            wanted["parity/indexer_different"] = 0.0
        assert trainer.routing() == wanted
        assert trainer.optim_step()["loss/grad_norm"] > 0
    stats = engine.stats()
    assert stats.cached_tokens > 0
    assert stats.preemptions > 0


def test_a_wrong_record_is_seen(model: Model) -> None:
    engine, trainer = Engine(model), trainer_of(model)
    samples = samples_of(engine)
    made = samples[0].completion
    assert made.routed_experts is not None
    experts = made.routed_experts.copy()
    experts[4, 0] = [experts[4, 0, 1], experts[4, 0, 0]]  # another order is the same set
    swapped = dataclasses.replace(samples[0], completion=dataclasses.replace(made, routed_experts=experts))
    trainer.logprobs([swapped])
    assert trainer.routing()["parity/router_different"] == 0
    experts[4, 0, 0] = next(e for e in range(8) if e not in experts[4, 0])
    trainer.logprobs([swapped])
    assert trainer.routing()["parity/router_different"] == 1 / (len(experts) * experts.shape[1])
    if made.selected is not None:
        selected = made.selected.copy()
        selected[7, 1] += 1
        other = dataclasses.replace(samples[0], completion=dataclasses.replace(made, selected=selected))
        trainer.logprobs([other])
        assert trainer.routing()["parity/indexer_different"] == 1 / selected.size


def drifting(model: Model) -> tuple[Engine, Trainer]:
    """An engine whose weights are rounded to five bits, but for routers and ends."""
    profile = dataclasses.replace(model.profile, drift=Drift(weights="int5"))
    engine = Engine(drifted_copy(model).with_profile(profile))
    DriftedSync(model, engine).publish(0)
    return engine, trainer_of(model)


def test_replay_lowers_the_divergence_of_a_drifting_engine(model: Model) -> None:
    engine, trainer = drifting(model)
    samples = samples_of(engine)
    found = {}
    for replay in (False, True):
        trainer.replay_experts(replay)
        k3 = compare(samples, trainer.logprobs(samples)).metrics["parity/k3"]
        found[replay] = k3, trainer.routing()["parity/router_different"]
        if model.indexed_layers():
            assert trainer.routing()["parity/indexer_different"] > 0, "past tokens are not replayed"
    assert found[False][1] > 0.01
    assert found[True][1] == 0
    assert 0 < found[True][0] < found[False][0]


def test_replay_reaches_backward_and_recomputation(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    model = load_model(tmp_path)
    samples = samples_of(drifting(model)[0])
    gradients = []
    for replay, recompute in ((False, False), (True, False), (True, True)):
        trainer = trainer_of(model)
        trainer.replay_experts(replay)
        model.checkpoint_layers = recompute
        trainer.forward_backward(samples, LOSS)
        gradients.append({name: tensor.grad for name, tensor in trainer.masters.items() if tensor.grad is not None})
        assert (trainer.routing()["parity/router_different"] == 0) == replay
    plain, replayed, recomputed = gradients
    gate = "model.layers.1.mlp.gate.weight"
    assert not torch.equal(plain[gate], replayed[gate])
    assert all(torch.equal(replayed[name], recomputed[name]) for name in replayed)


def test_nothing_to_replay_is_said(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    model = load_model(tmp_path)
    samples = samples_of(Engine(model, record_choices=False))
    assert samples[0].completion.routed_experts is None
    trainer = trainer_of(model)
    trainer.logprobs(samples)
    assert trainer.routing() == {}
    trainer.replay_experts(True)
    with pytest.raises(ConfigError, match="record_choices=True"):
        trainer.logprobs(samples)


@pytest.mark.parametrize("experts", [8, 300])
def test_choices_survive_the_rollout_file(experts: int) -> None:
    chosen = np.random.default_rng(0).integers(0, experts, (40, 3, 4)).astype(np.min_scalar_type(experts - 1))
    packed = pack_experts(chosen)
    again = unpack_experts(packed)
    assert again.dtype == chosen.dtype == (np.uint8 if experts == 8 else np.uint16)
    assert np.array_equal(again, chosen)
    assert len(packed["data"]) < 0.9 * 4 / 3 * chosen.nbytes
