"""Digests of a reward's source files, recorded in the run's folder, so that a resumed run reports a changed reward."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
from collections.abc import Mapping
from modulefinder import ModuleFinder
from pathlib import Path
from types import CodeType
from typing import Any

from rlloop.errors import RunError
from rlloop.runs.folder import RunFolder, write_whole

FILE = "reward.json"


def reward_sources(reward: Any) -> dict[str, str]:
    """SHA-256 of each of a reward's source files, by module: the file that defines it, those that it imports from the
    same folder, and so on; of a `Weighted` also those of its parts. Empty for a reward without a file (a notebook)."""
    digests: dict[str, str] = {}
    target = getattr(reward, "func", reward)  # through functools.partial
    module = inspect.getmodule(target if inspect.isroutine(target) else type(target))
    file = getattr(module, "__file__", None)
    if module is not None and file is not None:
        path = Path(file).resolve()
        depth = module.__name__.count(".") + (path.name == "__init__.py")
        top = path.parents[: depth + 1][-1]  # where Python found it
        _collect(module.__name__, path, path.parent, top, digests)
    rewards = getattr(reward, "rewards", None)
    for component in rewards.values() if isinstance(rewards, Mapping) else ():
        digests |= reward_sources(component)
    return dict(sorted(digests.items()))


def reward_digest(reward: Any) -> str:
    """One SHA-256 over `reward_sources`."""
    return hashlib.sha256(json.dumps(reward_sources(reward)).encode()).hexdigest()


def note_reward(folder: RunFolder, reward: Any, step: int) -> str | None:
    """Record the source that scores the steps after `step`. Returns a message if it differs from the last one.

    `reward.json` is a list of {"after_step", "sources"}, one for each change, without those that a resume undid.
    """
    file = folder.path / FILE
    try:
        history = [dict(each) for each in json.loads(file.read_text())] if file.exists() else []
        kept = [each for each in history if each["after_step"] < step]  # later steps are set aside
        before = kept[-1]["sources"] if kept else None
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{file} is damaged: {error!r}; remove it to go on without its history") from error
    sources = reward_sources(reward)
    now = kept if sources == before else [*kept, {"after_step": step, "sources": sources}]
    if now != history:
        write_whole(file, json.dumps(now, indent=1).encode())
    if before is None or sources == before:
        return None
    changed = sorted(name for name in before.keys() | sources.keys() if before.get(name) != sources.get(name))
    message = f"the reward's source is not what it was up to step {step}: {', '.join(changed)} changed (see {FILE})"
    folder.log(message)
    return message


def _collect(name: str, file: Path, root: Path, top: Path, digests: dict[str, str]) -> None:
    """Add digests of `file` and of what it imports from the folder `root`. Module names start at the folder `top`."""
    inside = ".".join(root.relative_to(top).parts)
    unread, seen = [(name, file)], set[str]()
    while unread:
        name, file = unread.pop()
        if name in digests:
            continue
        source = file.read_bytes()
        digests[name] = hashlib.sha256(source).hexdigest()
        if file.suffix != ".py":
            continue
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        imports = {each for each in _imports(source, package) if f"{each}.".startswith(f"{inside}." if inside else "")}
        for imported in imports - seen:
            path = top.joinpath(*imported.split("."))
            unread += [(imported, each) for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()]
        seen |= imports


@functools.lru_cache(maxsize=1024)
def _imports(source: bytes, package: str) -> frozenset[str]:
    """Modules that may be imported: `from a import b` gives `a` and `a.b`, which need not be a module.

    Read from bytecode: `ast.parse` fails where another thread calls it as well (Python 3.11, gh-106905).
    """
    finder, unread, modules = ModuleFinder(), [compile(source, package, "exec", dont_inherit=True)], set[str]()
    while unread:
        code = unread.pop()
        for kind, operands in finder.scan_opcodes(code):
            if kind in ("absolute_import", "relative_import"):
                level, names, base = operands if kind == "relative_import" else (0, *operands)
                whole = importlib.util.resolve_name("." * level + base, package) if level else base
                modules |= {whole, *(f"{whole}.{each}" for each in names or ())}
        unread += [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(modules)
