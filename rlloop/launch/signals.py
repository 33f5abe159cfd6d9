"""Ctrl-C and SIGTERM: the step ends, a checkpoint is saved, and the run can be resumed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any


class Interrupts(AbstractContextManager["Interrupts"]):
    """SIGINT and SIGTERM. While held back, the first one waits for the end of the step; a second one stops at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._held_back = self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        return self._asked

    @contextmanager
    def held_back(self) -> Iterator[None]:
        self._held_back = True
        try:
            yield
        finally:
            self._held_back = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._held_back or self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._say("Stopping after this step; press Ctrl-C again to stop at once")
