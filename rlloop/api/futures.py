"""Results that clients fetch later.

A future is pending, then done. It is kept until its result was collected and a grace period is over, for clients whose
connection broke while reading; uncollected results are kept for an hour. All calls are in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

COLLECTED_SECONDS = 120.0  # a collected result is kept for
UNCOLLECTED_SECONDS = 3600.0
SENT = 1000  # collected results of a model that outlive a restart, if it comes in that time
JSON, PROTOBUF = "application/json", "application/x-protobuf"


@dataclass(frozen=True)
class Outcome:
    """A future's final answer: a result in JSON or protobuf, or an error as JSON."""

    body: bytes
    media: str = JSON
    failed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)  # of a forward_backward
    raw: bytes = b""  # of a sample, for its log


@dataclass(eq=False)
class Future:
    request_id: str
    client: str  # the owner's name
    kind: str
    nbytes: int
    digest: bytes = b""  # of a sample's request
    outcome: Outcome | None = None
    cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    expires: float = float("inf")
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Load:
    futures: int = 0
    nbytes: int = 0


class Futures:
    def __init__(self) -> None:
        self._all: OrderedDict[str, Future] = OrderedDict()
        self._loads: dict[str, _Load] = {}

    def __getitem__(self, request_id: str) -> Future:
        return self._all[request_id]

    def get(self, request_id: str, client: str) -> Future | None:
        """A future by id; None if it is unknown or another client's."""
        future = self._all.get(request_id)
        return future if future is not None and future.client == client else None

    def add(self, request_id: str, client: str, kind: str, nbytes: int, digest: bytes = b"") -> Future:
        assert request_id not in self._all, request_id
        future = self._all[request_id] = Future(request_id, client, kind, nbytes, digest)
        load = self._loads.setdefault(client, _Load())
        load.futures += 1
        load.nbytes += nbytes
        return future

    def discard(self, future: Future) -> None:
        """Forget a pending future."""
        self.resolve(future, Outcome(b"", failed=True))
        del self._all[future.request_id]

    def resolve(self, future: Future, outcome: Outcome) -> None:
        """Only the first outcome counts."""
        if future.outcome is not None:
            return
        future.outcome, future.expires = outcome, time.monotonic() + UNCOLLECTED_SECONDS
        load = self._loads[future.client]
        load.futures -= 1
        load.nbytes -= future.nbytes
        future.done.set()

    async def wait(self, future: Future, seconds: float) -> Outcome | None:
        """The outcome, or None after the timeout in seconds."""
        if future.outcome is None:
            try:
                async with asyncio.timeout(seconds):
                    await future.done.wait()
            except TimeoutError:
                return None
        return future.outcome

    def collected(self, future: Future) -> None:
        future.expires = min(future.expires, time.monotonic() + COLLECTED_SECONDS)

    def load(self, client: str) -> tuple[int, int]:
        """Pending futures of a client, and the bytes of their requests."""
        load = self._loads.get(client, _Load())
        return load.futures, load.nbytes

    def kept(self, prefix: str) -> list[Future]:
        """Done futures with this id prefix whose results may still be asked for: those that were not, and the newest
        that were sent, since the answer may have been lost."""
        done = [each for each in self._all.values() if each.request_id.startswith(prefix) and each.outcome is not None]
        soon = time.monotonic() + COLLECTED_SECONDS
        sent = [future for future in done if future.expires <= soon]
        old = {future.request_id for future in sent[:-SENT]}
        return [future for future in done if future.request_id not in old]

    def sweep(self) -> None:
        """Drop expired results. To be called about once a second."""
        now = time.monotonic()
        for request_id in [key for key, future in self._all.items() if future.expires < now]:
            del self._all[request_id]

    @property
    def pending(self) -> int:
        return sum(load.futures for load in self._loads.values())

    def __len__(self) -> int:
        return len(self._all)
