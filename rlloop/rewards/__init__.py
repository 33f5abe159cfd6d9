"""Rewards: what a completion is worth.

A reward is a callable `(prompt, completion, example) -> float | RewardResult`, sync or async: see `rlloop.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlloop.targets import resolve

ARGUMENTS = ("prompt", "completion", "example")


def resolve_reward(config: Mapping[str, Any]) -> Any:
    """The reward `config` describes: `_target_` names a function (bound to the other keys) or a class (instantiated).

    Raises `ConfigError` for a path that leads nowhere, or arguments that the target does not take.

    Example: `resolve_reward({"_target_": "rlloop.rewards.countdown.countdown_reward", "format_credit": 0.1})`.
    """
    return resolve(config, "reward", ARGUMENTS)
