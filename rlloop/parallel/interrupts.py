"""Interrupts that wait, since ranks that work together can only stop together; and waits that an interrupt ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
LOOKS = 1.0  # seconds between them


class Held:
    """A handler of SIGINT that notes the first one, and stops at the second."""

    asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def held_back() -> Iterator[Held]:
    """Within the context an interrupt (SIGINT) is only noted, and raised at the end; a second one is raised at once.
    Contexts inside share the note.

    Other threads than the main one, which alone gets signals, hold none back; nor does a process that ignores them.
    """
    before = signal.getsignal(signal.SIGINT)
    if isinstance(before, Held):
        yield before
        return
    held = Held()
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield held
        return
    signal.signal(signal.SIGINT, held)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
        if held.asked:
            signal.raise_signal(signal.SIGINT)


def result_of(future: Future[T]) -> T:
    """`future.result()`, which a signal ends within `LOOKS` seconds also if it comes just as the wait begins: Python
    handles that one when the main thread wakes."""
    while not future.done():
        wait([future], LOOKS)
    return future.result()
