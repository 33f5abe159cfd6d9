"""`trainer.freeze_vision_tower`: the text model trains, and not a byte of the tower changes or is kept twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlloop import Engine, load_model
from rlloop.algorithms import get_loss
from rlloop.config.algorithm import CriticConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.models.parameters import ParameterStore
from rlloop.trainer import Trainer
from rlloop.trainer.critic import Critic
from tests.support.checkpoints import make_checkpoint
from tests.support.image_models import FAMILIES, make_image_checkpoint
from tests.support.image_samples import sampled
from tests.support.samples import different

TOWER = "visual."
FROZEN = TrainerConfig(lr=1e-2, freeze_vision_tower=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_trains_and_the_tower_stays(tmp_path: Path, family: str, dtype: str) -> None:
    make_image_checkpoint(tmp_path / "model", family)
    model = load_model(tmp_path / "model", dtype=dtype)
    before = ParameterStore(model).snapshot()
    tower = {name for name in before if name.startswith(TOWER)}
    assert any("merger" in name for name in tower)
    trainer, engine = Trainer(model, FROZEN), Engine(model)
    for step in range(3):
        batch = sampled(engine, step)
        result = trainer.forward_backward(batch, get_loss("grpo"))
        assert different(batch, list(result.logprobs)) == 0
        assert trainer.optim_step()["loss/grad_norm"] > 0
        engine.set_version(step + 1)
    after = dict(trainer.compute_copy())
    same = {name for name, weight in after.items() if torch.equal(weight, before[name])}
    assert tower <= same
    trained = before.keys() - tower
    assert len(same - tower) < 0.1 * len(trained)  # experts' biases and the like may have no gradient
    assert trainer.masters.keys() == trained
    assert model.visual is not None
    assert all(each.grad is None for each in model.visual.parameters())
    trainer.save(tmp_path / "saved")
    saved = ParameterStore(load_model(tmp_path / "saved", dtype=dtype)).tensors()
    assert all(torch.equal(weight, after[name]) for name, weight in saved.items())
    again = Trainer(load_model(tmp_path / "saved", dtype=dtype), FROZEN)
    again.restore(tmp_path / "saved")
    assert all(torch.equal(weight, after[name]) for name, weight in again.compute_copy())


def test_without_the_key_every_part_of_the_tower_trains(tmp_path: Path) -> None:
    make_image_checkpoint(tmp_path)
    model = load_model(tmp_path)
    trainer = Trainer(model, TrainerConfig(lr=1e-2))
    before = ParameterStore(model).snapshot()
    trainer.forward_backward(sampled(Engine(model), 0), get_loss("grpo"))
    trainer.optim_step()
    assert not any(torch.equal(w, before[name]) for name, w in trainer.compute_copy() if name.startswith(TOWER))


def test_the_critics_tower_stays_too(tmp_path: Path) -> None:
    make_image_checkpoint(tmp_path)
    critic = Critic(load_model(tmp_path), CriticConfig(lr=1e-3), FROZEN)
    assert not any(name.startswith(TOWER) for name in critic._masters.shards)


def test_text_models_are_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=r"freeze_vision_tower: Qwen3ForCausalLM .*no vision tower; set it to false"):
        Trainer(load_model(tmp_path), FROZEN)
