"""The reward of a conversation, given by its environment."""

from __future__ import annotations

from rlloop.types import Example, RewardResult


def episode_reward(prompt: str, completion: str, example: Example) -> RewardResult:
    """The sum of the environment's rewards, with its components and `turns`. May be a part of a `Weighted`.

    Raises ValueError for a task without an environment.
    """
    episode = example.data.get("episode")
    if episode is None:
        raise ValueError(
            f"example {example.id!r} was not a conversation; episode_reward is for tasks with an environment"
        )
    return RewardResult(
        episode["reward"], episode["solved"], {**episode["components"], "turns": float(episode["turns"])}
    )
