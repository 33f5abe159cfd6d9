"""A region's relay: a cache in front of a store, so that each blob crosses the wide-area network once.

Blobs are kept in a folder of bounded size. A relay need not be trusted: receivers verify blobs by their hashes, and
manifests are signed. It verifies blobs itself, on the way in and on the way out, so that a damaged disk or connection
costs a fetch and not a failed sync. The head is never cached: while the store is unreachable, an old head would look
like the newest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rlloop.errors import ConfigError
from rlloop.sync.manifest import MAX_MANIFEST, Head, Refused, hash_of
from rlloop.sync.store import FolderStore, Missing, ReadOnly, Store, StoreError, fetch

T = TypeVar("T")


class CachingStore(ReadOnly):
    """Reads `upstream`, fetching each blob once. Thread-safe."""

    def __init__(self, upstream: Store, folder: str | Path, max_bytes: int) -> None:
        """`max_bytes`: limit of `folder`; the least recently used blobs are deleted first. Blobs in it are used.

        Raises `ConfigError` for a limit below the largest blob.
        """
        if max_bytes < MAX_MANIFEST:
            raise ConfigError(
                f"the relay's cache is limited to {max_bytes} bytes; it must have at least {MAX_MANIFEST}"
            )
        self.upstream, self.max_bytes = upstream, max_bytes
        self.hits = self.fetches = self.damaged = 0
        self.fetched_bytes = 0
        self._disk = FolderStore(folder)
        self._flights = SingleFlight()
        self._lock = threading.Lock()
        files = sorted(self._disk.path.glob("blobs/??/" + "?" * 64), key=lambda file: file.stat().st_mtime)
        self._sizes = OrderedDict((bytes.fromhex(file.name), file.stat().st_size) for file in files)
        self._total = sum(self._sizes.values())
        self._make_room()

    def latest(self) -> bytes | None:
        return self._flights.run("latest", self.upstream.latest)

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        yield self._blob(digest)[start:]

    def has(self, digest: bytes) -> bool:
        return self._disk.has(digest) or self.upstream.has(digest)

    def squash(self, sequence: int) -> bool:
        return self._flights.run(("squash", sequence), lambda: self.upstream.squash(sequence))

    def _blob(self, digest: bytes) -> bytes:
        try:
            content = b"".join(self._disk.get(digest))
        except Missing:
            return self._flights.run(digest, lambda: self._fetch(digest))
        if hash_of(content) != digest:
            self.damaged += 1
            self._forget(digest)
            return self._flights.run(digest, lambda: self._fetch(digest))
        with self._lock:
            self.hits += 1
            if digest in self._sizes:
                self._sizes.move_to_end(digest)
        return content

    def _fetch(self, digest: bytes) -> bytes:
        content = fetch(self.upstream, digest, limit=MAX_MANIFEST)
        self._disk.put(content)
        with self._lock:
            self.fetches += 1
            self.fetched_bytes += len(content)
            self._total += len(content) - self._sizes.get(digest, 0)
            self._sizes[digest] = len(content)
        self._make_room()
        return content

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._total -= self._sizes.pop(digest, 0)
            self._disk.delete(digest)

    def _make_room(self) -> None:
        with self._lock:
            while self._total > self.max_bytes:
                oldest, size = self._sizes.popitem(last=False)
                self._total -= size
                self._disk.delete(oldest)


class SingleFlight:
    """Concurrent callers with the same key share one call and its result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._going: dict[Hashable, Future[Any]] = {}

    def run(self, key: Hashable, call: Callable[[], T]) -> T:
        mine: Future[Any] = Future()
        with self._lock:
            running = self._going.setdefault(key, mine)
        if running is not mine:
            return running.result()
        try:
            mine.set_result(call())
        except BaseException as error:  # raised in every waiting caller
            mine.set_exception(error)
        finally:
            with self._lock:
                del self._going[key]
        return mine.result()


class Sources(ReadOnly):
    """Reads a relay, and falls back to the origin store for whatever the relay does not deliver intact."""

    def __init__(self, relay: Store, origin: Store) -> None:
        self._relay, self._origin = relay, origin
        self._again: OrderedDict[bytes, bool] = OrderedDict()  # digest -> True if it was asked for from its start again

    def latest(self) -> bytes | None:
        try:
            head = self._relay.latest()
            if head is not None:
                Head.decode(head)
                return head
        except (StoreError, Refused):
            pass
        return self._origin.latest()

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        if start == 0:
            self._again[digest] = digest in self._again
            while len(self._again) > 4096:
                self._again.popitem(last=False)
        if not self._again.get(digest):
            try:
                yield from self._relay.get(digest, start)
                return
            except Missing:
                pass
        yield from self._origin.get(digest, start)

    def has(self, digest: bytes) -> bool:
        return self._origin.has(digest)

    def squash(self, sequence: int) -> bool:
        try:
            return self._relay.squash(sequence)
        except StoreError:
            return self._origin.squash(sequence)
