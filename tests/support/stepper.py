"""An engine whose steps a test allows, so that a state stays until the test has seen it."""

from __future__ import annotations

import math
import threading
from typing import Any

from rlloop import Engine


class Stepper:
    """An engine that computes in a step only where it may; in all at first."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.changed = threading.Condition()
        self.left: float = math.inf  # steps
        self.fails: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def may(self, steps: float = math.inf) -> None:
        """Compute in so many from now on."""
        with self.changed:
            self.left = steps
            self.changed.notify_all()

    def step(self) -> Any:
        with self.changed:
            if not self.changed.wait_for(lambda: self.left > 0, timeout=0.001):
                return []  # so that its driver can do other things in between
            self.left -= 1
        if self.fails is not None:
            error, self.fails = self.fails, None
            self.engine.abort_all()
            raise error
        return self.engine.step()
