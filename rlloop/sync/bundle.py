"""Weight sync between processes that a launcher can call directly: a store in memory, and bundles of its blobs.

Ray carries a bundle from the trainer's process to each replica's: through shared memory on one node, once to every
other node. A replica verifies a bundle as it verifies any store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlloop.sync.bits import Tensors
from rlloop.sync.manifest import Head, Link, hash_of, public_hex, public_key
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica
from rlloop.sync.shares import Shares
from rlloop.sync.store import Conflict, Missing
from rlloop.sync.target import Target


@dataclass(frozen=True)
class Bundle:
    """The newest version for one kind of receiver: a head with one route to it, and that route's blobs."""

    head: bytes
    blobs: dict[bytes, bytes]
    key: str  # public, hexadecimal
    metrics: dict[str, float] = field(default_factory=dict)  # sync/* of the publication; empty for `joining`


class MemoryStore:
    """A store in a process's memory."""

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
        return False  # no publisher can be asked


class BundlePublisher:
    """Publishes each version as a bundle and keeps none: `joining` builds one for a new replica.

    Over ranks, its methods are called within `Shares.lead`.
    """

    def __init__(self, run_id: str, threads: int = 1) -> None:
        key = Ed25519PrivateKey.generate()  # used by this process's replicas alone, and never stored
        self._store, self._key = MemoryStore(), public_hex(key)
        self._publisher = Publisher(self._store, key, run_id, threads=threads)

    def publish(self, tensors: Tensors, step: int, aliases: Mapping[str, str], shares: Shares | None = None) -> Bundle:
        """A delta from the previous version. The first version, and one that changes nothing, come whole.

        `shares`: as `Publisher.publish`.
        """
        published = self._publisher.publish(tensors, step, aliases=aliases, shares=shares)
        if not published.metrics:
            return self.joining()
        assert self._publisher.head is not None
        return self._bundle(self._publisher.head.newest, published.metrics)

    def joining(self) -> Bundle:
        """The newest version whole, for a replica that has none."""
        self._publisher.anchor()
        assert self._publisher.head is not None
        return self._bundle(self._publisher.head.shortcuts[-1], {})

    def _bundle(self, link: Link, metrics: dict[str, float]) -> Bundle:
        """A bundle of `link` alone. The store keeps only what the next publication needs."""
        head = self._publisher.head
        assert head is not None
        newest, listing, *_ = self._publisher.blobs(head.newest)
        content = Head(head.run_id, (head.newest,), () if link == head.newest else (link,)).encode()
        blobs = {blob: self._store.held[blob] for blob in (newest, *self._publisher.blobs(link))}
        self._publisher.forget_routes()
        self._store.held = {blob: blobs[blob] for blob in (newest, listing)}
        return Bundle(content, blobs, self._key, metrics)


class BundleReplica:
    """A replica that versions are handed to, as bundles."""

    def __init__(self, target: Target, threads: int = 1) -> None:
        self._store, self._target, self._threads = MemoryStore(), target, threads
        self._replica: Replica | None = None

    def apply(self, bundle: Bundle) -> dict[str, float]:
        """Bring the target to the bundle's version; returns sync/* metrics.

        Raises `SyncError`; the publisher's `joining` bundle then leads on from any state.
        """
        self._store.held, self._store.head = bundle.blobs, bundle.head
        if self._replica is None:
            self._replica = Replica(self._store, public_key(bundle.key), self._target, threads=self._threads)
        try:
            self._replica.advance_to(Head.decode(bundle.head).newest.sequence)
        finally:
            self._store.held = {}
        return dict(self._replica.metrics)
