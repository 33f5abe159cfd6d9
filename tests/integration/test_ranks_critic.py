"""PPO's critic over several ranks has one rank's bytes: values, metrics, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlloop.config.algorithm import CriticConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.models import new_model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.trainer.critic import Critic
from rlloop.types import Completion, Example, RewardResult, Sample, SamplingParams
from tests.support.rank_updates import DENSE, MIXTURE, digests, digests_of
from tests.support.ranked_run import finish, same, start
from tests.support.ranks import run_ranks
from tests.support.train_sequences import VOCAB

MODELS = {"dense": (DENSE, "bfloat16"), "experts": (MIXTURE, "float32")}
LAYOUTS: dict[int, list[tuple[str, dict[str, int]]]] = {
    2: [
        ("dense", {"dp_replicate": 2}), ("dense", {"tp": 2}), ("experts", {"dp_shard": 2}),
        ("experts", {"dp_shard": 2, "ep": 2}),
    ],
    3: [("dense", {"dp_shard": 3}), ("experts", {"dp_shard": 3, "ep": 3})],
}  # fmt: skip


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


def critic(name: str, layout: dict[str, int]) -> Critic:
    config, dtype = MODELS[name]
    model = new_model(config, seed=0, dtype=dtype, context=join(torch.device("cpu"), Layout(**layout)))
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


def trained(folder: Path, name: str, layout: dict[str, int]) -> tuple[str, dict[str, str], str]:
    """Digests of two steps' reports, of the file that is saved then, and of the next one's."""
    learner, place = critic(name, layout), folder / f"{name} {layout}"
    place.mkdir(exist_ok=True, parents=True)
    first = learnt(learner, range(2))
    learner.save(place)
    world = learner.model.context.ranks("world")
    saved = world.broadcast_object(digests(place) if world.rank == 0 else None)
    return first, saved, learnt(learner, range(2, 3))


def everything(folder: Path, size: int) -> list[Any]:
    found: list[Any] = [trained(folder, *each) for each in LAYOUTS[size]]
    resumed = critic("experts", LAYOUTS[size][-1][1])
    resumed.restore(folder / "alone" / "experts {}")
    return [*found, learnt(resumed, range(2, 3))]


@pytest.mark.parametrize("size", LAYOUTS)
def test_a_critic_over_ranks_is_one_ranks(tmp_path: Path, size: int) -> None:
    alone = {name: trained(tmp_path / "alone", name, {}) for name in MODELS}
    for found in run_ranks(size, everything, tmp_path, size):
        for (name, layout), result in zip(LAYOUTS[size], found, strict=False):
            assert result == alone[name], (name, layout)
        assert found[-1] == alone["experts"][2], "resumed"
    again = critic("experts", {})
    again.restore(tmp_path / f"experts {LAYOUTS[size][-1][1]}")
    assert learnt(again, range(2, 3)) == alone["experts"][2]


def over_tokens(folder: Path) -> tuple[list[bytes], list[str]]:
    """Values, and reports of two critics, where ranks have some of each sequence's tokens."""
    layout = {"cp": 2}
    values = [each.tobytes() for each in taught(critic("dense", layout)).values(samples(0))]
    return values, [learnt(critic("dense", layout), range(2)) for _ in range(2)]


def taught(learner: Critic) -> Critic:
    """With a head that has values other than 0."""
    with torch.no_grad():
        learner.head.copy_(torch.linspace(-1, 1, len(learner.head)))
    return learner


def test_a_critic_over_parts_of_sequences_repeats_its_bits(tmp_path: Path) -> None:
    wanted = [each.tobytes() for each in taught(critic("dense", {})).values(samples(0))]
    first, second = run_ranks(2, over_tokens, tmp_path)
    assert first == second
    assert first[0] == wanted
    assert first[1][0] == first[1][1]


PPO = ("algorithm=ppo_critic", "algorithm.critic.lr=1e-3", "rollout.group_size=1", "trainer.num_steps=2")


def test_a_run_with_a_critic_over_ranks_is_one_ranks(tmp_path: Path) -> None:
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    finish(start(alone, 1, *PPO))
    finish(start(ranks, 2, *PPO, "trainer.layout.dp_shard=2"))
    same(ranks, alone, 2)
    critics = [run / "checkpoints" / "step_2" / "critic.safetensors" for run in (alone, ranks)]
    assert critics[0].read_bytes() == critics[1].read_bytes()
