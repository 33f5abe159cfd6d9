"""Rewards: callables that score completions, `(prompt, completion, example) -> float | RewardResult`, sync or async.

`rlloop.protocols.Reward` has the contract.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlloop.rewards.resolve import resolve_reward

if TYPE_CHECKING:
    from rlloop.rewards.code import CodeReward
    from rlloop.rewards.http import HttpReward
    from rlloop.rewards.judge import JudgeReward, PairwiseJudge
    from rlloop.rewards.math import MathReward
    from rlloop.rewards.reward_model import RewardModel
    from rlloop.rewards.weighted import Weighted

__all__ = [
    "CodeReward",
    "HttpReward",
    "JudgeReward",
    "MathReward",
    "PairwiseJudge",
    "RewardModel",
    "Weighted",
    "resolve_reward",
]

# Imported when first named: httpx and the process pool cost start-up time that most runs have no use for.
_HOMES = {
    "CodeReward": "code",
    "HttpReward": "http",
    "JudgeReward": "judge",
    "MathReward": "math",
    "PairwiseJudge": "judge",
    "RewardModel": "reward_model",
    "Weighted": "weighted",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
