"""Python's garbage collector in the processes of a run: when it runs."""

from __future__ import annotations

import gc
from contextlib import ExitStack


def collect_rarely(stack: ExitStack) -> None:
    """Leave what start-up made out of garbage collections, and collect after 20,000 new objects instead of 700, until
    the stack closes: a step makes tens of thousands, nearly all of them freed without a collection.

    Of ranks each does so: while one collects all its objects, which takes tenths of a second, the others wait.
    """
    stack.callback(gc.set_threshold, *gc.get_threshold())
    gc.set_threshold(20_000, *gc.get_threshold()[1:])
    gc.freeze()
    stack.callback(gc.unfreeze)
