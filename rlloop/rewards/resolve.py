"""Builds a reward from its section of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlloop.config.instantiate import resolve

ARGUMENTS = ("prompt", "completion", "example")


def resolve_reward(config: Mapping[str, Any], section: str = "reward") -> Any:
    """The reward that `config` names: `_target_` is a function (bound to the other keys) or a class (instantiated).

    Raises `ConfigError` for a path that cannot be imported, and for arguments that the target does not take.

    Example: `resolve_reward({"_target_": "rlloop.rewards.countdown.countdown_reward", "format_credit": 0.1})`.
    """
    return resolve(config, section, ARGUMENTS)
