"""Publishes the trainer's weights: each version as the shortest delta from the last published one.

A publication writes the pieces, then the manifest, then the head by compare-and-swap. A kill in between leaves the old
head, and blobs that nothing refers to, which `collect` deletes.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlloop.errors import ConfigError
from rlloop.sync.bits import Bits, Tensors, processors
from rlloop.sync.manifest import Head, Link, Listing, Manifest, root_hash
from rlloop.sync.packing import listing_of, on_host, pack
from rlloop.sync.published import PublishedState
from rlloop.sync.replica import SQUASHED, Manifests, Replica
from rlloop.sync.store import Conflict, Store, StoreError
from rlloop.sync.target import MemoryTarget

if TYPE_CHECKING:
    from rlloop.sync.shares import Shares

KEPT_CHAINS = 2  # that `Publisher.collect` leaves: replicas may still be on their way along the older one


@dataclass(frozen=True)
class Published:
    """The result of a publication."""

    manifest: Manifest
    hash: bytes  # the manifest's
    metrics: dict[str, float] = field(default_factory=dict)  # sync/*; empty if the version had been published before


class Publisher:
    """Publishes versions of one run to a store. A second publisher on the same store raises `Conflict`.

    `squash_for` may be called from any thread; everything else from one. Where the weights are those of several ranks
    (`publish(..., shares=...)`), `publish` and `anchor` are called within `Shares.lead`, on the first rank alone.

    On a store that has versions it rebuilds the last published bytes from the store and checks them against the root,
    since every replica would refuse a delta from anything else.
    """

    def __init__(
        self,
        store: Store,
        key: Ed25519PrivateKey,
        run_id: str,
        *,
        anchor_every: int = 100,
        threads: int | None = None,
    ) -> None:
        """`anchor_every`: versions after which an anchor is due (sooner if the chain since the last weighs more).
        `threads`: number that encode; None: one for each processor.

        Raises `ConfigError`, also for a store that holds another run's versions.
        """
        if not run_id or "/" in run_id:
            raise ConfigError(f"run_id is {run_id!r}; it must be a name without a slash")
        if anchor_every < 1:
            raise ConfigError(f"anchor_every is {anchor_every}; it must be at least 1")
        self.store, self.run_id = store, run_id
        self._key, self._threads, self._anchor_every = key, threads or processors(), anchor_every
        self._state = PublishedState(self._threads)
        self._publishing, self._squashing = threading.Lock(), threading.Lock()
        self._head_bytes = store.latest()
        self.head = None if self._head_bytes is None else Head.decode(self._head_bytes)
        self._last: Manifest | None = None
        self._blobs: dict[bytes, tuple[bytes, ...]] = {}  # manifest's hash -> hashes of its blobs
        self._manifests = Manifests(store, key.public_key())
        self._term, self._name = 0, secrets.token_hex(8)
        if self.head is not None:
            self._term = self.head.term
            self._last = self._manifests.read(self.head.newest.manifest)
            if self._last.run_id != run_id:
                raise ConfigError(
                    f"the store has the versions of run {self._last.run_id}, and this is run {run_id}: give it a store "
                    "of its own"
                )
            self._state.tensors, self._state.digests = state_at(store, key, self.head, self.head.newest.sequence)
            self._state.listing = self._manifests.listing_of(self._last.listing)

    @property
    def last(self) -> Manifest | None:
        """The newest version's manifest."""
        return self._last

    def claim(self) -> int:
        """Fence off earlier publishers, which raise `Conflict` from now on. Returns this one's term, above all theirs.

        Raises `Conflict` if another publisher claims the store at the same moment.
        """
        with self._publishing:
            self._term += 1
            if self.head is not None:
                self._move_head(self.head)
            return self._term

    def publish(
        self, tensors: Tensors, step: int, *, aliases: Mapping[str, str] | None = None, shares: Shares | None = None
    ) -> Published:
        """Make `tensors` the newest version, `run_id/step`. Changed ones are copied, so the caller may overwrite them.

        Names are Hugging Face's; `aliases` are the other names of tied weights. Publishing the same step with the same
        bits again changes nothing. `shares`: `tensors` are this rank's of them, and it has the aliases. Raises
        `StoreError` (the old head remains; publish again) and `Conflict`.
        """
        if step < 0:  # -1 is an engine's version while its weights are those of none
            raise ConfigError(f"step is {step}; it must be 0 or more")
        with self._publishing:
            listing = listing_of(tensors, aliases or {}) if shares is None else shares.listing
            if not listing.tensors:
                raise ConfigError("nothing to publish: no tensors were given")
            return self._publish(listing, tensors, step, shares)

    def _publish(self, listing: Listing, tensors: Tensors, step: int, shares: Shares | None) -> Published:
        began, previous, aliases = time.perf_counter(), self._last, listing.aliases
        packed = self._state.pack(self.store, listing, tensors, shares)
        continues = self._state.continues
        changed, root = packed.changed, root_hash(listing.tensors, packed.digests)
        if (
            previous is not None and self.head is not None and not changed and root == previous.root
            and (step, self.run_id, aliases) == (previous.step, previous.run_id, previous.aliases)
        ):  # fmt: skip
            return Published(previous, self.head.newest.manifest)
        encoded_at = time.perf_counter()
        listed, weight = self._store_listing(listing)
        manifest = Manifest(
            run_id=self.run_id,
            step=step,
            sequence=0 if self.head is None else self.head.newest.sequence + 1,
            parent=self.head.newest.manifest if continues and self.head is not None else None,
            state_of=None,
            listing=listed,
            tensors=packed.entries,
            aliases=aliases,
            pieces=packed.pieces,
            root=root,
        )
        link = self._store_manifest(
            manifest, self.head.newest.sequence if manifest.parent and self.head else None, weight
        )
        chain = (*(self.head.chain if self.head else ()), link)
        shortcuts = self.head.shortcuts if self.head else ()
        if link.base is None and self.head is not None:  # another layout: no delta leads here from earlier versions
            chain, shortcuts = (link,), ()
        self._move_head(Head(self.run_id, chain, shortcuts))
        self._last = manifest
        self._state.adopt(listing, tensors, packed)
        done = time.perf_counter()
        elements = sum(math.prod(shape) for _, _, shape in listing.tensors)
        worked = encoded_at - began - packed.store_seconds
        encoders = self._threads * (1 if shares is None else shares.ranks.size)
        compared = min(packed.diff_seconds / encoders, worked)
        metrics = {
            "sync/wire_bytes": float(link.wire_bytes),
            "sync/ratio": manifest.full_bytes / link.wire_bytes,
            "sync/changed": changed / max(1, elements),
            "sync/diff_seconds": compared,
            "sync/encode_seconds": worked - compared,
            "sync/upload_seconds": packed.store_seconds + done - encoded_at,
            "sync/publish_seconds": done - began,
        }
        return Published(manifest, link.manifest, metrics)

    def anchor_due(self) -> bool:
        """True when the versions since the last anchor are `anchor_every`, or weigh more than a whole version."""
        head, last = self._current()
        anchors = [link.sequence for link in (*head.chain, *head.shortcuts) if link.base is None]
        since = [link for link in head.chain if link.sequence > max(anchors, default=-1)]
        return len(since) >= self._anchor_every or sum(link.wire_bytes for link in since) > last.full_bytes

    def anchor(self) -> Published:
        """Store the newest version whole, for replicas that join; then `collect`."""
        with self._publishing:
            published = self._shortcut({}, None)
            self._collect()
            return published

    def squash(self, base: int) -> Published:
        """Store one delta from the version of sequence `base` to the newest, for replicas that are far behind.

        Raises `ConfigError` for a sequence that the chain has not, or the newest.
        """
        head, _ = self._current()
        links = [link for link in head.chain if link.sequence == base]
        if not links or base >= head.newest.sequence:
            have = f"{head.chain[0].sequence} to {head.newest.sequence - 1}"
            raise ConfigError(f"no delta can be squashed from sequence {base}; choose one of the chain, {have}")
        old, _ = state_at(self.store, self._key, head, base)
        with self._publishing:
            return self._shortcut(old, links[0])

    def squash_for(self, sequence: int) -> bool:
        """Squash for a replica at `sequence`, unless that has been done. Returns True if the head has such a delta.

        False for a sequence outside of the chain, or fewer than `SQUASHED` versions behind. Safe from any thread.
        """
        with self._squashing:
            head = self.head
            if head is None or not head.chain[0].sequence <= sequence <= head.newest.sequence - SQUASHED:
                return False
            if all((link.base, link.sequence) != (sequence, head.newest.sequence) for link in head.shortcuts):
                self.squash(sequence)
            return True

    def collect(self) -> int:
        """Delete the blobs of all but the last two chains, each an anchor and the versions after it.

        Returns the number of blobs deleted.
        """
        with self._publishing:
            return self._collect()

    def _collect(self) -> int:
        head, _ = self._current()
        anchors = sorted({link.sequence for link in (*head.chain, *head.shortcuts) if link.base is None})
        first = anchors[-KEPT_CHAINS:][0]
        chain = tuple(link for link in head.chain if link.sequence >= first)
        shortcuts = tuple(
            link for link in head.shortcuts if link.sequence >= first and (link.base is None or link.base >= first)
        )
        if (chain, shortcuts) != (head.chain, head.shortcuts):
            self._move_head(Head(head.run_id, chain, shortcuts))
        links = (*chain, *shortcuts)
        self._blobs = {link.manifest: self._blobs[link.manifest] for link in links if link.manifest in self._blobs}
        needed = set[bytes]()
        for link in links:
            needed |= set(self.blobs(link))
        deleted = 0
        for blob in [blob for blob in self.store.blobs() if blob not in needed]:
            with suppress(StoreError):  # the next anchor tries again
                self.store.delete(blob)
                deleted += 1
        return deleted

    def forget_routes(self) -> None:
        """Drop every link but the newest version's from the head: for callers that pass each route on themselves."""
        head, _ = self._current()
        self._move_head(Head(head.run_id, (head.newest,)))

    def blobs(self, link: Link) -> tuple[bytes, ...]:
        """Hashes of the blobs that a replica needs to follow `link`: its manifest, the listing, the stream's pieces."""
        if link.manifest not in self._blobs:
            manifest = self._manifests.read(link.manifest)
            self._blobs[link.manifest] = (link.manifest, manifest.listing, *manifest.pieces)
        return self._blobs[link.manifest]

    # ---------------------------------------------------------------------------------------------- internals

    def _shortcut(self, base: Tensors, link: Link | None) -> Published:
        """Add a route to the newest version: a delta from `link`'s version, whose state is `base`, or an anchor."""
        head, last = self._current()
        began, state = time.perf_counter(), self._state
        if link is None:
            packed = state.pack_whole(self.store)
        else:
            assert state.listing is not None
            if state.shares is None:
                tensors = on_host(state.tensors)  # a GPU that trains has no room for `base`
            else:  # other ranks, which may be at work, have the rest
                tensors, _ = state_at(self.store, self._key, head, head.newest.sequence)
            packed = pack(self.store, state.listing, tensors, base, {}, self._threads)
        manifest = msgspec.structs.replace(
            last,
            parent=None if link is None else link.manifest,
            state_of=head.newest.manifest,
            tensors=packed.entries,
            pieces=packed.pieces,
        )
        shortcut = self._store_manifest(manifest, None if link is None else link.sequence)
        self._move_head(Head(head.run_id, head.chain, (*head.shortcuts, shortcut)))
        metrics = {"sync/wire_bytes": float(shortcut.wire_bytes), "sync/publish_seconds": time.perf_counter() - began}
        return Published(manifest, shortcut.manifest, metrics)

    def _current(self) -> tuple[Head, Manifest]:
        """The head and its newest manifest. Raises `ConfigError` before the first version."""
        if self.head is None or self._last is None:
            raise ConfigError("nothing has been published yet; publish a version first")
        return self.head, self._last

    def _store_listing(self, listing: Listing) -> tuple[bytes, int]:
        """The listing's hash, and the bytes stored: 0 if the last version has the same."""
        if listing == self._state.listing and self._last is not None:
            return self._last.listing, 0
        content = listing.encode()
        return self.store.put(content), len(content)

    def _store_manifest(self, manifest: Manifest, base: int | None, listing_bytes: int = 0) -> Link:
        signed = manifest.sign(self._key)
        return Link(
            manifest=self.store.put(signed),
            sequence=manifest.sequence,
            step=manifest.step,
            base=base,
            root=manifest.root,
            wire_bytes=len(signed) + manifest.stream_bytes + listing_bytes,
        )

    def _move_head(self, head: Head) -> None:
        head = msgspec.structs.replace(head, term=self._term, publisher=self._name)
        content = head.encode()
        try:
            self.store.swap_latest(self._head_bytes, content)
        except Conflict:
            if self.store.latest() != content:  # an earlier attempt that was reported as failed may have succeeded
                raise
        self.head, self._head_bytes = head, content


def state_at(
    store: Store, key: Ed25519PrivateKey, head: Head, sequence: int
) -> tuple[dict[str, Bits], dict[str, bytes]]:
    """The tensors of a version that `head` lists, rebuilt from the store and verified, and their digests."""
    target = MemoryTarget()
    replica = Replica(store, key.public_key(), target)
    replica.advance_to(sequence, head=head)
    return target.state, dict(replica.digests)
