"""The ranks that compute a step together, which record it as a graph together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlloop.parallel.context import ParallelContext

ROOM = 2 << 30  # bytes that each of several ranks has free before they record a step: none may fail in the middle


class Stopped(Exception):
    """One of the ranks cannot go on; raised on all of them."""


class StepRanks:
    """The ranks that share experts, or each product, in all stages of a pipeline. Each calls the same methods."""

    def __init__(self, context: ParallelContext) -> None:
        axes = ("tp" if context.layout.expert_leaves == 1 else "ep", "pp")
        self._context = context
        self._groups = [ranks for axis in axes if (ranks := context.ranks(axis)).size > 1]

    def troubles(self, text: str) -> list[str]:
        """The ranks' texts that are not empty; those of several ranks begin with the rank."""
        rank, size = self._context.rank, self._context.layout.world_size
        texts = [f"rank {rank} of {size}: {text}" if text and self._groups else text]
        for ranks in self._groups:
            texts = [each for some in ranks.gather_objects(texts) for each in some]
        return [each for each in texts if each]

    def check(self, text: str) -> None:
        """Raises `Stopped` if a rank has a text that is not empty."""
        if troubles := self.troubles(text):
            raise Stopped(troubles[0])

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Raises `Stopped` at the end if a rank's work within the context raises an exception."""
        failure = ""
        try:
            yield
        except Exception as error:
            failure = str(error) or repr(error)
        self.check(failure)

    def check_room(self) -> None:
        """Raises `Stopped` unless each of several ranks has `ROOM`."""
        self.check(self._shortage())

    def has_room(self) -> bool:
        """True if each of several ranks has `ROOM`."""
        return not self.troubles(self._shortage())

    def _shortage(self) -> str:
        free = torch.cuda.mem_get_info(self._context.device)[0] if self._groups else ROOM
        return "" if free >= ROOM else f"{free / 2**30:.1f} GiB are free, and to record a step takes up to {ROOM >> 30}"
