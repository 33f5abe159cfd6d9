"""`_target_` in a configuration: imports a dotted path's function or class, checks its arguments and binds them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from rlloop.errors import ConfigError, did_you_mean

TARGET = "{_target_: package.module.name, ...}"  # for messages


def needs(module: str, what: str, package: str | None = None) -> None:
    """Raises `ConfigError` where `module` is not installed; `what` needs it."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{what} needs the package {package or module}: pip install {package or module}")


def names_target(value: object, key: str, otherwise: str = "") -> bool:
    """True if `value`, of the configuration's `key`, is a mapping that names a function or class by `_target_`.

    Raises `ConfigError` for a mapping without it; `otherwise` says where its keys may have been meant to stand.
    """
    if not isinstance(value, Mapping):
        return False
    if "_target_" not in value:
        raise ConfigError(
            f"{key} has {', '.join(map(str, value)) or 'no keys'} and no _target_, the dotted path of a function or "
            f"class{'; ' if otherwise else ''}{otherwise}"
        )
    return True


def resolve(config: Mapping[str, Any], section: str, called_with: tuple[str, ...] = ()) -> Any:
    """The object that `config` describes: its class instantiated, or its function bound to the other keys.

    `called_with` names the positional arguments that rlloop itself will pass later, now only checked against. Raises
    `ConfigError`, naming `section`, for a path that leads nowhere or arguments that do not fit.

    Example: `resolve({"_target_": "mine.brevity", "weight": 0.1}, "reward", ("prompt", "completion", "example"))`.
    """
    target, arguments = _target_and_arguments(config, section)
    if not inspect.isclass(target):
        return bind(config, section, called_with)
    path = config["_target_"]
    _check(target, (), arguments, section, path)
    instance = target(**arguments)
    if called_with:
        if not callable(instance):
            raise ConfigError(f"{section}._target_ {path!r} makes objects that cannot be called; give it a __call__")
        _check(instance, called_with, {}, section, f"{path}.__call__")
    return instance


def bind(
    config: Mapping[str, Any], section: str, called_with: tuple[str, ...] = (), settings: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """The function or class that `config` names, bound to its other keys and not called yet.

    rlloop will call it with the positional arguments `called_with` and the keyword arguments `settings`. Raises
    `ConfigError` as `resolve` does.
    """
    target, arguments = _target_and_arguments(config, section)
    _check(target, called_with, arguments, section, config["_target_"], settings)
    return functools.partial(target, **arguments) if arguments else target


def lacking(protocol: type, value: object) -> list[str]:
    """The members of a `Protocol` class that `value` does not have, by name."""
    kinds = [kind for kind in protocol.__mro__ if kind not in (Protocol, Generic, object)]
    names = dict.fromkeys(name for kind in kinds for name in vars(kind) if not name.startswith("_"))
    return [name for name in names if not hasattr(value, name)]


def accepts(hint: Any, value: object) -> bool:
    """True if `value`, of YAML, fits the annotation `hint`. Only numbers, strings, None and `Literal` are judged."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not all(kind in (int, float, str, bool, NoneType) or get_origin(kind) is Literal for kind in kinds):
        return True
    return any(
        value in get_args(kind)
        if get_origin(kind) is Literal
        else isinstance(value, (int, float) if kind is float else kind)
        and (kind is bool or not isinstance(value, bool))
        for kind in kinds
    )


def _target_and_arguments(config: Mapping[str, Any], section: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    path = config.get("_target_")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"{section}._target_ is {path!r}; it must be a dotted path to a function or class, as package.module.name"
        )
    target = locate(path, f"{section}._target_")
    if not callable(target):
        raise ConfigError(f"{section}._target_ {path!r} is a {type(target).__name__}, not a function or class")
    return target, {key: value for key, value in config.items() if key != "_target_"}


def locate(path: str, key: str) -> Any:
    """The object at the dotted `path`: a module's attribute, or an attribute of that. `key` is for the error."""
    names = path.split(".")
    if len(names) < 2 or not all(name.isidentifier() for name in names):
        raise ConfigError(f"{key} is {path!r}; it must be a dotted path such as package.module.name")
    _refuse_hidden(names, f"{key} is {path!r}")
    depth = _module_depth(names)
    if depth == 0:
        raise ConfigError(
            f"{key} is {path!r}, and there is no module {names[0]!r}; install it, or run where Python can import it"
        )
    module = ".".join(names[:depth])
    try:
        value: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{key} is {path!r}, and importing {module} failed: {error}") from error
    for position, name in enumerate(names[depth:], start=depth):
        if not hasattr(value, name):
            where = ".".join(names[:position])
            hint = did_you_mean(name, dir(value))
            raise ConfigError(f"{key} is {path!r}, and {where} has no {name!r}{hint}")
        value = getattr(value, name)
    return value


def _refuse_hidden(names: list[str], setting: str) -> None:
    """Raises `ConfigError` where the working folder has the module, and Python imports another one of that name.

    The command has the working folder last on Python's path: first, a stray file in it could replace any module that a
    library imports.
    """
    if not {"", str(Path.cwd())}.intersection(sys.path) or names[0] == "rlloop":
        return
    stems = (Path(*names[:count]) for count in range(1, len(names)))
    files = (file for stem in stems for file in (stem / "__init__.py", stem.with_suffix(".py")))
    own = next((file for file in files if file.is_file()), None)
    if own is None:
        return
    module = (own.parent if own.name == "__init__.py" else own.with_suffix("")).parts
    depth = _module_depth([*module, ""])
    spec = importlib.util.find_spec(".".join(module[:depth])) if depth else None
    if spec is not None and (spec.origin is None or Path(spec.origin).resolve() != own.resolve()):
        raise ConfigError(
            f"{setting}: the working folder has {own}, but Python imports {spec.name} from {spec.origin}; give yours "
            "another name, or run in another folder if that one is meant"
        )


def _module_depth(names: list[str]) -> int:
    """The number of leading names that are a module. Nothing is imported, so that a failing import shows later."""
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
    target: Callable[..., Any],
    positional: tuple[str, ...],
    keywords: Mapping[str, Any],
    section: str,
    path: str,
    settings: tuple[str, ...] = (),
) -> None:
    """Raises `ConfigError` unless `target(*positional, **keywords, **settings)` fits its signature, if it has one."""
    try:
        signature = inspect.signature(target)
    except ValueError:
        return
    parameters = list(signature.parameters.values())
    hints = _hints(target)
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    allowed = [name for name in by_name if name not in (*by_position[: len(positional)], *settings)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters) and not settings  # else it is for these
    for key, value in keywords.items():
        if key not in allowed and not takes_any:
            names = ", ".join(allowed) or "none"
            raise ConfigError(f"{section}.{key} is no argument of {path}; allowed are {names}")
        if key in hints and value is not signature.parameters[key].default and not accepts(hints[key], value):
            wanted = inspect.formatannotation(hints[key])
            raise ConfigError(f"{section}.{key} is {value!r}; {path} takes {wanted}")
    try:
        signature.bind(*positional, **dict.fromkeys(settings), **keywords)
    except TypeError as error:
        ours = ", ".join([*positional, *(f"{name}=..." for name in settings)])
        passed = f"({ours})" if ours else "the keys of " + section
        raise ConfigError(f"{section}._target_: {path}{signature} cannot be called with {passed}: {error}") from None


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Its annotations; empty if they name types that exist for type checkers only."""
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return get_type_hints(function) if inspect.isroutine(function) else {}
    except (NameError, TypeError, AttributeError):
        return {}
