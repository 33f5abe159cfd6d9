"""Writes docs/configuration.md and docs/commands.md from the code that they describe.

    python scripts/reference.py            # rewrites both
    python scripts/reference.py --check    # exit code 1 where one of them says anything else

A key's meaning is the comment at its field; its allowed values are the limit there and the checks of its section.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest import mock

from rlloop.cli.main import COMMANDS
from rlloop.config import run

DOCS = Path(__file__).parents[1] / "docs"

CONFIGURATION = """\
# Configuration keys

Every key of a run, with its default. `rlloop train --config-name NAME KEY=VALUE` sets one. A recipe has values of its
own for some, and says what is in `task`, `reward` and `data`; `--cfg job` prints the result. A value that is not
allowed is refused before the run starts. `scripts/reference.py` writes this page from `rlloop/config/`.
"""

COMMANDS_PAGE = """\
# Commands

What `rlloop COMMAND --help` says. `scripts/reference.py` writes this page from the commands themselves.
"""


# ------------------------------------------------------------------------------------------------ configuration


def configuration() -> str:
    return "\n".join([CONFIGURATION.rstrip(), *_section("", run.RunConfig)]) + "\n"


def _section(prefix: str, kind: type) -> Iterator[str]:
    """A table of the section's own keys, then its sections, each under a heading."""
    hints, comments, allowed = get_type_hints(kind), _comments(kind), _allowed(kind)
    nested = [field for field in dataclasses.fields(kind) if dataclasses.is_dataclass(hints[field.name])]
    plain = [field for field in dataclasses.fields(kind) if field not in nested]
    if plain:
        yield from ("", f"## `{prefix.rstrip('.')}`" if prefix else "## Of the run", "")
        if prefix and kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("):
            yield from (_line(inspect.getdoc(kind) or ""), "")
        yield from ("| key | default | allowed | meaning |", "|---|---|---|---|")
    for field in plain:
        values = allowed.get(field.name) or _type(hints[field.name])
        cells = (f"`{prefix}{field.name}`", f"`{_default(field)}`", values, comments.get(field.name, ""))
        yield _row(*cells)
    for field in nested:
        yield from _section(f"{prefix}{field.name}.", hints[field.name])


def _comments(kind: type) -> dict[str, str]:
    """The comment behind each field."""
    lines, _ = inspect.getsourcelines(kind)
    (tree,) = ast.parse("".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    tokens = tokenize.generate_tokens(io.StringIO("".join(lines)).readline)
    at = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            after = [at[line] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in at]
            found[node.target.id] = " ".join(after)
    return found


def _allowed(kind: type) -> dict[str, str]:
    """In words: each field's own limit, and what the section's checks, `require(key, value, good, allowed)`, say."""
    (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body
    limits = {field.name: field.metadata.get("limit") for field in dataclasses.fields(kind)}
    found = {name: limit.says for name, limit in limits.items() if limit is not None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("require", "_check"):
            key, text = node.args[0], node.args[-1]
            if isinstance(key, ast.Constant) and isinstance(text, ast.Constant):
                found[key.value.rpartition(".")[2]] = text.value
    return found


def _type(hint: Any) -> str:
    if isinstance(hint, EnumType):
        return ", ".join(f"`{member.value}`" for member in hint)  # type: ignore[attr-defined]
    if hint is bool:
        return "`true`, `false`"
    if hint is Any:
        return "a name, or a mapping with `_target_`"
    inner = [each for each in get_args(hint) if each is not type(None)]
    if type(None) in get_args(hint):
        return f"{_type(inner[0])}, or `null`"
    return {int: "a whole number", float: "a number", str: "text"}.get(hint, "a mapping")


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default_factory() if callable(field.default_factory) else field.default
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "required" if value == "???" else str(list(value) if isinstance(value, tuple) else value)


# ------------------------------------------------------------------------------------------------ commands


class Parsed(Exception):
    """Ends a command once its parser is complete."""


def commands() -> str:
    lines = [COMMANDS_PAGE]
    for name, command in COMMANDS.items():
        lines += _described(_parser(command), f"rlloop {name}", 2)
    return "\n".join(lines).rstrip() + "\n"


def _parser(command: Any) -> argparse.ArgumentParser:
    caught: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        caught.append(parser)
        raise Parsed

    names = ("parse_args", "parse_intermixed_args", "parse_known_args")
    with mock.patch.multiple(argparse.ArgumentParser, **dict.fromkeys(names, stop)):
        try:
            command([])
        except Parsed:
            return caught[0]
    raise AssertionError(f"{command} has parsed nothing")


def _described(parser: argparse.ArgumentParser, name: str, level: int) -> list[str]:
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    subcommands = [action for action in shown if isinstance(action, argparse._SubParsersAction)]
    options = [action for action in shown if action not in subcommands]
    lines = [f"{'#' * level} `{name}`", ""]
    if parser.description:
        lines += [*_prose(parser.description), ""]
    if options:
        lines += ["| argument | meaning |", "|---|---|"]
    for action in options:
        given = " ".join(filter(None, [", ".join(action.option_strings), "" if action.nargs == 0 else _value(action)]))
        text = (action.help or "") % vars(action) if action.help else ""
        lines.append(_row(f"`{given}`", _line(text)))
    lines += [""] if options else []
    for action in subcommands:
        for each, subparser in action.choices.items():
            lines += _described(subparser, f"{name} {each}", level + 1)
    return lines


def _value(action: argparse.Action) -> str:
    if action.metavar is None and action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = str(action.metavar or action.dest.upper())
    return name + {"*": " ...", "+": " ..."}.get(str(action.nargs), "")


def _prose(text: str) -> list[str]:
    """Paragraphs as they are; indented lines as a block."""
    lines = []
    for paragraph in re.split(r"\n\n", text.strip("\n")):
        if any(line.startswith("  ") for line in paragraph.splitlines()):
            lines += ["```", *(line for line in paragraph.splitlines()), "```", ""]
        else:
            lines += [_line(paragraph), ""]
    return lines[:-1]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _line(text: str) -> str:
    return " ".join(text.split())


# ------------------------------------------------------------------------------------------------ pages

PAGES = {"configuration.md": configuration, "commands.md": commands}


def main(arguments: list[str]) -> int:
    old = [name for name, page in PAGES.items() if (DOCS / name).read_text() != page()]
    if "--check" in arguments:
        for name in old:
            print(f"docs/{name} is not what the code says; run python scripts/reference.py")
        return int(bool(old))
    for name in old:
        (DOCS / name).write_text(PAGES[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
