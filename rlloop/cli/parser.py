"""The commands' shared argument parser, with shell completion.

`eval "$(register-python-argcomplete rlloop)"` switches completion on in bash and zsh.
"""

from __future__ import annotations

import argparse
import os
import re
import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NoReturn

from rlloop.errors import did_you_mean

COMPLETING = "_ARGCOMPLETE"  # of the environment: a shell asks for completions; number of words before the arguments

COLUMNS = re.compile(r" +\S.*?\S {2,}")  # of a line in a list: what is explained, and the room behind it
LEAST = 24  # characters of a second column; a narrower one stands under what it explains


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with shell completion, whose errors name the choice or option nearest to an unknown one."""

    _answering = False  # argcomplete parses the words so far with this same parser

    def parse_known_args(self, *args: Any, **settings: Any) -> Any:
        self._answer()
        return super().parse_known_args(*args, **settings)

    def parse_known_intermixed_args(self, *args: Any, **settings: Any) -> Any:
        self._answer()  # before this hides the positional arguments
        return super().parse_known_intermixed_args(*args, **settings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message and unknown.startswith("--"):
            message += did_you_mean(re.split("[ =]", unknown)[0], self._option_string_actions)
        super().error(message)

    def _answer(self) -> None:
        """Print completions and end the process, where a shell asks for them."""
        if COMPLETING in os.environ and not self._answering:
            import argcomplete  # pyright: ignore[reportMissingImports]

            self._answering = True
            argcomplete.autocomplete(self, always_complete_options="long")


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of help texts; on a narrow terminal it wraps paragraphs and second columns of lists."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if all(len(line) <= width for line in text.splitlines()):
            return text
        lines: list[str] = []
        for is_list, run in groupby(text.splitlines(), lambda line: not line or line[0] == " " or line[-1] == ":"):
            for line in run if is_list else [" ".join(run)]:
                match = COLUMNS.match(line) if is_list else None
                hanging = " " * (match.end() if match else len(line) - len(line.lstrip()))
                if match and len(line) > width and width - match.end() < LEAST:
                    lines.append(match[0].rstrip())
                    line, hanging = " " * 6 + line[match.end() :], " " * 6
                if len(line) <= width or (not match and line.startswith("  rlloop ")):  # a command, to be copied
                    lines.append(line)
                else:
                    lines += textwrap.wrap(
                        line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
                    )
        return "\n".join(lines)


def new_parser(command: str, description: str, epilog: str = "") -> Parser:
    """A parser of `rlloop COMMAND` that keeps the layout of texts. Options cannot be abbreviated."""
    return Parser(
        prog=f"rlloop {command}",
        description=description,
        epilog=epilog,
        formatter_class=Help,
        allow_abbrev=False,
    )


def completed_command(names: Sequence[str]) -> str | None:
    """The command whose arguments a shell completes; None without a command or a completion request."""
    words = os.environ.get("COMP_LINE", "").split(" ")
    if COMPLETING not in os.environ or len(words) < 3 or words[1] not in names:
        return None
    os.environ[COMPLETING] = "2"  # of `rlloop COMMAND`
    return words[1]


def recipe_names(prefix: str, **_: Any) -> list[str]:
    from rlloop import recipes

    return list(recipes.available())


def settings(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Keys of the named recipe as `key=`, and the entries of a group; before a recipe is named, the recipes."""
    from rlloop.errors import RlloopError
    from rlloop.launch.compose import choices_of, compose_recipe, flat_keys

    named = [text for text in parsed_args.overrides or [] if "=" not in text]
    recipe = parsed_args.config_name or (named[0] if named else None)
    if recipe is None:
        return recipe_names(prefix)
    key, is_value, _value = prefix.partition("=")
    if is_value:
        return [f"{key}={choice}" for choice in choices_of(key)]
    try:
        return [f"{key}=" for key in flat_keys(compose_recipe(recipe, []))]
    except RlloopError:
        return []
