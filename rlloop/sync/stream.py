"""A version's encoded tensors, one after the other, cut into pieces that the store holds."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from rlloop.sync.manifest import PIECE, Manifest
from rlloop.sync.store import Store, fetch

AHEAD = 4  # pieces that are on their way at a time


class StreamWriter:
    """Takes encodings in turn and hands the store a piece at a time."""

    def __init__(self, store: Store) -> None:
        self._store, self._pending = store, bytearray()
        self.pieces: list[bytes] = []
        self.seconds = 0.0  # spent in the store

    def write(self, content: bytes) -> None:
        self._pending += content
        while len(self._pending) >= PIECE:
            self._put(bytes(self._pending[:PIECE]))
            del self._pending[:PIECE]

    def end(self) -> None:
        if self._pending:
            self._put(bytes(self._pending))
            self._pending.clear()

    def _put(self, piece: bytes) -> None:
        began = time.perf_counter()
        self.pieces.append(self._store.put(piece))
        self.seconds += time.perf_counter() - began


class StreamReader:
    """Reads a manifest's stream forwards, some pieces ahead; each is checked against its hash."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="fetch")
        self._coming: deque[Future[bytes]] = deque()
        self._asked = 0  # pieces
        self._have = bytearray()
        self._place = 0  # of the first byte of `_have` in the stream
        self.seconds = 0.0  # spent waiting

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, start: int, size: int) -> bytes:
        """Each call begins at or after the end of the one before."""
        del self._have[: start - self._place]
        self._place = start
        while len(self._have) < size:
            self._ask()
            began = time.perf_counter()
            self._have += self._coming.popleft().result()
            self.seconds += time.perf_counter() - began
        return bytes(memoryview(self._have)[:size])

    def _ask(self) -> None:
        while len(self._coming) < AHEAD and self._asked < len(self._manifest.pieces):
            size = self._manifest.piece_size(self._asked)
            piece = self._manifest.pieces[self._asked]
            self._coming.append(self._pool.submit(fetch, self._store, piece, size, limit=PIECE))
            self._asked += 1
