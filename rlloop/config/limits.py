"""Limits of configuration keys: declared beside each key, checked when its section is built.

lr: float = limited(1e-5, ZERO_OR_MORE)          # in a dataclass
check_limits("trainer", self)                    # in its __post_init__
# ConfigError: trainer.lr is -1.0; it must be 0 or more
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from rlloop.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Limit:
    """The values that a key may have, as a predicate and in words."""

    holds: Callable[[Any], bool]  # False for NaN
    says: str


POSITIVE = Limit(lambda x: 0 < x < math.inf, "a positive number")
SECONDS = Limit(POSITIVE.holds, "a positive number of seconds")
ZERO_OR_MORE = Limit(lambda x: 0 <= x < math.inf, "0 or more")
ZERO_OR_MORE_SECONDS = Limit(ZERO_OR_MORE.holds, "0 or more seconds")
UNIT = Limit(lambda x: 0 <= x <= 1, "from 0 to 1")
ABOVE_ZERO_TO_ONE = Limit(lambda x: 0 < x <= 1, "above 0 and at most 1")
TEMPERATURE = Limit(lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6")  # what `rlloop.SamplingParams` takes
BELOW_ONE = Limit(lambda x: 0 <= x < 1, "from 0 to below 1")


def at_least(least: int) -> Limit:
    return Limit(lambda x: x >= least, f"at least {least}")


def zero_or_more(zero: str) -> Limit:
    """`zero` says what 0 means."""
    return Limit(ZERO_OR_MORE.holds, f"0 ({zero}) or more")


def one_of(*allowed: str) -> Limit:
    return Limit(lambda x: x in allowed, f"one of {', '.join(allowed)}")


def or_null(limit: Limit, null: str) -> Limit:
    """`null` says what null means."""
    return Limit(lambda x: x is None or limit.holds(x), f"null ({null}) or {limit.says}")


def limited(default: T, limit: Limit) -> T:
    """A dataclass field whose value `check_limits` holds to `limit`."""
    return field(default=default, metadata={"limit": limit})


def check_limits(section: str, config: Any) -> None:
    """Raises `ConfigError` for the first field of the dataclass `config` that is beyond its limit."""
    for each in fields(config):
        limit, value = each.metadata.get("limit"), getattr(config, each.name)
        if limit is not None:
            require(f"{section}.{each.name}".lstrip("."), value, limit.holds(value), limit.says)


def require(key: str, value: object, good: bool, allowed: str) -> None:
    """Raises `ConfigError` unless `good`: names the key, its value and what is allowed."""
    if not good:
        raise ConfigError(f"{key} is {value!r}; it must be {allowed}")
