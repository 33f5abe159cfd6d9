"""Checks that the loss fits the task's data: samples of the policy, given completions, or given pairs."""

from __future__ import annotations

from rlloop.algorithms.presets import PRESETS
from rlloop.config.run import RunConfig
from rlloop.errors import ConfigError
from rlloop.protocols import Task


def check_objective(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` for a named loss that cannot learn from what the task gives. A task with a player of its
    own may give anything, unless it says by `gives_completions` and `gives_pairs` what it does."""
    algorithm, own = config.algorithm, getattr(task, "player", None) is not None
    if algorithm.loss in ("dpo", "bradley_terry") and not getattr(task, "gives_pairs", own):
        like = (algorithm.loss, algorithm.loss_args.get("variant"))
        name = next(
            (key for key, each in PRESETS.items() if (each.loss, each.loss_args.get("variant")) == like), like[0]
        )
        recipe = "offline/reward_model" if algorithm.loss == "bradley_terry" else "offline/preferences"
        raise ConfigError(f"algorithm={name} learns from given pairs: use --config-name {recipe}, or another algorithm")
    if algorithm.loss == "sft" and not algorithm.best_only and not getattr(task, "gives_completions", own):
        raise ConfigError(
            "algorithm=sft needs given completions: use --config-name offline, or algorithm=rejection_sampling, which "
            "imitates each group's best samples"
        )
    if algorithm.loss == "distillation" and config.model.reference_path is None:
        raise ConfigError("algorithm=distillation needs a teacher: set model.reference_path")
