"""The reward of a conversation: what its environment gave."""

from __future__ import annotations

from rlloop.types import Example, RewardResult


def episode_reward(prompt: str, completion: str, example: Example) -> RewardResult:
    """The sum of the environment's rewards, with its components and `turns`. A part of a `Weighted` like any other."""
    episode = example.data.get("episode")
    if episode is None:
        raise ValueError(f"example {example.id!r} was no conversation; episode_reward is for tasks with an environment")
    return RewardResult(
        episode["reward"], episode["solved"], {**episode["components"], "turns": float(episode["turns"])}
    )
