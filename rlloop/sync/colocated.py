"""Weight sync for engines that share the trainer's parameters: no bytes move."""

from __future__ import annotations

from typing import Protocol


class Versioned(Protocol):
    def set_version(self, version: int) -> None: ...


class ColocatedSync:
    """Tells engines their new version. The optimizer has written the tensors that they read.

    An engine drops what it computed with earlier weights, such as its prefix cache, when its version changes.
    """

    def __init__(self, *engines: Versioned) -> None:
        self.engines = engines

    def publish(self, version: int) -> dict[str, float]:
        for engine in self.engines:
            engine.set_version(version)
        return {}
