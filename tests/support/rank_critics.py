"""A critic of PPO that learns over ranks, for tests on CPUs and on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlloop.config.algorithm import CriticConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.models import new_model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.trainer.critic import Critic
from rlloop.types import Completion, Example, RewardResult, Sample, SamplingParams
from tests.support.rank_cases import CPU
from tests.support.rank_updates import DENSE, MIXTURE, digests, digests_of
from tests.support.train_sequences import VOCAB

MODELS = {"dense": (DENSE, "bfloat16"), "experts": (MIXTURE, "float32")}


def samples(step: int) -> list[Sample]:
    """Completions of ragged lengths, in more micro-batches than ranks, but no multiple of their number."""
    found, random = [], np.random.default_rng(step)
    for index in range(11):
        prompt, count = random.integers(3, VOCAB, 2 + index % 5).tolist(), 3 + int(random.integers(8))
        zeros, reward = np.zeros(count, np.float32), float(random.normal())
        ids = random.integers(3, VOCAB, count).tolist()
        made = Completion(prompt, ids, zeros, zeros, 0, "stop", SamplingParams(max_tokens=16, seed=0))
        found.append(Sample(f"{index}", Example(f"{index}", prompt, "", {}), made, "", RewardResult(reward), 0, reward))
    return found


def critic(name: str, layout: dict[str, int], device: torch.device = CPU) -> Critic:
    config, dtype = MODELS[name]
    model = new_model(config, seed=0, dtype=dtype, context=join(device, Layout(**layout)))
    settings = TrainerConfig(max_batch_tokens=40, grad_clip=0.05, checkpoint_layers="all")
    return Critic(model, CriticConfig(lr=2e-2, epochs=2), settings)


def learnt(learner: Critic, steps: range) -> str:
    """Digest of all that a critic reports."""
    reported = list[Any]()
    for step in steps:
        batch = learner.advantages(samples(step))
        reported += [each.token_advantages.tobytes() for each in batch if each.token_advantages is not None]
        reported.append(learner.update(batch))
    values = [each.tobytes() for each in learner.values(samples(99))]
    return digests_of([tuple(values), *reported])


def trained(
    folder: Path, name: str, layout: dict[str, int], device: torch.device = CPU
) -> tuple[str, dict[str, str], str]:
    """Digests of two steps' reports, of the file that is saved then, and of the next one's."""
    learner, place = critic(name, layout, device), folder / f"{name} {layout}"
    place.mkdir(exist_ok=True, parents=True)
    first = learnt(learner, range(2))
    learner.save(place)
    world = learner.model.context.ranks("world")
    saved = world.broadcast_object(digests(place) if world.rank == 0 else None)
    return first, saved, learnt(learner, range(2, 3))
