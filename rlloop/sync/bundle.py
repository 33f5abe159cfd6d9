"""A store in a process's memory, and what it hands another one: for engines that a launcher can call directly.

Ray carries a bundle from the trainer's process to every replica's: through shared memory on one node, once to each
other node. What the bundle brings is checked all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlloop.sync.bits import Tensors
from rlloop.sync.manifest import Head, Link, hash_of, public_hex, public_key
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica
from rlloop.sync.store import Conflict, Missing
from rlloop.sync.target import Target


@dataclass(frozen=True)
class Bundle:
    """One way to the newest version: the head, and the blobs of that way."""

    head: bytes
    blobs: dict[bytes, bytes]
    key: str  # public, hexadecimal
    metrics: dict[str, float] = field(default_factory=dict)  # sync/* of the publication


class MemoryStore:
    """Blobs and head in a process's memory."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}
        self.head: bytes | None = None

    def latest(self) -> bytes | None:
        return self.head

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        if digest not in self.held:
            raise Missing(f"this process holds no blob {digest.hex()}")
        yield self.held[digest][start:]

    def has(self, digest: bytes) -> bool:
        return digest in self.held

    def put(self, blob: bytes) -> bytes:
        digest = hash_of(blob)
        self.held[digest] = blob
        return digest

    def swap_latest(self, expected: bytes | None, new: bytes) -> None:
        if self.head != expected:
            raise Conflict("the head was moved by another publisher")
        self.head = new

    def blobs(self) -> Iterator[bytes]:
        yield from list(self.held)

    def delete(self, digest: bytes) -> None:
        self.held.pop(digest, None)

    def squash(self, sequence: int) -> bool:
        return False  # nobody hears it


class BundlePublisher:
    """Publishes into bundles, and keeps none: for who joins, `joining` makes the way anew."""

    def __init__(self, run_id: str, threads: int = 1) -> None:
        key = Ed25519PrivateKey.generate()  # nobody else signs for this process's replicas, and nothing outlives it
        self._store, self._key = MemoryStore(), public_hex(key)
        self._publisher = Publisher(self._store, key, run_id, threads=threads)

    def publish(self, tensors: Tensors, step: int, aliases: Mapping[str, str]) -> Bundle:
        """The way from the version before to this one; the first one, and the same again, from nothing."""
        published = self._publisher.publish(tensors, step, aliases=aliases)
        if not published.metrics:
            return self.joining()
        assert self._publisher.head is not None
        return self._bundle(self._publisher.head.newest, published.metrics)

    def joining(self) -> Bundle:
        """The way from nothing to the newest version."""
        self._publisher.anchor()
        assert self._publisher.head is not None
        return self._bundle(self._publisher.head.shortcuts[-1], {})

    def _bundle(self, link: Link, metrics: dict[str, float]) -> Bundle:
        """The blobs of `link` and of no other way, and a head that knows no other."""
        head = self._publisher.head
        assert head is not None
        newest, listing, *_ = self._publisher.blobs(head.newest)
        content = Head(head.run_id, (head.newest,), () if link == head.newest else (link,)).encode()
        blobs = {blob: self._store.held[blob] for blob in (newest, *self._publisher.blobs(link))}
        self._publisher.forget_ways()
        self._store.held = {blob: blobs[blob] for blob in (newest, listing)}
        return Bundle(content, blobs, self._key, metrics)


class BundleReplica:
    """A replica that is handed its versions."""

    def __init__(self, target: Target, threads: int = 1) -> None:
        self._store, self._target, self._threads = MemoryStore(), target, threads
        self._replica: Replica | None = None

    def apply(self, bundle: Bundle) -> dict[str, float]:
        """Bring the target to the bundle's version; sync/* metrics. Raises `SyncError`: then ask for `joining`."""
        self._store.held, self._store.head = bundle.blobs, bundle.head
        if self._replica is None:
            self._replica = Replica(self._store, public_key(bundle.key), self._target, threads=self._threads)
        try:
            self._replica.advance_to(Head.decode(bundle.head).newest.sequence)
        finally:
            self._store.held = {}
        return dict(self._replica.metrics)
