"""Recipes that begin with another one:

    defaults:
      - /custom          # every setting of the shipped recipe; /NAME/VARIANT is another file of its folder
      - _self_           # the settings below, over it

Sections are merged key by key; a section with a `_target_` of its own replaces the inherited one, whose arguments would
not fit it. Entries for a group (`- algorithm: dapo`) replace the inherited choice. Groups are looked for beside the
recipe first, then beside the one that it begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rlloop import recipes
from rlloop.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Inherited:
    """A recipe and those that it begins with, as Hydra composes them: each names the one before it."""

    nodes: dict[str, dict[str, Any]]  # name -> content, the recipe's own last
    folders: list[Path]  # of groups, the recipe's own first


def inherited(file: Path) -> Inherited | None:
    """The chain of the recipe in `file`; None if it begins with no other one. Raises `ConfigError` for one that does
    not exist, and for circles."""
    defaults = _read(file).get("defaults")
    if not isinstance(defaults, list) or not any(isinstance(each, str) and each.startswith("/") for each in defaults):
        return None
    chain = _chain(file.resolve(), ())
    nodes: dict[str, dict[str, Any]] = {}
    for index, (_, content) in enumerate(reversed(chain)):
        later = [each for _, each in chain[: len(chain) - 1 - index]]
        chosen = {_group(entry) for each in later for entry in each["defaults"] if isinstance(entry, Mapping)}
        defaults = [f"inherited_{index - 1}"] if index else []
        defaults += [entry for entry in content["defaults"] if _group(entry) not in chosen]
        for each in later:
            content = _without_replaced(content, each)
        nodes[f"inherited_{index}"] = {**content, "defaults": defaults}
    return Inherited(nodes, [path.parent for path, _ in chain])


def _chain(file: Path, above: tuple[Path, ...]) -> list[tuple[Path, dict[str, Any]]]:
    """The recipe, the one that it begins with, and so on; each without its entry for the next one."""
    if file in above:
        raise ConfigError(f"{above[0]}: it begins with recipes that begin with each other: {file}")
    content = _read(file)
    defaults = content.get("defaults") or []
    bases = {entry: base for entry in defaults if isinstance(entry, str) and (base := _base(file, entry)) is not None}
    if len(bases) > 1:
        raise ConfigError(f"{file}: it begins with {', '.join(bases)}; a recipe can begin with one other")
    own = [entry for entry in defaults if not (isinstance(entry, str) and entry in bases)]
    content = {**content, "defaults": own if "_self_" in own else [*own, "_self_"]}
    return [(file, content), *(each for base in bases.values() for each in _chain(base, (*above, file)))]


def _base(file: Path, entry: str) -> Path | None:
    """The file of another recipe that an entry of the defaults list names; None for `_self_` and `rlloop`."""
    if entry.startswith("/"):
        location = recipes.find(entry[1:])
        if location is None:
            have = recipes.available()
            raise ConfigError(
                f"{file}: there is no recipe {entry[1:]!r} to begin with; there are {', '.join(have)}"
                f"{did_you_mean(entry[1:], have)}"
            )
        return (location[0] / f"{location[1]}.yaml").resolve()
    beside = file.parent / f"{entry}.yaml"
    return beside.resolve() if beside.is_file() else None


def _read(file: Path) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    return cast(dict[str, Any], content) if isinstance(content, dict) else {}


def _group(entry: Any) -> str:
    """The group that an entry of a defaults list chooses from; the entry itself where it is none."""
    name = next(iter(entry)) if isinstance(entry, Mapping) else str(entry)
    return str(name).removeprefix("override ").removeprefix("optional ").removeprefix("/")


def _without_replaced(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`lower` without the sections that have a `_target_` in `upper`."""
    kept = {}
    for key, value in lower.items():
        above = upper.get(key)
        if isinstance(value, Mapping) and isinstance(above, Mapping):
            if "_target_" in above:
                continue
            value = _without_replaced(value, above)
        kept[key] = value
    return kept
