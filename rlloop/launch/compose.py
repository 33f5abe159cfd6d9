"""From a recipe's name and Hydra overrides to a checked `RunConfig`.

A recipe's YAML begins with

    defaults:
      - rlloop               # every key with its default: rlloop.config.run.RunConfig
      - algorithm: grpo      # an entry of the algorithm group
      - _self_

and Hydra composes it, groups beside it and overrides included. What Hydra or OmegaConf refuse becomes a `ConfigError`
of one or two lines that names the key, its value and what is allowed.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlloop import recipes
from rlloop.algorithms.presets import PRESETS
from rlloop.config.fleet import FleetConfig, FleetKind
from rlloop.config.run import RunConfig
from rlloop.config.tasks import REWARDS, TASKS
from rlloop.errors import ConfigError, did_you_mean
from rlloop.launch.inherit import inherited

FREE = (
    "task",
    "data",
    "reward",
    "sinks",
    "fleet.engines",
    "algorithm.loss_args",
    "algorithm.advantage_args",
    "algorithm.correction",
)

NAMED = ("algorithm.loss", "algorithm.advantage", "rollout.engine")  # a name, or a mapping with `_target_`
GROUPS = ("algorithm", "fleet")  # beside a recipe's own, which are its folders

_store = ConfigStore.instance()
vars(_store)["__deepcopy__"] = lambda memo: _store  # Hydra copies all of it at each composition, and what it takes, too
_root = OmegaConf.structured(RunConfig)
OmegaConf.set_struct(_root, False)
_root["defaults"] = ["_self_", {"fleet": "node"}]  # so that fleet=regions needs nothing of a recipe
OmegaConf.set_struct(_root, None)
_store.store(name="rlloop", node=_root)
for _kind in FleetKind:
    _store.store(group="fleet", name=_kind.value, node=FleetConfig(kind=_kind))
for _name, _algorithm in PRESETS.items():
    _store.store(group="algorithm", name=_name, node=_algorithm)


def find_recipe(name: str) -> tuple[Path, str]:
    """The folder and file stem of `NAME`, `NAME/VARIANT` or a YAML file's path. Raises `ConfigError` that lists the
    recipes there are."""
    if name.endswith((".yaml", ".yml")):
        file = Path(name).absolute()
        if not file.is_file():
            raise ConfigError(f"there is no recipe {name!r}: no such file")
        return file.parent, file.stem
    recipe = recipes.find(name)
    if recipe is not None:
        return recipe
    have = recipes.available()
    listed = "\n".join(f"  {known}  ({file})" for known, file in have.items()) or "  (none)"
    looked = " and ".join(map(str, recipes.folders()))
    hint = did_you_mean(name, have)
    raise ConfigError(f"there is no recipe {name!r}{hint}. Recipes are looked for in {looked}. There are:\n{listed}")


def compose_recipe(name: str, overrides: Sequence[str]) -> DictConfig:
    """The composed configuration, not yet checked."""
    folder, stem = find_recipe(name)
    for override in overrides:
        _refuse_malformed(override, folder)
    try:
        return _compose(folder, stem, overrides)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, folder, stem, overrides)) from error
    except (YAMLError, ValueError) as error:  # of the text, which says its file; of the defaults list
        raise ConfigError(f"{folder / stem}.yaml: {_first_lines(error, 4)}") from error


def expand_sweep(overrides: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The jobs of a multirun: (name of the job by what it sweeps, such as `seed=1,trainer.lr=0.001`; its overrides)."""
    parsed = [_parse_one(override) for override in overrides]
    swept = {override.get_key_element() for override in parsed if override.is_sweep_override()}
    try:
        (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise ConfigError(
            f"-m sweeps over key=a,b,c, choice(a, b) and range(1, 4), not over all of {', '.join(sorted(swept))} "
            f"({_first_lines(error, 1)})"
        ) from error
    named = []
    for index, job in enumerate(jobs):
        assignments = [text.lstrip("+").replace("/", "-") for text in job if text.partition("=")[0] in swept]
        named.append((",".join(assignments) or str(index), list(job)))
    return named


def build(composed: DictConfig) -> RunConfig:
    """Plain dataclasses, every key and every combination checked. Raises `ConfigError`."""
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            listed = ", ".join(missing)
            raise ConfigError(f"{listed} must be given: the recipe leaves it to you, as in {missing[0]}=...")
        return cast(RunConfig, OmegaConf.to_object(composed))
    except OmegaConfBaseException as error:
        raise ConfigError((f"{error.full_key}: " if error.full_key else "") + _first_lines(error)) from error


def as_container(config: DictConfig) -> dict[str, Any]:
    """Plain JSON values, interpolations resolved, enums by name."""
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, enum_to_str=True))


def _compose(folder: Path, stem: str, overrides: Sequence[str]) -> DictConfig:
    chosen, rest, of_task = _chosen_task(folder, overrides)
    merged = inherited(folder / f"{stem}.yaml")
    beside = []
    if merged is not None:
        for stem, node in merged.nodes.items():
            _store.store(name=stem, node=node)
        beside = [f"hydra.searchpath=[{','.join(f'file://{each}' for each in merged.folders[1:])}]"]
    with initialize_config_dir(str(folder), version_base="1.3"):
        composed = compose(stem, [*(_opened(override) for override in rest), *beside])
    if OmegaConf.get_type(composed) is not RunConfig:
        raise ConfigError(
            f"{folder / stem}.yaml does not begin with `defaults: [rlloop, ...]`, so its keys are not rlloop's"
        )
    if chosen is not None:
        _choose_task(composed, chosen, of_task, rest)
    _refuse_added(composed)
    if not OmegaConf.is_missing(composed, "algorithm"):
        _drop_preset_arguments(composed.algorithm)
    return composed


def _chosen_task(folder: Path, overrides: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """The entry of rlloop's task group that `task=NAME` chooses, the other overrides, and those of the task's keys."""
    chosen = [text.partition("=")[2] for text in overrides if text.startswith("task=") and "{" not in text]
    if not chosen or (folder / "task").is_dir():
        return None, list(overrides), []
    rest = [text for text in overrides if not text.startswith("task=")]
    of_task = [text for text in rest if text.lstrip("+~").startswith("task.")]
    return chosen[-1], [text for text in rest if text not in of_task], of_task


def _choose_task(composed: DictConfig, name: str, of_task: Sequence[str], rest: Sequence[str]) -> None:
    """Puts the group's entry in place of the recipe's `task`, and its reward in place of the recipe's where none is
    set by an override. Raises `ConfigError` for an unknown name or key."""
    if name not in TASKS:
        hint = did_you_mean(name, TASKS)
        raise ConfigError(f"task is {name!r}; it must be one of {', '.join(TASKS)}{hint}")
    sections = {"task": TASKS[name]}
    if name in REWARDS and not any(text.lstrip("+~").startswith("reward") for text in rest):
        sections["reward"] = REWARDS[name]
    with open_dict(composed):
        for section, entry in sections.items():
            composed[section] = OmegaConf.create(dict(entry))
        for key in OmegaConf.missing_keys(composed.data):  # files that the recipe's own task would have read
            OmegaConf.update(composed, key, None)
        for text in of_task:
            parsed = _parse_one(text)
            key = parsed.key_or_group.removeprefix("task.")
            if parsed.is_delete():
                raise ConfigError(f"{text!r}: task={name} needs all of its keys; set it to another value")
            known = [each for each in TASKS[name] if each != "_target_"]
            inside = key.partition(".")[0]
            if inside not in known or (key != inside and not isinstance(TASKS[name][inside], dict)):
                hint = did_you_mean(inside, known)
                raise ConfigError(f"{text!r}: task={name} has no key task.{key}{hint}; it has {', '.join(known)}")
            OmegaConf.update(composed.task, key, parsed.value(), force_add=True)


def _opened(override: str) -> str:
    """The override in the form in which Hydra takes it where a section's keys are open.

    `algorithm.correction={tis: {}}` brings keys of its own, which Hydra takes by ++ alone; the code that reads such a
    section refuses what it does not know. `algorithm.loss._target_=mine.loss` puts a mapping where a name stands.
    """
    parsed = _parse_one(override)
    key, value = parsed.key_or_group, override.partition("=")[2]
    if parsed.is_delete():
        return override
    if key == "sinks" and isinstance(parsed.value(), str | list):  # sinks=wandb, sinks=[wandb,tensorboard]
        names = [parsed.value()] if isinstance(parsed.value(), str) else parsed.value()
        return f"++sinks={{{', '.join(f'{name}: {{}}' for name in names)}}}"
    if key.startswith("sinks."):  # options of a sink, which check_sinks knows
        return f"++{override.lstrip('+')}"
    named = next((each for each in NAMED if f"{key}.".startswith(f"{each}.")), None)
    if named is not None and key != named:
        for name in reversed(key.removeprefix(f"{named}.").split(".")):
            value = f"{{{name}: {value or repr('')}}}"
        return f"++{named}={value}"
    is_open = named is not None or (override.startswith(f"{key}=") and is_free(key))
    return f"++{key}={value}" if is_open and isinstance(parsed.value(), dict) else override


def _drop_preset_arguments(algorithm: DictConfig) -> None:
    """A loss or advantage by `_target_` has its arguments beside it: a preset's, for the named one, do not apply."""
    for kind in ("loss", "advantage"):
        if isinstance(algorithm._get_node(kind), DictConfig):
            args = OmegaConf.to_container(algorithm[f"{kind}_args"])
            if args in [getattr(preset, f"{kind}_args") for preset in PRESETS.values()]:
                algorithm[f"{kind}_args"] = {}


def is_free(section: str) -> bool:
    return any(f"{section}.".startswith(f"{free}.") for free in FREE)


def _refuse_added(node: DictConfig, path: str = "") -> None:
    """Refuses keys added by `+key=value`, but for sections with keys of their own, such as `reward`."""
    schema = OmegaConf.get_type(node)
    for name in map(str, node):
        if is_dataclass(schema) and name not in {field.name for field in fields(schema)}:
            known = flat_keys(OmegaConf.structured(RunConfig))
            raise ConfigError(f"'+{path}{name}': there is no key {path}{name}" + _nearest(f"{path}{name}", known))
        inner = None if OmegaConf.is_missing(node, name) else node._get_node(name)
        if isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_interpolation():
            _refuse_added(inner, f"{path}{name}.")


@functools.cache
def _parse_one(override: str) -> Any:
    try:
        [parsed] = OverridesParser.create().parse_overrides([override])
    except OverrideParseException as error:
        key, _, value = override.partition("=")
        if value.startswith("~/"):
            raise ConfigError(
                f"{override!r}: the shell leaves ~ as it is after =; write {key}=$HOME{value[1:]}"
            ) from error
        if value and not set(value) & set("[]{}'\""):  # as a path with a comma or letters beyond ASCII
            raise ConfigError(
                f"{override!r} has characters of the override grammar; quote its value: {_quoted(override)}"
            ) from error
        raise ConfigError(
            f"{override!r} is not an override; write key=value, +key=value or ~key ({_first_lines(error, 1)})"
        ) from error
    return parsed


def _refuse_malformed(override: str, folder: Path) -> None:
    parsed = _parse_one(override)
    if override.lstrip("+~").startswith(("hydra.", "hydra/")):
        raise ConfigError(
            f"{override!r}: rlloop composes with Hydra but runs the jobs itself; hydra.* has no effect here"
        )
    key = parsed.key_or_group
    if not key:
        raise ConfigError(f"{override!r} names no key; write key=value, +key=value or ~key")
    if parsed.value() is None and not parsed.is_delete() and (key in GROUPS or (folder / key).is_dir()):
        raise ConfigError(f"{override!r}: {key} picks an entry of its group; write {key}=NAME")
    if parsed.is_sweep_override():
        raise ConfigError(f"{override!r} names several values; add -m to run each, or quote it: {_quoted(override)}")


def _quoted(override: str) -> str:
    key, _, value = override.partition("=")
    return f"'{key}=\"{value}\"'"


def _explain(error: Exception, folder: Path, stem: str, overrides: Sequence[str]) -> str:
    """One or two lines: the key, its value, what is allowed."""
    if isinstance(error, MissingConfigException):
        return _explain_missing(error, folder)
    cause = error.__cause__ or error
    at = re.search(r"full_key: (\S+)|already at '([^']+)'", str(cause))
    key = (at[1] or at[2]) if at else ""
    if key and re.search(r"Key '[^']*' (is )?not in", str(cause)):
        return _explain_key(key, folder, stem, overrides)
    given = [text for text in overrides if key and text.lstrip("+").startswith(f"{key}=")]
    override = given[-1] if given else None  # of several, the last one counts
    if override is not None and "is not a subclass of" in str(cause):
        inner = [name for name in flat_keys(_compose(folder, stem, [])) if name.rpartition(".")[0] == key]
        return f"{override!r}: {key} is a section, and its keys are set one by one: {', '.join(inner)}"
    if override is not None and (form := _form(key, override.partition("=")[2], str(cause))):
        return f"{override!r}: {form}"
    if override is not None and "is not Optional" in str(cause):
        return f"{override!r}: {key} cannot be null"
    text = _first_lines(cause)
    if member := re.search(r"Invalid value '([^']*)', expected one of \[(.*)\]", text):
        text += did_you_mean(member[1], member[2].split(", "))
    return f"{override or folder / f'{stem}.yaml'}: {text}"


def _form(key: str, value: str, cause: str) -> str:
    """The correct override, for a list or a mapping that was given as a single word; empty for other mistakes."""
    if "is not a ListConfig" in cause:
        return f"{key} is a list: '{key}=[{value}]'"
    if not re.search(r"Cannot assign \w+ to Dict", cause):
        return ""
    if key == "algorithm.correction":
        return f"{key} is a mapping: {key}='{{{value}: {{}}}}'"
    if key in ("reward", "task"):
        return f"{key} is a mapping; give {key}._target_={value}"
    return f"{key} is a mapping; set its keys one by one, as in {key}.KEY=VALUE"


def _explain_missing(error: MissingConfigException, folder: Path) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    options = list(error.options or [])
    if not group or not options:
        return _first_lines(error)
    return f"{group} is {name!r}; it must be one of {', '.join(options)}" + did_you_mean(name, options)


def _explain_key(key: str, folder: Path, stem: str, overrides: Sequence[str]) -> str:
    names = {text: f"{text.lstrip('+~').partition('=')[0]}." for text in overrides}
    override = next((text for text, name in names.items() if name.startswith(f"{key}.")), None)
    if override is None:  # a mapping may hold the key, as {pt: 2} does
        override = next((text for text, name in names.items() if f"{key}.".startswith(name)), None)
    if override is None:
        return f"{folder / stem}.yaml: there is no key {key}" + _nearest(
            key, flat_keys(OmegaConf.structured(RunConfig))
        )
    known = flat_keys(_compose(folder, stem, []))
    parent = key.rpartition(".")[0]
    if is_free(parent):
        hint = did_you_mean(key, [name for name in known if name.rpartition(".")[0] == parent])
        return (
            f"{override!r}: the recipe has no key {key}{hint}; {parent} is free, so a new one is added by +{override}"
        )
    written = max(names[override], f"{key}.", key=len)
    ends = [name for name in known if f".{name}.".endswith(f".{written}")]  # as of layout.tp, or tp
    hint = f"; did you mean {' or '.join(ends[:2])}?" if ends else _nearest(key, known)
    return f"{override!r}: there is no key {key}{hint}"


def _nearest(key: str, known: list[str]) -> str:
    """Suggests keys spelled alike, in the same section or else anywhere, and lists the section's keys."""
    parent, _, leaf = key.rpartition(".")
    beside = [name for name in known if name.rpartition(".")[0] == parent]
    there_are = f"there are {', '.join(beside)}"
    for names in (beside, known):
        by_leaf = {name.rpartition(".")[2]: name for name in reversed(names)}
        near = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=2)]
        if near:
            return f"; did you mean {' or '.join(near)}?" + (
                "" if names is beside or not parent else f" Else {there_are}"
            )
    return f"; {there_are}"


def choices_of(key: str) -> list[str]:
    """The entries of rlloop's own groups, and the values of an enumerated key; none for other keys."""
    if key in GROUPS:
        return sorted(PRESETS) if key == "algorithm" else [kind.value for kind in FleetKind]
    if key == "task":
        return sorted(TASKS)
    node = OmegaConf.select(OmegaConf.structured(RunConfig), key)
    return [member.value for member in type(node)] if isinstance(node, Enum) else []


def flat_keys(config: DictConfig, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name in config:
        path = f"{prefix}{name}"
        node = None if OmegaConf.is_missing(config, name) else config._get_node(str(name))
        keys.append(path)
        if isinstance(node, DictConfig) and not node._is_none():
            keys += flat_keys(node, f"{path}.")
    return keys


def _first_lines(error: BaseException, count: int = 2) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return re.sub(r"\s+", " ", "; ".join(lines[:count]))
