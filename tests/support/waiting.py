"""Waiting for a state that stays once it has come. One that may be over between two looks needs a gate instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.command import Command


def until(condition: Callable[[], Any], process: Command | None = None, seconds: float = 240.0) -> Any:
    """The condition's first true value. Fails after so many seconds, and where `process` has ended before."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come"
        assert process is None or process.poll() is None or condition(), process.communicate()[0]
        time.sleep(0.005)
    return value
