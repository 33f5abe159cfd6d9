"""The trainer's end: each version as the shortest difference from the last published one, durable before it is named.

Order of a publication: pieces, then the manifest, then the head by compare-and-swap. A kill in between leaves blobs
that nobody names, and the old head.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlloop.errors import ConfigError
from rlloop.sync.bits import Bits, Tensors
from rlloop.sync.manifest import Head, Link, Listing, Manifest, root_hash
from rlloop.sync.packing import listing_of, pack
from rlloop.sync.replica import SQUASHED, Manifests, Replica
from rlloop.sync.store import Conflict, Store
from rlloop.sync.target import MemoryTarget

KEPT_CHAINS = 2  # that `Publisher.collect` leaves: replicas may still be on their way along the older one


@dataclass(frozen=True)
class Published:
    """What one publication came to."""

    manifest: Manifest
    hash: bytes  # the manifest's
    metrics: dict[str, float] = field(default_factory=dict)  # sync/*; empty where the version stood already


class Publisher:
    """One at a time: a second one on the same store loses the compare-and-swap and raises `Conflict`. `squash_for` may
    be called from other threads; all else from one.

    Begins where the store's head stands: the last published bytes are rebuilt from the store and checked against the
    root, since a difference from anything else would be refused by every replica.
    """

    def __init__(
        self,
        store: Store,
        key: Ed25519PrivateKey,
        run_id: str,
        *,
        anchor_every: int = 100,
        threads: int = 1,
    ) -> None:
        """`anchor_every`: versions after which an anchor is due (earlier where the chain weighs more than one)."""
        if not run_id or "/" in run_id:
            raise ConfigError(f"run_id is {run_id!r}; it must be a name without a slash")
        if anchor_every < 1:
            raise ConfigError(f"anchor_every is {anchor_every}; it must be at least 1")
        self.store, self.run_id = store, run_id
        self._key, self._threads, self._anchor_every = key, threads, anchor_every
        self._publishing, self._squashing = threading.Lock(), threading.Lock()
        self._head_bytes = store.latest()
        self.head = None if self._head_bytes is None else Head.decode(self._head_bytes)
        self._tensors: dict[str, Bits] = {}
        self._digests: Mapping[str, bytes] = {}  # of those
        self._last: Manifest | None = None
        self._listing: Listing | None = None  # of the last version
        self._blobs: dict[bytes, tuple[bytes, ...]] = {}  # of manifests that `collect` has read
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
            self._tensors, self._digests = state_at(store, key, self.head, self.head.newest.sequence)
            self._listing = self._manifests.listing_of(self._last.listing)

    @property
    def last(self) -> Manifest | None:
        """The newest version's manifest."""
        return self._last

    def claim(self) -> int:
        """Fence off earlier publishers: they raise `Conflict` from now on. Returns this one's term, above all of
        theirs. Raises `Conflict` where another claims the store at this moment."""
        with self._publishing:
            self._term += 1
            if self.head is not None:
                self._move_head(self.head)
            return self._term

    def publish(self, tensors: Tensors, step: int, *, aliases: Mapping[str, str] | None = None) -> Published:
        """Make `tensors` the newest version, `run_id/step`. They are copied where they changed.

        Names are Hugging Face's; `aliases` are the other names of tied weights. The same step with the same bits again
        changes nothing. Raises `StoreError` (the old head stands; publish again) and `Conflict`.
        """
        if step < 0:  # an engine says -1 of weights that are of no version
            raise ConfigError(f"step is {step}; it must be 0 or more")
        with self._publishing:
            return self._publish(tensors, step, aliases)

    def _publish(self, tensors: Tensors, step: int, aliases: Mapping[str, str] | None) -> Published:
        began, aliases = time.perf_counter(), dict(aliases or {})
        if not tensors:
            raise ConfigError("nothing to publish: no tensors were given")
        previous, listing = self._last, listing_of(tensors, aliases)
        base = self._tensors if self._listing is not None and listing.tensors == self._listing.tensors else {}
        packed = pack(self.store, listing, tensors, base, self._digests if base else {}, self._threads)
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
            parent=self.head.newest.manifest if base and self.head is not None else None,
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
        if link.base is None and self.head is not None:  # another layout: nothing leads over from what was before
            chain, shortcuts = (link,), ()
        self._move_head(Head(self.run_id, chain, shortcuts))
        self._last, self._listing, self._digests = manifest, listing, packed.digests
        for entry in packed.entries:
            if entry.name in base and entry.codec != "unchanged":
                np.copyto(base[entry.name].array, tensors[entry.name].array)
        if not base:
            self._tensors = {name: Bits(bits.dtype, bits.array.copy()) for name, bits in tensors.items()}
        done = time.perf_counter()
        elements = sum(bits.array.size for bits in tensors.values())
        worked = encoded_at - began - packed.store_seconds
        compared = min(packed.diff_seconds / self._threads, worked)
        metrics = {
            "sync/wire_bytes": float(link.wire_bytes),
            "sync/ratio": manifest.full_bytes / link.wire_bytes,
            "sync/changed": changed / elements,
            "sync/diff_seconds": compared,
            "sync/encode_seconds": worked - compared,
            "sync/upload_seconds": packed.store_seconds + done - encoded_at,
            "sync/publish_seconds": done - began,
        }
        return Published(manifest, link.manifest, metrics)

    def anchor_due(self) -> bool:
        """Whether a joiner would have more to fetch, or more versions to apply, than a new anchor is worth."""
        head, last = self._standing()
        anchors = [link.sequence for link in (*head.chain, *head.shortcuts) if link.base is None]
        since = [link for link in head.chain if link.sequence > max(anchors, default=-1)]
        return len(since) >= self._anchor_every or sum(link.wire_bytes for link in since) > last.full_bytes

    def anchor(self) -> Published:
        """Store the newest version whole, for joiners; then `collect`."""
        with self._publishing:
            published = self._shortcut({}, None)
            self._collect()
            return published

    def squash(self, base: int) -> Published:
        """One delta from the version of sequence `base` to the newest, for replicas that are far behind."""
        head, _ = self._standing()
        links = [link for link in head.chain if link.sequence == base]
        if not links or base >= head.newest.sequence:
            have = f"{head.chain[0].sequence} to {head.newest.sequence - 1}"
            raise ConfigError(f"no delta can be squashed from sequence {base}; the chain has {have}")
        old, _ = state_at(self.store, self._key, head, base)
        with self._publishing:
            return self._shortcut(old, links[0])

    def squash_for(self, sequence: int) -> bool:
        """For a replica that stands at `sequence`: squash from there, unless that was done. Whether the head has it."""
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
        head, _ = self._standing()
        anchors = sorted({link.sequence for link in (*head.chain, *head.shortcuts) if link.base is None})
        first = anchors[-KEPT_CHAINS:][0]
        chain = tuple(link for link in head.chain if link.sequence >= first)
        shortcuts = tuple(
            link for link in head.shortcuts if link.sequence >= first and (link.base is None or link.base >= first)
        )
        if (chain, shortcuts) != (head.chain, head.shortcuts):
            self._move_head(Head(head.run_id, chain, shortcuts))
        needed = set[bytes]()
        for link in (*chain, *shortcuts):
            needed |= set(self.blobs(link))
        doomed = [blob for blob in self.store.blobs() if blob not in needed]
        for blob in doomed:
            self.store.delete(blob)
        return len(doomed)

    def forget_ways(self) -> None:
        """Leave the newest version in the head, and no way to it: for who hands each way on as it is published."""
        head, _ = self._standing()
        self._move_head(Head(head.run_id, (head.newest,)))

    def blobs(self, link: Link) -> tuple[bytes, ...]:
        """Hashes of all blobs that following the link takes: its manifest, the listing, and the stream's pieces."""
        if link.manifest not in self._blobs:
            manifest = self._manifests.read(link.manifest)
            self._blobs[link.manifest] = (link.manifest, manifest.listing, *manifest.pieces)
        return self._blobs[link.manifest]

    # ---------------------------------------------------------------------------------------------- parts

    def _shortcut(self, base: Tensors, link: Link | None) -> Published:
        """Another way to the newest version: from `link`'s, or from nothing."""
        head, last = self._standing()
        began = time.perf_counter()
        assert self._listing is not None
        packed = pack(self.store, self._listing, self._tensors, base, {}, self._threads)
        manifest = msgspec.structs.replace(
            last,
            parent=None if link is None else link.manifest,
            state_of=head.newest.manifest,
            tensors=packed.entries,
            pieces=packed.pieces,
        )
        made = self._store_manifest(manifest, None if link is None else link.sequence)
        self._move_head(Head(head.run_id, head.chain, (*head.shortcuts, made)))
        metrics = {"sync/wire_bytes": float(made.wire_bytes), "sync/publish_seconds": time.perf_counter() - began}
        return Published(manifest, made.manifest, metrics)

    def _standing(self) -> tuple[Head, Manifest]:
        if self.head is None or self._last is None:
            raise ConfigError("nothing was published yet; publish a version first")
        return self.head, self._last

    def _store_listing(self, listing: Listing) -> tuple[bytes, int]:
        """Its hash; and its bytes, where no version had it before."""
        if listing == self._listing and self._last is not None:
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
            if self.store.latest() != content:  # else an earlier try had come through after all
                raise
        self.head, self._head_bytes = head, content


def state_at(
    store: Store, key: Ed25519PrivateKey, head: Head, sequence: int
) -> tuple[dict[str, Bits], dict[str, bytes]]:
    """The tensors of a version that the head still leads to, rebuilt from the store and checked; and their digests."""
    target = MemoryTarget()
    replica = Replica(store, key.public_key(), target)
    replica.advance_to(sequence, head=head)
    return target.state, dict(replica.digests)
