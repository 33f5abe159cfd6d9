"""A weighted sum of several rewards."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from rlloop.errors import ConfigError
from rlloop.rewards.examples import check_of
from rlloop.rewards.resolve import resolve_reward
from rlloop.rewards.runner import TAKEN, RewardFailure, as_result
from rlloop.types import Example, RewardResult


class Weighted:
    """The weighted sum of named rewards; `components` has each part before its weight.

    `parts` maps a name to a reward's configuration (`_target_` and its arguments) with an optional `weight` (1). If a
    part fails, the sample fails: a sum without it would be another reward. A sample is solved if the part named by
    `solved_by` says so (default: the first part).

    Example:

        reward:
          _target_: rlloop.rewards.Weighted
          parts:
            correct: {_target_: rlloop.rewards.MathReward}
            short: {_target_: mine.brevity, weight: 0.1}

    Raises ConfigError for empty `parts`, an unknown `solved_by`, and a part with the name of a metric.
    """

    def __init__(self, parts: dict[str, dict[str, Any]], solved_by: str | None = None) -> None:
        if not parts:
            raise ConfigError("reward.parts is empty; name at least one reward there")
        self.solved_by = solved_by or next(iter(parts))
        if self.solved_by not in parts:
            raise ConfigError(f"reward.solved_by is {self.solved_by!r}; it must be one of {', '.join(parts)}")
        for name, part in parts.items():
            if name in TAKEN:
                raise ConfigError(f"reward.parts.{name} has the name of the metric reward/{name}; call it another")
            if not isinstance(part, Mapping):
                raise ConfigError(f"reward.parts.{name} is {part!r}; it must be {{_target_: ..., weight: ...}}")
            if not isinstance(part.get("weight", 1.0), int | float):
                raise ConfigError(f"reward.parts.{name}.weight is {part['weight']!r}; it must be a number")
        self.weights = {name: float(part.get("weight", 1.0)) for name, part in parts.items()}
        self.rewards = {
            name: resolve_reward({key: value for key, value in part.items() if key != "weight"}, f"reward.parts.{name}")
            for name, part in parts.items()
        }
        batched = [name for name, reward in self.rewards.items() if getattr(reward, "batched", False)]
        if batched:
            raise ConfigError(f"reward.parts.{batched[0]} is a batched reward; a weighted sum takes per-sample rewards")
        self.reproducible = all(getattr(reward, "reproducible", True) for reward in self.rewards.values())
        limits = [getattr(reward, "concurrency", None) for reward in self.rewards.values()]
        self.concurrency = min((limit for limit in limits if limit), default=None)

    def check_example(self, example: Example) -> None:
        """Raises `ConfigError` for an example that a part refuses."""
        for name, reward in self.rewards.items():
            if check := check_of(reward, f"part {name!r}"):
                check(example)

    async def _part(self, name: str, request: tuple[str, str, Example]) -> RewardResult:
        reward = self.rewards[name]
        value = reward(*request)
        result = as_result(await value if inspect.isawaitable(value) else value)
        if isinstance(result, RewardFailure):
            raise ValueError(f"part {name!r} {result.message}")
        return result

    async def __call__(self, prompt: str, completion: str, example: Example) -> RewardResult:
        request = (prompt, completion, example)
        results = dict(
            zip(self.rewards, await asyncio.gather(*(self._part(name, request) for name in self.rewards)), strict=True)
        )
        components = {name: result.reward for name, result in results.items()}
        for name, result in results.items():
            components.update({f"{name}/{key}": value for key, value in result.components.items()})
        total = sum(self.weights[name] * result.reward for name, result in results.items())
        return RewardResult(total, results[self.solved_by].solved, components)

    async def close(self) -> None:
        for reward in self.rewards.values():
            closer = getattr(reward, "close", None)
            if inspect.iscoroutinefunction(closer):
                await closer()
