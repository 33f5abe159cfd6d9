"""Weight sync where engine and trainer share the parameters: nothing moves."""

from __future__ import annotations

from typing import Protocol


class Versioned(Protocol):
    def set_version(self, version: int) -> None: ...


class ColocatedSync:
    """The optimizer writes the very tensors that the engines read, so only the version has to be told.

    What the engines computed with earlier weights (prefix caches) is dropped with it.
    """

    def __init__(self, *engines: Versioned) -> None:
        self.engines = engines

    def publish(self, version: int) -> dict[str, float]:
        for engine in self.engines:
            engine.set_version(version)
        return {}
