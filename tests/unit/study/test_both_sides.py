"""Weights rounded in the trainer as in the engine: gradients pass straight through to exact masters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import Model, load_model, new_model, token_logprobs
from rlloop.models.parameters import ParameterStore
from rlloop.numerics.profile import Drift, NumericsProfile
from rlloop.rollout import Engine
from rlloop.study.drifted import BothSidesSync, DriftedSync, both_sides_view, drifted_copy, rounded
from rlloop.study.drifted_ops import drifted_ops
from rlloop.trainer import Trainer
from rlloop.types import SamplingParams
from tests.support.rank_updates import DENSE
from tests.support.train_sequences import gradients, make_batch

FP4 = Drift(weights="fp4", granularity="block", from_step=2, both_sides=True)
LINEAR = "model.layers.0.mlp.up_proj.weight"


class Rounded:
    """A trainer, an engine that shares its model, and the sync that rounds it."""

    def __init__(self, dtype: str = "float32", drift: Drift = FP4, lr: float = 1e-4, offload: str = "none") -> None:
        self.model = both_sides_view(new_model(DENSE, seed=0, dtype=dtype), drift)
        self.trainer = Trainer(self.model, TrainerConfig(lr=lr, offload=offload), apart=True)
        self.engine = Engine(self.model.with_profile(NumericsProfile(drift=drift), drifted_ops))
        self.sync = BothSidesSync(self.model, self.trainer, drift, self.engine)

    def differing(self) -> int:
        [made] = self.engine.generate([[1, 2, 3]], SamplingParams(16, seed=1, ignore_eos=True))
        [scored] = token_logprobs(self.model, [(made.prompt_ids, made.token_ids)])
        return int((scored.detach().float().numpy() != made.logprobs).sum())


def live(model: Model) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def masters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in trainer.masters.items()}


def step(trainer: Trainer, seed: int) -> None:
    trainer.forward_backward(make_batch(count=3, seed=seed), get_loss("grpo"))
    trainer.optim_step()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_until_the_drift_begins_bits_are_those_of_masters_in_place():
    plain, apart = Trainer(new_model(DENSE, seed=0), TrainerConfig(lr=1e-2)), Rounded(lr=1e-2)
    assert apart.sync.publish(0) == {"sync/weight_error": 0.0}
    for seed in range(3):
        step(plain, seed)
        step(apart.trainer, seed)
    assert same(masters(plain), masters(apart.trainer))
    assert same(live(plain.model), live(apart.model))


@pytest.mark.parametrize(("dtype", "offload"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "masters")])
def test_both_compute_with_the_weights_of_an_engine_that_drifts_alone(dtype, offload):
    both = Rounded(dtype, lr=1e-2, offload=offload)
    exact = new_model(DENSE, seed=0, dtype=dtype)  # its parameters are set to the masters, rounded to the type
    alone = NumericsProfile(drift=dataclasses.replace(FP4, both_sides=False))
    drifting = Engine(drifted_copy(exact).with_profile(alone, drifted_ops))
    sync = DriftedSync(exact, drifting)
    for version in range(4):
        error = both.sync.publish(version)["sync/weight_error"]
        assert (error > 0.01) == (version >= 1)
        ParameterStore(exact).copy_from(masters(both.trainer))
        sync.publish(version)
        assert same(live(both.model), live(drifting.model))
        assert same(live(both.model), live(exact)) == (version < 1)
        assert both.differing() == 0
        step(both.trainer, seed=version)
    assert both.engine.fingerprint() == both.trainer.fingerprint()
    assert both.engine.fingerprint()["profile"]["drift"]["both_sides"] is True


def test_the_gradient_is_that_of_the_rounded_weights():
    both, batch = Rounded(), make_batch()
    both.sync.publish(1)
    plain = Trainer(new_model(DENSE, seed=0), TrainerConfig())
    plain._masters.load({name: rounded(FP4, name, each) for name, each in masters(plain).items()})
    for trainer in (both.trainer, plain):
        trainer.forward_backward(batch, get_loss("grpo"))
    assert same(gradients(both.trainer), gradients(plain))
    assert any(each.any() for each in gradients(plain).values())


def test_updates_smaller_than_a_rounding_step_are_not_lost():
    both = Rounded(lr=2e-4)
    both.sync.publish(1)
    before, start = live(both.model)[LINEAR], masters(both.trainer)[LINEAR]
    step(both.trainer, seed=0)
    moved = masters(both.trainer)[LINEAR] != start
    assert moved.float().mean() > 0.99  # AdamW's first step moves each by lr, ...
    # ... less than most codes need to change. (Scales follow the largest weight of the matrix, so they do change.)
    assert torch.isclose(live(both.model)[LINEAR], before, rtol=0.01).float().mean() > 0.9
    for _ in range(40):
        step(both.trainer, seed=0)
    assert torch.isclose(live(both.model)[LINEAR], before, rtol=0.01).float().mean() < 0.8
    for name, master in masters(both.trainer).items():
        assert torch.equal(live(both.model)[name], rounded(FP4, name, master))


def test_a_checkpoint_has_the_masters_and_a_resumed_run_rounds_them_again(tmp_path):
    whole, resumed = Rounded(lr=1e-2), Rounded(lr=1e-2)
    for version in range(2):
        whole.sync.publish(version)
        step(whole.trainer, seed=version)
    whole.trainer.save(tmp_path)
    assert torch.equal(load_model(tmp_path).get_parameter(LINEAR).detach(), whole.trainer.masters[LINEAR])
    resumed.trainer.restore(tmp_path)
    for each in (whole, resumed):
        each.sync.publish(2)
        assert each.differing() == 0
        step(each.trainer, seed=2)
    assert same(masters(whole.trainer), masters(resumed.trainer))
    assert same(live(whole.model), live(resumed.model))
