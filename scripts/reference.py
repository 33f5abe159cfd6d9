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
import math
import re
import sys
import tokenize
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from unittest import mock

from rlloop.cli.main import COMMANDS
from rlloop.config import layout, numerics, run
from rlloop.errors import ConfigError
from rlloop.numerics.implementations import OPERATIONS
from rlloop.numerics.profile import Drift, NumericsProfile
from rlloop.parallel.layout import Layout

DOCS = Path(__file__).parents[1] / "docs"
MIRRORED = {  # sections whose keys another dataclass explains
    numerics.ProfileConfig: (NumericsProfile,),
    numerics.RolloutProfile: (NumericsProfile,),
    numerics.DriftConfig: (Drift,),
    layout.LayoutConfig: (Layout,),
}

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
    hints, comments = get_type_hints(kind), _comments(kind)
    nested = [field for field in dataclasses.fields(kind) if dataclasses.is_dataclass(hints[field.name])]
    plain = [field for field in dataclasses.fields(kind) if field not in nested]
    if plain:
        yield from ("", f"## `{prefix.rstrip('.')}`" if prefix else "## The run as a whole", "")
    if prefix and kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("):
        yield from (_line(inspect.getdoc(kind) or ""), "")
    if kind is numerics.RolloutProfile:
        yield "It has the keys of [`model.profile`](#modelprofile), each `null` by default."
    elif plain:
        yield from ("| key | default | allowed | meaning |", "|---|---|---|---|")
        for field in plain:
            values = _allowed(kind, field, hints[field.name]) or _type(hints[field.name])
            yield _row(f"`{prefix}{field.name}`", f"`{_default(field)}`", values, comments.get(field.name, ""))
    for field in nested:
        yield from _section(f"{prefix}{field.name}.", hints[field.name])


def _comments(kind: type) -> dict[str, str]:
    """The comment behind each field, of the class, of those that it inherits from, or of the one that it mirrors."""
    found: dict[str, str] = {}
    for each in (*reversed(kind.__mro__[:-1]), *MIRRORED.get(kind, ())):
        try:
            text = inspect.getsource(each)
        except (OSError, TypeError):  # made by `make_dataclass`
            continue
        (tree,) = ast.parse(text).body
        assert isinstance(tree, ast.ClassDef)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        at = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                after = [at[line] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in at]
                found[node.target.id] = " ".join(after) or found.get(node.target.id, "")
    if kind is numerics.ProfileConfig:
        found |= {
            knob: f"implementation of {', '.join(names)}" for knob, names in OPERATIONS.items() if not found.get(knob)
        }
    return found


def _allowed(kind: type, field: dataclasses.Field[Any], hint: Any) -> str | None:
    """Text of the key's allowed values: from its limit, or from the error that its section raises for a bad value."""
    if limit := field.metadata.get("limit"):
        return limit.says
    inner = {hint, *(get_args(hint) if type(None) in get_args(hint) else ())}
    name, number = field.name, {int, float} & inner
    if hint is bool:
        return None
    try:
        kind(**{name: math.nan if number else "?"})
    except ConfigError as error:
        said = re.fullmatch(r"(\S+) is .*?; it must be (.*)", str(error), re.DOTALL)
        return said[2] if said and said[1].endswith(name) else None
    except (TypeError, ValueError, AttributeError):  # it does not look at single values
        return None
    return None


def _type(hint: Any) -> str:
    if isinstance(hint, EnumType):
        return ", ".join(f"`{member.value}`" for member in hint)  # type: ignore[attr-defined]
    if hint is bool:
        return "`true`, `false`"
    if hint is Any:
        return "a name, or a mapping with `_target_`"
    if get_origin(hint) is list:
        return "a list"
    inner = [each for each in get_args(hint) if each is not type(None)]
    if type(None) in get_args(hint):
        return f"{_type(inner[0])}, or `null`"
    return {int: "a whole number", float: "a number", str: "text", Any: "a name, or a mapping with `_target_`"}.get(
        hint, "a mapping"
    )


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
