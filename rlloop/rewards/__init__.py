"""Rewards: what a completion is worth.

A reward is a callable `(prompt, completion, example) -> float | RewardResult`, sync or async: see `rlloop.protocols`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlloop.config.instantiate import resolve

if TYPE_CHECKING:
    from rlloop.rewards.code import CodeReward
    from rlloop.rewards.http import HttpReward
    from rlloop.rewards.math import MathReward
    from rlloop.rewards.weighted import Weighted

__all__ = ["CodeReward", "HttpReward", "MathReward", "Weighted", "resolve_reward"]

# Imported when first named: httpx and the process pool cost start-up time that most runs have no use for.
_HOMES = {"CodeReward": "code", "HttpReward": "http", "MathReward": "math", "Weighted": "weighted"}

ARGUMENTS = ("prompt", "completion", "example")


def resolve_reward(config: Mapping[str, Any], section: str = "reward") -> Any:
    """The reward `config` describes: `_target_` names a function (bound to the other keys) or a class (instantiated).

    Raises `ConfigError` for a path that leads nowhere, or arguments that the target does not take.

    Example: `resolve_reward({"_target_": "rlloop.rewards.countdown.countdown_reward", "format_credit": 0.1})`.
    """
    return resolve(config, section, ARGUMENTS)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
