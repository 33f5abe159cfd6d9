"""Keeps a served engine at the newest version of the weights: a thread around the replica, polling and waking."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.wire import Progress
from rlloop.sync.relay import Sources
from rlloop.sync.replica import State
from rlloop.sync.store import HttpStore, Store, open_store

WAITING = "the engine has no version of the weights yet"


class Source(msgspec.Struct, frozen=True):
    """The source of an engine's weights."""

    store: str  # a folder, or a URL
    public_key: str  # 64 hexadecimal digits: the key that must have signed versions
    relay: str | None = None  # read first; the store is the fallback
    token: str | None = None  # for servers
    ca_file: str | None = None
    run_id: str | None = None  # the only run whose versions are accepted; None: the first one found,
    any_run: bool = False  # or each

    def open(self) -> Store:
        origin = open_served(self.store, self.token, self.ca_file)
        if self.relay is None:
            return origin
        return Sources(open_served(self.relay, self.token, self.ca_file), origin)


def open_served(url: str, token: str | None, ca_file: str | Path | None) -> Store:
    """Like `open_store`; servers are sent the fleet's token."""
    if not url.startswith(("http://", "https://")):
        return open_store(url)
    return HttpStore(url, token=token, ca_file=ca_file)


class Followed(Protocol):
    """A replica of the weights: `rlloop.sync.replica.Replica`, in this process or another."""

    @property
    def state(self) -> State: ...

    @property
    def error(self) -> str: ...

    @property
    def ready(self) -> bool: ...

    @property
    def torn(self) -> bool: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def run_id(self) -> str | None: ...

    @property
    def any_run(self) -> bool: ...

    def poll(self) -> bool: ...


class ReplicaFollower:
    """Polls every `interval` seconds, and immediately when woken."""

    def __init__(self, replica: Followed, service: EngineService, *, interval: float = 2.0) -> None:
        self._replica, self._service, self._interval = replica, service, interval
        service.halted = WAITING
        self._changed = threading.Condition()
        self._wanted, self._closed, self._caught_up = True, False, False
        self._polls = 0
        self._odd = ""  # an error that no poll should raise
        self._progress: Progress | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="follower")
        self._thread.start()

    @property
    def status(self) -> Literal["ready", "behind", "failed"]:
        if self._replica.torn and self._replica.state is State.error:  # while a commit goes on, it is torn as well
            return "failed"
        return "ready" if self._caught_up and self._replica.ready else "behind"

    @property
    def error(self) -> str:
        return self._replica.error or self._odd

    @property
    def progress(self) -> Progress | None:
        return self._progress

    @property
    def run_id(self) -> str:
        return self._replica.run_id or ""

    @property
    def follows(self) -> str:
        return "" if self._replica.any_run else self.run_id

    def wake(self) -> None:
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def wait_for(self, version: int, seconds: float) -> None:
        """Poll until exactly `version` serves, or for at most `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not (self._replica.ready and self._service.version == version) and self.status != "failed":
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                seen = self._polls
                self._wanted = True
                self._changed.notify_all()
                self._changed.wait_for(lambda seen=seen: self._polls > seen, min(left, 0.1))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed, self._interval)
                if self._closed:
                    return
                self._wanted = False
            self._odd = ""
            try:
                if self._replica.poll():
                    self._progress = Progress.of(self._service.version, self._replica.metrics)
            except Exception as error:  # such as out of memory: the engine reports it, and the next poll tries again
                self._odd = str(error) or type(error).__name__
            with self._changed:
                self._caught_up = not self.error
                self._polls += 1
                self._changed.notify_all()
