"""Callbacks of `rlloop.train`: objects that see each step, and may end the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlloop.errors import ConfigError
from rlloop.loop.own import Run

METHODS = ("on_start", "on_step", "on_end")


class Callbacks:
    """Calls each callback's `on_start(run)`, `on_step(step, metrics)` and `on_end(run)`, where it has them.

    A plain function is an `on_step`. If an `on_step` returns True, the run ends after the step, with a checkpoint, as
    after Ctrl-C. What a callback raises ends the run as an error of its own.
    """

    def __init__(self, callbacks: Sequence[Any], run: Run) -> None:
        self.callbacks, self.run = check_callbacks(callbacks), run
        self._started = False
        self.reason: str | None = None  # text: who stopped the run, and when

    def start(self) -> None:
        """Call `on_start` once, even if the loop restarts after the death of a rank."""
        if not self._started:
            self._started = True
            self._each("on_start", self.run)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            on_step = getattr(callback, "on_step", callback if callable(callback) else None)
            if on_step is not None and on_step(step, metrics) is True and self.reason is None:
                name = getattr(callback, "__qualname__", type(callback).__qualname__)
                self.reason = f"Stopped by {name} after step {step}"

    def end(self) -> None:
        self._each("on_end", self.run)

    def _each(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            if (method := getattr(callback, name, None)) is not None:
                method(*arguments)


def check_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Raises `ConfigError` for an object without a callback method."""
    for callback in callbacks:
        if not callable(callback) and not any(hasattr(callback, name) for name in METHODS):
            raise ConfigError(
                f"callback {callback!r} has none of {', '.join(METHODS)}, and is not a function of (step, metrics)"
            )
    return list(callbacks)
