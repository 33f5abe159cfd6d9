"""Resolves everything that a configuration names (task, reward, loss, advantage, engine) before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlloop.algorithms import Loss, advantages_for, loss_for
from rlloop.config.instantiate import lacking, resolve
from rlloop.config.rollout import EngineKind
from rlloop.config.run import Anchor, ParityMode, RunConfig
from rlloop.config.tasks import TASKS
from rlloop.errors import ConfigError, ModelError
from rlloop.launch.make import engine_factory
from rlloop.loop.parts import Advantages
from rlloop.models.config import how_to_fetch
from rlloop.models.weights import usable_device
from rlloop.numerics.implementations import batch_invariant, check_outside, is_outside
from rlloop.protocols import Task
from rlloop.rewards import resolve_reward
from rlloop.rewards.examples import MissingField, check_of
from rlloop.rewards.runner import RewardRunner
from rlloop.rollout.vllm import versions
from rlloop.runs.sinks import check_sinks


@dataclass(frozen=True)
class Prepared:
    """The resolved parts of a run that need no model."""

    task: Task
    scorer: RewardRunner
    advantages: Advantages
    loss: Callable[..., Any]


def prepare(config: RunConfig, reward: Callable[..., Any] | None = None) -> Prepared:
    """Resolve a configuration's parts. Raises `ConfigError` or `ModelError`, within seconds, for missing or unusable
    ones.

    `reward`: the function itself, in place of the one that the configuration names.
    """
    if not config.task:
        listed = " or ".join(f"task={name}" for name in TASKS)
        raise ConfigError(f"the recipe has no task; add {listed}, and task.name=... (docs/agents.md)")
    loss = loss_of(config)
    scored = resolve_reward(config.reward) if reward is None else reward
    _check_per_sample(scored)
    advantages = advantages_for(config.algorithm, config.rollout.max_tokens, config.rollout.group_size)
    if isinstance(config.rollout.engine, Mapping):
        engine_factory(config.rollout.engine)
    elif config.rollout.engine is not EngineKind.embedded:
        versions.check()
    check_sinks(config.sinks)
    for key in ("path", "reference_path"):
        path = getattr(config.model, key)
        if path is not None and not (Path(path) / "config.json").is_file():
            raise ModelError(f"model.{key} is {path!r}, without a config.json; {how_to_fetch(path)}")
    usable_device(config.device)
    check_kernels(config)
    task = resolve({"seed": config.seed, "model_path": config.model.path, **config.task}, "task")
    if missing := lacking(Task, task):
        raise ConfigError(f"task._target_ {config.task['_target_']!r} is no task: it lacks {', '.join(missing)}")
    if config.rollout.partial.prompts:
        _check_carries(config, task)
    if check := check_of(scored):
        for example in task.eval_examples(1)[:1]:
            try:
                check(example)
            except MissingField:
                if getattr(task, "player", None) is None:  # which may give rows further fields
                    raise
    scorer = RewardRunner(scored, timeout=config.scoring.timeout, concurrency=config.scoring.concurrency)
    return Prepared(task, scorer, advantages, loss)


def _check_per_sample(reward: Any) -> None:
    """Raises `ConfigError` for a reward of TRL's signature, which would be called with one sample."""
    if getattr(reward, "batched", False):
        return
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # it has none, as some built-in functions
        return
    if batch := [name for name in signature.parameters if name in ("prompts", "completions")]:
        name = getattr(reward, "__name__", type(reward).__name__)
        raise ConfigError(
            f"{name}{signature} takes {' and '.join(batch)}: this is a batch reward of rlloop.GRPO; rlloop.train calls "
            "(prompt, completion, example)"
        )


def _check_carries(config: RunConfig, task: Task) -> None:
    """Raises `ConfigError` for a task whose completions cannot go on from step to step."""
    partial, name = config.rollout.partial, config.task["_target_"]
    asked = f"rollout.partial.prompts={partial.prompts} carries conversations from step to step, and {name}"
    if getattr(task, "player", None) is not None:
        if not getattr(task, "carries", False):
            raise ConfigError(f"{asked} has a player that does not (rlloop.loop.conversations.CarryingPlayer); set 0")
    elif getattr(task, "environment", None) is None and not partial.slice_tokens:
        raise ConfigError(
            f"{asked} has single turns, which end in their step unless they are cut: set rollout.partial.slice_tokens, "
            "such as 64, or rollout.partial.prompts=0"
        )


def loss_of(config: RunConfig) -> Loss:
    """The run's loss, with the correction that `parity.mode=fallback` adds."""
    algorithm = config.algorithm
    corrects = algorithm.correction or algorithm.loss == "importance_sampling"
    if config.parity.mode is ParityMode.fallback and not corrects:
        # Second stage of fallback. Its weights are exactly 1 while engine and trainer agree, so it can always be on.
        if algorithm.anchor is Anchor.rollout:
            raise ConfigError(
                "parity.mode=fallback corrects by the ratio of the trainer's logprobs to the engine's, and with "
                "algorithm.anchor=rollout the loss sees the engine's alone; set algorithm.anchor=trainer, or "
                "parity.mode=observe"
            )
        algorithm = replace(algorithm, correction={"tis": {}})
    return loss_for(algorithm)


def check_kernels(config: RunConfig) -> None:
    """Imports the modules that profiles name. Raises `ConfigError` for those that lack what they were named for."""
    for section, profile in (("model", config.model.profile), ("rollout", config.rollout.profile)):
        for knob, module in vars(profile).items():
            if module is None or not is_outside(module):
                continue
            key = f"{section}.profile.{knob}"
            try:
                check_outside(knob, module)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error
            if config.parity.mode is ParityMode.require and not batch_invariant(module):
                raise ConfigError(
                    f"{key} is {module}, so bits may vary with the batch: parity.mode=require cannot hold; leave it at "
                    f"rlloop, declare BATCH_INVARIANT = True in {module} where it holds, or set parity.mode=observe"
                )
