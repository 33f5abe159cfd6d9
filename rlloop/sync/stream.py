"""A version's stream of encoded tensors, cut into pieces for the store and read back from them."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from rlloop.sync.manifest import PIECE, Manifest
from rlloop.sync.store import Store, fetch

AHEAD = 4  # pieces that are fetched at a time


class StreamWriter:
    """Cuts encodings, written in turn, into pieces and puts each into the store."""

    def __init__(self, store: Store) -> None:
        self._store, self._pending = store, bytearray()
        self.pieces: list[bytes] = []  # hashes
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
    """Reads a manifest's stream forwards, fetching some pieces ahead. Each is verified against its hash."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="fetch")
        self._coming: deque[Future[bytes]] = deque()
        self._asked = 0  # pieces requested so far
        self._have = bytearray()
        self._offset = 0  # of the first byte of `_have` in the stream
        self.seconds = 0.0  # spent waiting for the store

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, start: int, size: int) -> bytes:
        """`size` bytes from offset `start`, which must not be before the end of the last call."""
        del self._have[: start - self._offset]
        self._offset = start
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
