"""Engines on a trainer's device, which give their memory back while it works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Sleeper(Protocol):
    """An engine whose memory may be given back until its next step."""

    def sleep(self) -> None: ...


class BesideEngines:
    """Base of what computes on a device that engines share."""

    neighbours: Sequence[Sleeper] = ()  # which sleep meanwhile

    def put_neighbours_to_sleep(self) -> None:
        """Before each batch's forwards; an engine that sleeps already stays as it is."""
        for engine in self.neighbours:
            engine.sleep()
