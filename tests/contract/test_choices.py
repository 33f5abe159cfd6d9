"""Discrete choices inside a model (experts, selected tokens): recorded by the engine, compared and replayed by the
trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rlloop.algorithms import loss_for
from rlloop.config.run import AlgorithmConfig
from rlloop.errors import ConfigError
from rlloop.models import Model, load_model
from rlloop.parity.monitor import compare
from rlloop.rollout import Engine
from rlloop.runs.rollouts import pack_experts, unpack_experts
from rlloop.types import SamplingParams
from tests.support.checkpoints import MIXTURES, make_checkpoint
from tests.support.replay_cases import engine_of, measure, samples_of, trainer_of
from tests.support.train_sequences import gradients

LOSS = loss_for(AlgorithmConfig(loss="reinforce", advantage="grpo"))


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


def test_a_group_that_shares_a_part_of_a_page_has_its_choices(model: Model) -> None:
    prompt, sampling = [5, 9, 7, 3, 8, 4, 6, 2, 9, 5, 7], [SamplingParams(4, seed=seed) for seed in range(3)]
    shared, alone = (
        Engine(model, page_size=8, prefix_caching=caching).generate([prompt] * 3, sampling) for caching in (True, False)
    )
    for one, other in zip(shared, alone, strict=True):
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        for mine, theirs in ((one.routed_experts, other.routed_experts), (one.selected, other.selected)):
            assert mine is theirs is None or (mine is not None and np.array_equal(mine, theirs))


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


def test_replay_lowers_the_divergence_of_a_drifting_engine(model: Model) -> None:
    found = measure(model, "weights int5")
    assert found.experts > 0.01
    assert 0 < found.replayed < found.k3
    if model.indexed_layers():
        assert found.selections, "past tokens are not replayed"


def test_replay_reaches_backward_and_recomputation(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    model = load_model(tmp_path)
    samples = samples_of(engine_of(model, "weights int5"))
    found = []
    for replay, recompute in ((False, False), (True, False), (True, True)):
        trainer = trainer_of(model)
        trainer.replay_experts(replay)
        model.checkpoint_layers = int(recompute)
        trainer.forward_backward(samples, LOSS)
        found.append(gradients(trainer))
        assert (trainer.routing()["parity/router_different"] == 0) == replay
    plain, replayed, recomputed = found
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


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_replay_is_exact_where_nothing_but_experts_differs(tmp_path: Path, family: str) -> None:
    """The bias that this engine rounds decides who is chosen and weighs nothing: to take its experts is enough."""
    make_checkpoint(tmp_path, family)
    found = measure(load_model(tmp_path), "expert bias e4m3")
    assert min(found.experts, found.k3) > 0
    assert (found.replayed, found.different) == (0, 0)


def test_replay_is_not_where_the_indexer_reads_other_tokens(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32")
    found = measure(load_model(tmp_path), "expert bias e4m3, indexer fp8")
    assert found.selections is not None
    assert min(found.experts, found.selections) > 0.01
    assert 0 < found.replayed < found.k3
