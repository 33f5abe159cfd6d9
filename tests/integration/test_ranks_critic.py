"""PPO's critic over several ranks has one rank's bytes: values, metrics, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlloop.trainer.critic import Critic
from tests.support.rank_critics import MODELS, critic, learnt, samples, trained
from tests.support.ranked_run import finish, same, start
from tests.support.ranks import run_ranks

LAYOUTS: dict[int, list[tuple[str, dict[str, int]]]] = {
    2: [
        ("dense", {"dp_replicate": 2}), ("dense", {"tp": 2}), ("experts", {"dp_shard": 2}),
        ("experts", {"dp_shard": 2, "ep": 2}),
    ],
    3: [("dense", {"dp_shard": 3}), ("experts", {"dp_shard": 3, "ep": 3})],
}  # fmt: skip


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
