"""The errors that rlloop raises.

    RlloopError
    ├── ConfigError (ValueError)       a setting, an argument or a combination of them that cannot work
    ├── ModelError (ValueError)        a checkpoint folder that is missing, unsupported or does not fit
    ├── RunError (ValueError)          a run folder that is missing, damaged or of another run
    ├── ParityError                    engine and trainer differ in a run that requires equal bits
    └── SyncError                      weights that could not be published or applied; the old version goes on serving

A user's mistake is a `ValueError`, raised before any work starts, whose message says what was given, what is allowed
and what to change. A broken invariant of rlloop's own is an `assert`.
"""

import copyreg
import difflib
import functools
import threading
from collections.abc import Iterable
from typing import TypeVar

import msgspec

T = TypeVar("T")

# Errors of decoders for invalid bytes: text that is not UTF-8 and integers of thousands of digits are ValueErrors, and
# too deep nesting is a RecursionError.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_prepare, _preparing = functools.cache(msgspec.msgpack.Decoder), threading.Lock()


def readable(kind: type[T]) -> type[T]:
    """A type that threads decode, prepared by one of them: msgspec 0.22 crashes where two are the first to do so."""
    with _preparing:
        _prepare(kind)
    return kind


class RlloopError(Exception):
    """Base of rlloop's errors. `exit_code`: the command line's."""

    exit_code = 1

    def __reduce__(self) -> tuple[object, ...]:
        """Another process has it as it is here, also one whose `__init__` takes other arguments than its message."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # pyright: ignore


class ConfigError(RlloopError, ValueError):
    """A setting that cannot work. The message names it, its value and the values allowed."""

    exit_code = 2


class ModelError(RlloopError, ValueError):
    """A model folder that is missing, has an unsupported architecture, or has tensors that do not fit."""

    exit_code = 2


class RunError(RlloopError, ValueError):
    """A run folder that is missing, damaged, or of another configuration."""

    exit_code = 2


class ParityError(RlloopError):
    """The trainer's bits differ from the engine's in a run whose `parity.mode` is `require`."""

    exit_code = 3


class SyncError(RlloopError):
    """A version of the weights could not be published, fetched or applied. The old version goes on serving."""


def did_you_mean(name: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> str:
    """` (did you mean X?)`, for the end of a message: the `count` names nearest to `name`, whatever their letters'
    case; nothing where none is near."""
    by_lower = {each.lower(): each for each in known}
    near = [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, count, cutoff)]
    return f" (did you mean {', '.join(near)}?)" if near else ""
