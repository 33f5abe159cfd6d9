"""Results that callers wait for."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


def promised() -> Future[Any]:
    """A future that no caller can cancel, as `asyncio.wait_for` does with what it stops waiting for: setting its result
    would then raise, in the thread that serves all callers."""
    future = Future[Any]()
    future.set_running_or_notify_cancel()
    return future
