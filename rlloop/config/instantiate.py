"""`_target_` of a configuration: the dotted path of a function or class, found, checked and bound."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlloop.errors import ConfigError


def resolve(config: Mapping[str, Any], section: str, called_with: tuple[str, ...] = ()) -> Any:
    """What `config` describes: its class instantiated, or its function bound to the other keys.

    `called_with` names the positional arguments that rlloop itself will give, now only checked against. Raises
    `ConfigError`, naming `section`, for a path that leads nowhere or arguments that do not fit.

    Example: `resolve({"_target_": "mine.brevity", "weight": 0.1}, "reward", ("prompt", "completion", "example"))`.
    """
    arguments = {key: value for key, value in config.items() if key != "_target_"}
    path = config.get("_target_")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"{section}._target_ is {path!r}; it must be a dotted path to a function or class, as package.module.name"
        )
    target = locate(path, f"{section}._target_")
    if not callable(target):
        raise ConfigError(f"{section}._target_ {path!r} is a {type(target).__name__}, not a function or class")
    if not inspect.isclass(target):
        _check(target, called_with, arguments, section, path)
        return functools.partial(target, **arguments) if arguments else target
    _check(target, (), arguments, section, path)
    made = target(**arguments)
    if called_with:
        if not callable(made):
            raise ConfigError(f"{section}._target_ {path!r} makes objects that cannot be called; give it a __call__")
        _check(made, called_with, {}, section, f"{path}.__call__")
    return made


def locate(path: str, key: str) -> Any:
    """The object at the dotted `path`: a module's attribute, or an attribute of that. `key` is for the error."""
    names = path.split(".")
    if len(names) < 2 or not all(name.isidentifier() for name in names):
        raise ConfigError(f"{key} is {path!r}; it must be a dotted path such as package.module.name")
    depth = _module_depth(names)
    if depth == 0:
        raise ConfigError(
            f"{key} is {path!r}, and there is no module {names[0]!r}; install it, or run where Python can import it"
        )
    module = ".".join(names[:depth])
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{key} is {path!r}, and importing {module} failed: {error}") from error
    for position, name in enumerate(names[depth:], start=depth):
        if not hasattr(found, name):
            where = ".".join(names[:position])
            near = difflib.get_close_matches(name, dir(found), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ConfigError(f"{key} is {path!r}, and {where} has no {name!r}{hint}")
        found = getattr(found, name)
    return found


def _module_depth(names: list[str]) -> int:
    """How many leading names are a module. Looks before it imports, so that a module's own failing import shows."""
    depth = 0
    for count in range(1, len(names)):
        try:
            if importlib.util.find_spec(".".join(names[:count])) is None:
                break
        except (ImportError, ValueError):  # the parent is no package, or does not import: the import says why
            break
        depth = count
    return depth


def _check(
    target: Callable[..., Any], positional: tuple[str, ...], keywords: Mapping[str, Any], section: str, path: str
) -> None:
    """Whether the call `target(*positional, **keywords)` fits, by name; a target without a signature passes."""
    try:
        signature = inspect.signature(target)
    except ValueError:
        return
    parameters = list(signature.parameters.values())
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        by_place = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        allowed = [name for name in by_name if name not in by_place[: len(positional)]]
        for key in keywords:
            if key not in allowed:
                names = ", ".join(allowed) or "none"
                raise ConfigError(f"{section}.{key} is no argument of {path}; allowed are {names}")
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        given = f"({', '.join(positional)})" if positional else "the keys of " + section
        raise ConfigError(f"{section}._target_: {path}{signature} cannot be called with {given}: {error}") from None
