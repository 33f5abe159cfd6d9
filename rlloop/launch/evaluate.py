"""A stored model on the held-out prompts of a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.config.resume import flatten
from rlloop.config.tasks import offline_kind
from rlloop.errors import ConfigError
from rlloop.launch.compose import build, compose_recipe
from rlloop.launch.make import make_engine, vocabulary_of
from rlloop.launch.prepare import prepare
from rlloop.launch.stored import Stored
from rlloop.loop.sampler import Sampler
from rlloop.loop.step_data import outcomes_of
from rlloop.metrics import held_out_names, outcomes, pass_or_fail
from rlloop.types import RewardResult


@dataclass(frozen=True)
class Evaluation:
    """Rewards of held-out completions, and the completions as JSON objects."""

    folder: Path
    rewards: list[float]
    solved: list[bool]
    rows: list[dict[str, Any]]  # of rejected ones, too
    offline: str | None = None  # the kind of given completions, of a task of such
    recorded: Sequence[tuple[float, float]] = ()  # (mean reward, fraction solved) in the run of this task and reward

    def describe(self) -> str:
        """One line for each number, with its standard error."""
        lines = [f"{self.folder}: {len(self.rewards)} held-out completions"]
        passes = pass_or_fail([*self.recorded, *zip(self.rewards, self.solved, strict=True)], self.offline)
        passes |= not any(self.rewards)  # continuous rewards are hardly ever all 0
        reward, solves = held_out_names(self.offline)
        for name, values in ((solves, self.solved), (reward, self.rewards))[0 if passes else 1 :]:
            error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
            lines.append(f"  {name}  {np.mean(values):.4f} ± {error:.4f}")
        if failed := [row["failed"] for row in self.rows if "failed" in row]:
            lines.append(f"  {len(failed)} of {len(self.rows)} held-out samples rejected, first: {failed[0]}")
        return "\n".join(lines)


def evaluate(
    name: str,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    draws: int | None = None,
    temperature: float | None = None,
) -> Evaluation:
    """`name`: a run, a checkpoint or a model's folder; `recipe` with `overrides`: the task, where it is not the run's.

    Raises `ConfigError`, `ModelError` or `RunError`.
    """
    stored = Stored.find(name)
    if recipe is not None:
        config = build(compose_recipe(recipe, [f"model.path={stored.base()}", *overrides]))
    elif (recorded := stored.config()) is not None:
        config = recorded
    else:
        raise ConfigError(f"{name} is a model without a run, so nothing says what to ask it; add --config-name RECIPE")
    config.eval.num_draws = config.eval.num_draws if draws is None else draws
    config.eval.temperature = config.eval.temperature if temperature is None else temperature
    with ExitStack() as stack:
        prepared = prepare(config)
        stack.callback(prepared.scorer.close)
        model = stored.load(prepared.task.model_folder(), config.model.dtype, config.device)
        engine = make_engine(model, config.model.profile, config.rollout)
        sampler = Sampler(config, prepared.task, engine, vocabulary_of(model.config))
        stack.callback(sampler.close)
        samples = sampler.held_out(engine, engine.policy_version)
        scored = outcomes_of(prepared.scorer, samples)
    rows, rewards, solved = [], list[float](), list[bool]()
    for sample, outcome in zip(samples, scored, strict=True):
        row: dict[str, Any] = {"example": sample.example.id, "prompt": sample.example.prompt, "text": sample.text}
        if isinstance(outcome, RewardResult):
            rewards.append(outcome.reward)
            solved.append(outcome.solved)
            row |= vars(outcome)
        else:
            row["failed"] = outcome
        rows.append(row)
    if not rewards:
        raise ConfigError(f"every one of {len(rows)} held-out samples was rejected, first: {rows[0]['failed']}")
    kind = offline_kind(flatten({"task": config.task}))
    records = stored.run.records if recipe is None and stored.run is not None else []
    recorded = [pair for record in records for pair in outcomes(record, kind)]
    return Evaluation(stored.folder, rewards, solved, rows, kind, recorded)
