"""Code for GPUs is neither imported nor typed where there is no Triton, so a name that its module lacks shows here."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ["rlloop/numerics/kernels/triton", "rlloop/rollout/vllm", "tests/gpu", "tests/support", "tests/unit/training"]
FILES = [file for place in PLACES for file in sorted((ROOT / place).rglob("*.py"))]


def file_of(module: str) -> Path | None:
    """The file of a module of this repository; None for a package of others."""
    if module.startswith("rlloop.recipes"):  # where they are in a wheel
        module = module.removeprefix("rlloop.")
    place = ROOT / module.replace(".", "/")
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()), None)


@cache
def names_of(file: Path) -> frozenset[str] | None:
    """The names of a module; None where they cannot be read from its text."""
    found: set[str] = set()
    nodes: list[ast.AST] = [*ast.parse(file.read_text()).body]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found |= {name} if name != "__getattr__" else {"*"}
                continue  # names in it are its own
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        nodes += ast.iter_child_nodes(node)
    return None if "*" in found else frozenset(found)


def has(module: str, name: str) -> bool:
    if (file := file_of(module)) is None:
        return module.split(".")[0] not in ("rlloop", "tests")
    return (names := names_of(file)) is None or name in names or file_of(f"{module}.{name}") is not None


def missing(text: str) -> list[str]:
    """Names that a file takes from modules of this repository, which do not have them."""
    tree, modules, wrong = ast.parse(text), defaultdict(list), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for alias in node.names:
                if file_of(whole := f"{node.module}.{alias.name}") is not None:
                    modules[alias.asname or alias.name].append(whole)  # functions may give one name to several
                elif alias.name != "*" and not has(node.module, alias.name):
                    wrong.append(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Load()) if name in modules:
                if not any(has(module, attribute) for module in modules[name]):
                    wrong.append(f"{modules[name][0]}.{attribute}")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_name_exists(file: Path) -> None:
    assert missing(file.read_text()) == []


def test_names_that_do_not_exist_are_found() -> None:
    place = "rlloop.numerics.kernels.triton"
    text = f"from {place} import linear as a\nfrom {place}.launch import ROOM, STEPS\na.ROOM, a.STEPS, a.draws"
    assert missing(text) == [f"{place}.launch.STEPS", f"{place}.linear.STEPS", f"{place}.linear.draws"]
    assert missing("from rlloop.nowhere import nothing") == ["rlloop.nowhere.nothing"]
