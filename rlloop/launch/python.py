"""`rlloop.train`: runs a recipe from Python, with functions in place of dotted paths."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import open_dict

from rlloop.errors import ConfigError
from rlloop.launch.callbacks import check_callbacks
from rlloop.launch.compose import as_container, build, compose_recipe, is_free
from rlloop.launch.run import INTERRUPTED, Job
from rlloop.launch.run import train as run_job
from rlloop.loop.own import Run
from rlloop.runs.console import Output


def train(
    config: str | Path | Mapping[str, Any],
    *,
    callbacks: Sequence[Any] = (),
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Train by a recipe, as `rlloop train` does, and return its `Run`.

    `config`: a recipe's name (`"countdown"`, `"countdown/lora"`), a YAML file, or a dictionary of a configuration's
    sections, whose `recipe` may name the recipe that it changes. `overrides` are its keys: sections as dictionaries
    (`trainer={"lr": 1e-3}`), dotted names in `**{"trainer.lr": 1e-3}`, groups by name (`algorithm="dapo"`).
    `reward=` may be the function itself: `(prompt, completion, example) -> float | RewardResult`.

    `callbacks`: objects with any of `on_start(run)`, `on_step(step, metrics)` and `on_end(run)`, or functions of
    (step, metrics). Step 0 is the evaluation before the first update. An `on_step` that returns True ends the run.

    The same call with the same `run={"dir": ...}` resumes. Raises `ConfigError`, `ModelError` or `RunError` before any
    work, `ParityError` where engine and trainer differ, `KeyboardInterrupt` after Ctrl-C, with a checkpoint.

        def letters(prompt, completion, example):
            return completion.count("a") / max(1, len(completion))

        run = rlloop.train("custom", model={"path": "my-model"}, data={"path": "rows.jsonl"}, reward=letters)
        run.columns("reward/mean")
    """
    check_callbacks(callbacks)
    reward = overrides.get("reward")
    function = reward if callable(reward) else None
    if function is not None:
        overrides["reward"] = {"_target_": name_of(function)}
    with _recipe(config) as (name, recipe, own):
        whole = {key: value for key, value in {**own, **overrides}.items() if _replaces(key, value)}
        settings = [{key: value for key, value in each.items() if key not in whole} for each in (own, overrides)]
        composed = compose_recipe(recipe, [text for each in settings for text in as_overrides(each)])
    with open_dict(composed):
        composed.update(whole)
    checked = build(composed)
    folder = Path("runs") / name / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder = folder if checked.run.dir is None else Path(checked.run.dir)
    checked.run.dir = composed.run.dir = str(folder)
    again = f"the same call, with run={{'dir': {str(folder)!r}}}"
    job = Job(name, checked, as_container(composed), folder, again, function, tuple(callbacks))
    if run_job(job, Output(quiet=quiet)) == INTERRUPTED:
        raise KeyboardInterrupt
    return Run(folder)


def name_of(function: Callable[..., Any]) -> str:
    """The dotted path under which the configuration records a function."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


@contextmanager
def _recipe(config: str | Path | Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The run's name, a recipe that `compose_recipe` finds, and settings to put over it."""
    if not isinstance(config, str | Path | Mapping):
        raise ConfigError(f"config is {config!r}; it must be a recipe's name, a YAML file or a dictionary")
    if not isinstance(config, Mapping):
        file = Path(config)
        yield (file.stem if file.suffix in (".yaml", ".yml") else str(config)), str(config), {}
        return
    own = {key: value for key, value in config.items() if key != "recipe"}
    if "recipe" in config:
        yield str(config["recipe"]), str(config["recipe"]), own
        return
    algorithm = own.get("algorithm", "grpo")
    if isinstance(algorithm, str):
        own.pop("algorithm", None)
    named = algorithm if isinstance(algorithm, str) else "grpo"
    own.setdefault("defaults", ["rlloop", {"algorithm": named}, "_self_"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(own))
        yield "python", str(file), {}


def _replaces(key: str, value: Any) -> bool:
    """True for a task or reward that replaces the recipe's, whose arguments would not fit it."""
    return key in ("task", "reward") and isinstance(value, Mapping) and "_target_" in value


def as_overrides(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Nested or dotted settings as Hydra overrides."""
    overrides = []
    for name, value in settings.items():
        key = f"{prefix}{name}"
        value = str(value) if isinstance(value, Path) else value
        if isinstance(value, Mapping) and "_target_" not in value and value:
            overrides += as_overrides(value, f"{key}.")
        elif isinstance(value, str) and "." not in key and not is_free(key):
            overrides.append(f"{key}={value}")  # a group's entry, or a plain word
        else:
            overrides.append(f"{'++' if is_free(key) else ''}{key}={_literal(value, key)}")
    return overrides


def _literal(value: Any, key: str) -> str:
    """A value in Hydra's override grammar."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}: {_literal(each, key)}" for name, each in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(_literal(each, key) for each in value) + "]"
    raise ConfigError(f"{key} is {value!r}; a setting is a number, a text, a list or a dictionary")
