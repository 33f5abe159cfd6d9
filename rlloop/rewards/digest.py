"""The source that a reward is made of, noted in the run's folder: a resumed run whose reward has changed says so."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlloop.errors import RunError
from rlloop.runs.folder import RunFolder, write_whole

FILE = "reward.json"


def reward_sources(reward: Any) -> dict[str, str]:
    """The SHA-256 of each source file that `reward` is made of, by module: its own, and what that imports of the same
    folder, and so on. A `Weighted` is made of its parts, too. Without a file (a notebook's cell) there is nothing."""
    found: dict[str, str] = {}
    target = getattr(reward, "func", reward)  # through functools.partial
    module = inspect.getmodule(target if inspect.isroutine(target) else type(target))
    file = getattr(module, "__file__", None)
    if module is not None and file is not None:
        place = Path(file).resolve()
        depth = module.__name__.count(".") + (place.name == "__init__.py")
        top = place.parents[: depth + 1][-1]  # where Python found it
        _collect(module.__name__, place, place.parent, top, found)
    parts = getattr(reward, "rewards", None)
    for part in parts.values() if isinstance(parts, Mapping) else ():
        found |= reward_sources(part)
    return dict(sorted(found.items()))


def reward_digest(reward: Any) -> str:
    """One SHA-256 of all of `reward_sources`."""
    return hashlib.sha256(json.dumps(reward_sources(reward)).encode()).hexdigest()


def note_reward(folder: RunFolder, reward: Any, step: int) -> str | None:
    """Write down which source the steps after `step` are judged by; returns what is to be said where it changed.

    `reward.json` is a list of {"after_step", "sources"}, one for each change, of the history that stayed.
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
    said = f"the reward's source is not what it was up to step {step}: {', '.join(changed)} changed (see {FILE})"
    folder.log(said)
    return said


def _collect(name: str, file: Path, root: Path, top: Path, found: dict[str, str]) -> None:
    """`file` and what it imports of the folder `root`; modules are named from the folder `top` on."""
    source = file.read_bytes()
    found[name] = hashlib.sha256(source).hexdigest()
    if file.suffix != ".py":
        return
    for imported in _imports(ast.parse(source), name if file.name == "__init__.py" else name.rpartition(".")[0]):
        place = top.joinpath(*imported.split("."))
        for other in (place.with_suffix(".py"), place / "__init__.py"):
            if imported not in found and other.is_relative_to(root) and other.is_file():
                _collect(imported, other, root, top, found)


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """The modules that may be meant: `from a import b` names `a`, and `a.b`, which need not be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            whole = importlib.util.resolve_name(base, package) if node.level else base
            yield whole
            yield from (f"{whole}.{each.name}" for each in node.names)
