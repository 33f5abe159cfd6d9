"""Every family learns: a few sequences by heart, router and experts included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlloop.algorithms import loss_for
from rlloop.config.run import AlgorithmConfig, Schedule, TrainerConfig
from rlloop.models import load_model
from rlloop.trainer import Trainer
from rlloop.trainer.batching import TrainSequence
from tests.checkpoints import EVERY, make_checkpoint

STEPS = 40
SFT = loss_for(AlgorithmConfig(loss="sft", advantage="grpo"))


def memorise(folder: Path) -> tuple[list[float], dict[str, float]]:
    """The loss (mean nats a token) of each step, and how far each parameter moved, in its own norm.

    The learning rate falls to 0: at a constant one, a token that changes experts late costs a spike.
    """
    model = load_model(folder)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rng = np.random.default_rng(0)
    batch = [
        TrainSequence.supervised(rng.integers(3, 97, 4).tolist(), rng.integers(3, 97, 12).tolist()) for _ in range(4)
    ]
    trainer = Trainer(model, TrainerConfig(lr=1e-2, schedule=Schedule.linear, num_steps=STEPS, max_batch_tokens=256))
    losses = []
    for _ in range(STEPS):
        result = trainer.forward_backward(batch, SFT)
        losses.append(-float(np.concatenate(result.logprobs).mean()))
        trainer.optim_step()
    moved = {
        name: ((parameter.detach() - before[name]).norm() / before[name].norm()).item()
        for name, parameter in model.named_parameters()
    }
    return losses, moved


@pytest.mark.parametrize("family", EVERY)
def test_a_few_sequences_are_learned_by_heart(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    losses, moved = memorise(tmp_path)
    assert losses[0] > 3
    assert losses[-1] < 0.01
    choices = {name for name in moved if "indexer" in name or "e_score" in name}
    assert all(moved[name] == 0 for name in choices)
    assert all(distance > 1e-3 for name, distance in moved.items() if name not in choices)
