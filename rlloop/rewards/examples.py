"""Fields of an example that a reward reads, and its check of an example before a run begins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rlloop.errors import ConfigError
from rlloop.types import Example


class MissingField(ConfigError):
    """A row lacks a field that a reward reads."""


def field_of(example: Example, key: str | None, setting: str) -> Any:
    """`example.data[key]`. Raises `MissingField` for a row without that field, which the reward's `setting` names.

    Example: `field_of(example, answer_key, "answer_key")`.
    """
    if key not in example.data:
        has = ", ".join(map(str, example.data)) or "none"
        raise MissingField(f"example {example.id!r} has no field {key!r}; {setting} must name one that it has: {has}")
    return example.data[key]


def check_of(reward: Any, section: str = "reward") -> Callable[[Example], None] | None:
    """The reward's `check_example`: its method, or its function's attribute, which gets the function's bound arguments
    too. None if it has none. Its `ConfigError` then names the configuration's `section`."""
    function, bound = (reward.func, reward.keywords) if isinstance(reward, functools.partial) else (reward, {})
    check = getattr(function, "check_example", None)
    if check is None:
        return None

    def checked(example: Example) -> None:
        try:
            check(example, **bound)
        except ConfigError as error:
            raise type(error)(f"{section}: {error}") from None

    return checked
