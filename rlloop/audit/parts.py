"""The run's own task, reward and model, for checks that call them.

config.yaml names code to import. Of a folder that somebody else made, only rlloop's own is called unless asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlloop.audit.history import History
from rlloop.config.instantiate import locate, resolve
from rlloop.config.run import RunConfig
from rlloop.errors import RlloopError
from rlloop.numerics.implementations import is_outside
from rlloop.parity.asked import Vocabulary
from rlloop.protocols import Task
from rlloop.rewards import resolve_reward
from rlloop.rewards.runner import RewardRunner
from rlloop.trainer.checkpoint import CheckpointStore, folder_digest
from rlloop.types import Example


@dataclass
class Parts:
    """The parts that could be built; for each of the others, the reason why not."""

    task: Task | None = None
    no_task: str | None = None
    reward: RewardRunner | None = None
    no_reward: str | None = None
    no_advantage: str | None = None  # reason not to call the run's own estimator, if it has one
    no_training: str | None = None  # the same for its loss, corrections, engine and kernels
    no_kernels: str | None = None  # the same for modules that the model's operations come from
    vocabulary: Vocabulary | None = None
    model: Path | None = None  # folder of the weights that the run began with
    no_model: str | None = None
    examples: dict[str, Example] = field(default_factory=dict)  # uid -> the task's example; filled by `Requests`

    def close(self) -> None:
        if self.reward is not None:
            self.reward.close()


OURS = ("rlloop.rewards.", "rlloop.recipes.")
NOT_OURS = "is not rlloop's own code; --run-code calls it"


def find_parts(run: History, run_code: bool, make_model: bool) -> Parts:
    """Build the parts that a run's configuration names.

    `run_code`: also import and call tasks and rewards that are not rlloop's own; somebody else's folder may name any
    code on this machine. `make_model`: let the task make its own model, which may take minutes.
    """
    parts = Parts()
    if isinstance(run.built, str):
        parts.no_task = parts.no_reward = parts.no_model = run.built
        return parts
    config = run.built
    algorithm = config.algorithm
    named = {"rollout.engine": config.rollout.engine, "algorithm.loss": algorithm.loss}
    named |= {f"algorithm.correction.{name}": args for name, args in algorithm.correction.items()}
    own = [_refused(value, key, run_code) for key, value in named.items() if is_target(value)]
    parts.no_kernels = None if run_code else _outside_kernels(config)
    parts.no_training = next((refusal for refusal in (*own, parts.no_kernels) if refusal), None)
    if is_target(algorithm.advantage):
        parts.no_advantage = _refused(algorithm.advantage, "algorithm.advantage", run_code)
    parts.no_model = _no_model(run, config.model.path)
    parts.no_task = parts.no_model if config.model.path is not None else None
    parts.no_task = parts.no_task or _refused(config.task, "task", run_code)
    if parts.no_task is None:
        try:
            parts.task = resolve({"seed": config.seed, "model_path": config.model.path, **config.task}, "task")
        except Exception as error:  # anything that the run's code may raise, or a damaged configuration cause
            parts.no_task = f"the task cannot be built here: {error!r}"
    if parts.no_model is None and config.model.path is not None:
        parts.model = Path(config.model.path)
    elif parts.task is None:
        parts.no_model = parts.no_model or parts.no_task
    elif make_model:
        parts.model, parts.no_model = _own_model(run, parts.task)
    else:
        parts.no_model = "the run began with the task's own model, which --all makes again"
    parts.no_reward = _refused(config.reward, "reward", run_code)
    if parts.no_reward is None:
        try:
            reward = resolve_reward(config.reward)
            if getattr(reward, "reproducible", True):
                parts.reward = RewardRunner(
                    reward, timeout=config.scoring.timeout, concurrency=config.scoring.concurrency
                )
            else:
                parts.no_reward = f"{config.reward['_target_']} does not promise the same answer twice"
        except Exception as error:  # as above
            parts.no_reward = f"the reward cannot be built here: {error!r}"
    parts.vocabulary = _vocabulary(run, parts.model)
    return parts


def _outside_kernels(config: RunConfig) -> str | None:
    modules = [*vars(config.model.profile).values(), *vars(config.rollout.profile).values()]
    return next((f"{module} {NOT_OURS}" for module in modules if module is not None and is_outside(module)), None)


def is_target(value: object) -> bool:
    """True if a section that may hold a name, or a name's arguments, holds a `_target_`."""
    return isinstance(value, dict) and "_target_" in value


def _refused(section: dict[str, Any], name: str, run_code: bool) -> str | None:
    """The reason not to call a section's target (or a part's of a weighted sum); None if it may be called."""
    target = section.get("_target_")
    if not run_code:
        inner = section.get("parts") if isinstance(section.get("parts"), dict) else {}
        environment = section.get("environment")
        targets = [target, *(part.get("_target_") for part in (inner or {}).values() if isinstance(part, dict))]
        if isinstance(environment, dict) and environment:
            targets.append(environment.get("_target_"))
        for each in targets:
            if not str(each).startswith(OURS) or not _is_ours(str(each), name):
                return f"{each} {NOT_OURS}"
    return None


def _is_ours(target: str, name: str) -> bool:
    """True if the target is defined in rlloop, and not only reachable through one of its modules."""
    try:
        return str(getattr(locate(target, name), "__module__", "")).startswith(OURS)
    except RlloopError:
        return False


def _no_model(run: History, path: str | None) -> str | None:
    """The reason not to use the model's folder; None if it may be used, or the task is to make the model."""
    if path is None:
        return None
    if not (Path(path) / "config.json").is_file():
        return f"the model's folder {path} is not here"
    recorded = run.lines[0].model if run.lines else None
    if recorded is not None and folder_digest(Path(path)) != recorded:
        return f"the model's folder {path} is not the one that the run began with"
    return None


def _own_model(run: History, task: Task) -> tuple[Path | None, str | None]:
    """The folder of a task's own model, made if need be; or the reason why there is none."""
    recorded = run.lines[0].model if run.lines else None
    if recorded is None:
        return None, "the certificate does not name the weights that the run began with"
    try:
        folder = Path(task.model_folder())
    except Exception as error:  # as above
        return None, f"the task's model cannot be made here: {error!r}"
    if folder_digest(folder) != recorded:
        return None, "the task's model, made here, is not the one that the run began with"
    return folder, None


def _vocabulary(run: History, model: Path | None) -> Vocabulary | None:
    """The vocabulary of the newest readable checkpoint, else of the model's folder."""
    from rlloop.models.config import read_config

    saved = CheckpointStore(run.path / "checkpoints")
    for folder in (*(saved.root / f"step_{step}" for step in reversed(saved.steps())), model):
        try:
            if folder is not None:
                config = read_config(folder)
                return Vocabulary(config.vocab_size, tuple(config.eos_token_ids))
        except (RlloopError, OSError, ValueError, KeyError, TypeError):
            continue  # a damaged checkpoint, which its own check names
    return None
