"""Progress of ranks: each counts its work, and publishes the count to a watcher.

Counted work: a micro-batch, an engine's step, a tensor that was read, a copy between ranks. A rank that waits for
others reports that, which distinguishes a stuck rank from those that wait for it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from torch._C._distributed_c10d import Store  # torch.distributed has it, but does not declare it
from torch.distributed import DistError

PERIOD = 0.5  # seconds between reports
WAITS, IDLE = "waits in ", "is done"
SILENT = 10 * PERIOD  # without a report: the process is stopped or gone, or compiles and lets no thread run


class Group(Protocol):
    @property
    def size(self) -> int: ...


P = ParamSpec("P")
R = TypeVar("R")
G = TypeVar("G", bound=Group)


class _Here:
    """This process's own rank."""

    count = 0
    doing = "starts"


def tick() -> None:
    """Count one piece of work."""
    _Here.count += 1


def rest() -> None:
    """Report the rank as idle, from now on and after each piece of work."""
    _Here.doing = IDLE


def rests() -> bool:
    """True if this process reports its rank as idle."""
    return _Here.doing == IDLE


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Report the rank's activity within the context, for a watcher's message; counts as progress at both ends."""
    before, _Here.doing = _Here.doing, what
    _Here.count += 1
    try:
        yield
    finally:
        _Here.count += 1
        _Here.doing = before


@contextmanager
def reported(store: Store, rank: int) -> Iterator[None]:
    """Report this process's progress as that of `rank`, until the context ends or the store is gone."""
    over = threading.Event()

    def report() -> None:
        for beat in itertools.count(1):
            try:
                store.set(_key(rank), json.dumps([beat, _Here.count, _Here.doing]))
            except DistError:  # its host has ended: so will this process
                return
            if over.wait(PERIOD):
                return

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def meets(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
    """Decorator for methods of `Ranks` in which a rank waits for the others of its group."""
    what = f"{WAITS}{method.__name__}"

    @wraps(method)
    def meet(ranks: G, *args: P.args, **kwargs: P.kwargs) -> R:
        if ranks.size == 1:
            return method(ranks, *args, **kwargs)
        with doing(what):
            return method(ranks, *args, **kwargs)

    return meet


def _key(rank: int) -> str:
    return f"progress/{rank}"


@dataclass
class _Seen:
    report: tuple[int, int, str] = (-1, -1, "starts")  # beat, count, doing
    beat: float = 0.0  # when it was first seen
    moved: float = 0.0  # when the count was


class Watch:
    """Reads the progress of `size` ranks. Times are this process's, so clocks of machines need not agree."""

    def __init__(self, store: Store, size: int) -> None:
        self._store, self.size = store, size
        self._seen = [_Seen() for _ in range(size)]
        self.reset()

    def reset(self) -> None:
        """Restart the measurement of standstill."""
        self._looked = time.monotonic()
        for seen in self._seen:
            seen.beat = seen.moved = self._looked

    def look(self) -> None:
        """Read all reports; at least every `SILENT` seconds while it matters, since standstill is measured anew after
        a longer pause."""
        now = time.monotonic()
        if now - self._looked > SILENT:  # this process was stopped, and perhaps the ranks with it
            self.reset()
        self._looked = now
        for rank, seen in enumerate(self._seen):
            if not self._store.check([_key(rank)]):
                continue
            beat, count, what = json.loads(self._store.get(_key(rank)))
            if beat != seen.report[0]:
                seen.beat = now
            if count != seen.report[1]:
                seen.moved = now
            seen.report = beat, count, what

    def silent(self, seconds: float = SILENT) -> list[int]:
        """Ranks that have not reported for `seconds`, after they once had."""
        before = time.monotonic() - seconds
        return [rank for rank, seen in enumerate(self._seen) if seen.report[0] >= 0 and seen.beat < before]

    def absent(self) -> list[int]:
        """Ranks that have never reported."""
        return [rank for rank in range(self.size) if self._absent(rank)]

    def stalled(self, timeout: float, setting: str = "ray.rank_timeout") -> tuple[int, str] | None:
        """A rank that has made no progress for `timeout` seconds, and its known state; None: all make progress.
        `setting`: where the user sets them.

        A rank that waits for others is not blamed, unless all of them wait.
        """
        now, silent = time.monotonic(), self.silent()
        still = [rank for rank, seen in enumerate(self._seen) if now - seen.moved > timeout]
        waits = {rank for rank, seen in enumerate(self._seen) if seen.report[2].startswith((WAITS, IDLE))}
        blamed = [rank for rank in still if rank in silent or rank not in waits]
        if not blamed and len(still) < self.size:
            return None
        rank = min(
            blamed or still,
            key=lambda each: (not self._absent(each), each not in silent, self._seen[each].report[1]),
        )
        states = "; ".join(f"rank {each} {self._says(each, silent)}" for each in range(self.size))
        limit = f"{timeout:g} s ({setting})"
        why = f"no progress for {limit}"
        if self._absent(rank):
            why = f"no report within {limit}: not started, or ended at once"
        return rank, f"{why}. Of all ranks: {states}"

    def _absent(self, rank: int) -> bool:
        """True if a rank has never reported; rank 0, which watches, is here."""
        return rank > 0 and self._seen[rank].report[0] < 0

    def _says(self, rank: int, silent: list[int]) -> str:
        _, count, what = self._seen[rank].report
        if self._absent(rank):
            return "has not reported"
        gone = ", and reports no more" if rank in silent else ""
        return f"{what} (after {max(count, 0)} pieces of work{gone})"
