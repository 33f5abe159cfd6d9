"""Ctrl-C, SIGTERM and a closed terminal: the step ends, a checkpoint is saved, and the run can be resumed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any


class Interrupts(AbstractContextManager["Interrupts"]):
    """SIGINT, SIGTERM, and SIGHUP unless it is ignored, as by `nohup`. While held back, the first one waits for the end
    of the step; a second one stops at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._held_back = self._asked = False
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
            if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
                numbers.remove(signal.SIGHUP)
            self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
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
        if number == signal.SIGHUP:
            self._leave_terminal()
        again, self._asked = self._asked, True  # known to the loop even where Python drops the error, as in callbacks
        if not self._held_back or again:
            raise KeyboardInterrupt
        self._say("Stopping after this step; press Ctrl-C again to stop at once")

    def _leave_terminal(self) -> None:
        """Nobody reads it any more, and to write to it is an error."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in self._terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)
