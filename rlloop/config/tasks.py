"""The `task` group: `task=NAME` replaces the recipe's section by one of these; `task.KEY=VALUE` sets its keys.

Without it the recipe's inline section is used. A recipe's folder `task/` with YAML files is a group as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROOM = {"max_tokens": "${rollout.max_tokens}", "max_sequence_tokens": "${trainer.max_batch_tokens}"}

TASKS: dict[str, dict[str, Any]] = {
    "verifiers": {
        "_target_": "rlloop.tasks.verifiers_tasks.Verifiers",
        "name": "???",  # a taskset's id
        "taskset": {},  # its settings
        "harness": "null",
        "environment": {},  # verifiers' env settings
        "renderer": {},  # verifiers' renderer settings; empty: what fits the model's chat template
        "held_out": 64,
        "solved_at": 1.0,
        **_ROOM,
    },
    "reasoning_gym": {
        "_target_": "rlloop.tasks.reasoning_gym_tasks.ReasoningGym",
        "name": "???",  # a data set's name
        "arguments": {},  # the data set's own settings
        "system": None,
        "template": "auto",
        "train_size": 4096,
        "eval_size": 256,
        "solved_at": 1.0,
        **_ROOM,
    },
}
# Rewards of tasks that score their own episodes; they replace the recipe's unless `reward...` is set.
REWARDS: dict[str, dict[str, Any]] = {
    "verifiers": {"_target_": "rlloop.rewards.episode.episode_reward"},
    "reasoning_gym": {"_target_": "rlloop.tasks.reasoning_gym_tasks.reward"},
}


def offline_kind(config: Mapping[str, Any]) -> str | None:
    """`task.kind` of a run on given completions (recipe `offline`): demonstrations, preferences or verdicts; None of
    other runs. Rewards in training are then the task's own constants. `config`: flat, dotted key -> value."""
    is_offline = str(config.get("task._target_")).endswith("recipes.offline.task.Given")
    return str(config.get("task.kind")) if is_offline else None
