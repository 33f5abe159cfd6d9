"""Brings an engine's weights to a version: fetch, stage beside the live weights, verify, then commit in a short pause.

    IDLE -> FETCH -> STAGE -> VERIFY -> COMMIT -> IDLE
               any of them -> ERROR, with the old version still serving; the next attempt starts over

A failure before COMMIT leaves the live weights untouched. A commit that fails half-way leaves the replica `torn`: its
target has version `TORN`, from which nothing may be sampled, until the next attempt repeats the staged writes. Live
weights that match no version (a bit flipped in memory) are torn as well, and are fetched again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rlloop.errors import SyncError
from rlloop.sync import codec, staging
from rlloop.sync.bits import Bits, digests, processors
from rlloop.sync.manifest import MAX_MANIFEST, Entry, Head, Link, Listing, Manifest, Refused, root_hash
from rlloop.sync.packing import elements, groups
from rlloop.sync.route import Cost, match, route
from rlloop.sync.steps import Patch
from rlloop.sync.store import Store, fetch
from rlloop.sync.stream import StreamReader
from rlloop.sync.target import TORN, Target, plan_writes

SHARED = 1 << 22  # bytes; hashing fewer takes no longer than starting threads
SQUASHED = 4  # a replica this many versions behind asks the publisher for one delta over them all


class State(StrEnum):
    idle = "IDLE"
    fetch = "FETCH"
    stage = "STAGE"
    verify = "VERIFY"
    commit = "COMMIT"
    error = "ERROR"


@dataclass(frozen=True)
class Applied:
    """The version that a replica has applied."""

    run_id: str
    step: int
    sequence: int
    manifest: bytes  # the hash of the version's identity
    root: bytes

    @property
    def version(self) -> str:
        return f"{self.run_id}/{self.step}"


@dataclass(frozen=True)
class Staged:
    """A version that is decoded and verified beside the live weights."""

    applied: Applied  # the version after the commit
    writes: Mapping[str, Bits | Patch]  # live name -> new bits, or what changes in them; changed tensors only
    digests: Mapping[str, bytes]  # of every live tensor after the commit
    metrics: Mapping[str, float]  # sync/*


class Manifests:
    """Fetches and verifies a store's manifests. The listing that they share is fetched once."""

    def __init__(self, store: Store, public_key: Ed25519PublicKey) -> None:
        self._store, self._key = store, public_key
        self._known: tuple[bytes, Listing] | None = None  # the last one

    def read(self, manifest: bytes) -> Manifest:
        """Raises `Refused` or `StoreError`."""
        return Manifest.verify(fetch(self._store, manifest, limit=MAX_MANIFEST), self._key, self.listing_of)

    def listing_of(self, listing: bytes) -> Listing:
        if self._known is None or self._known[0] != listing:
            self._known = listing, Listing.decode(fetch(self._store, listing, limit=MAX_MANIFEST))
        return self._known[1]


class Replica:
    """Brings `target` from version to version. One caller at a time.

    `run_id`: the only run whose versions are accepted; None: the first one seen. `any_run`: accept a later run as well,
    starting with a whole version. `threads`: number that decode and hash; None: one for each processor.
    `inject(state)`: called on entering each state; tests raise errors in it.
    """

    def __init__(
        self,
        store: Store,
        public_key: Ed25519PublicKey,
        target: Target,
        *,
        run_id: str | None = None,
        any_run: bool = False,
        threads: int | None = None,
        inject: Callable[[State], None] | None = None,
    ) -> None:
        self.store, self.target = store, target
        self.state = State.idle
        self.error = ""  # the reason for ERROR
        self.torn = False  # a commit began and has not ended
        self.applied: Applied | None = None
        self.metrics: Mapping[str, float] = {}  # sync/* of the last version applied
        self.digests: Mapping[str, bytes] = {}  # live name -> digest
        self.run_id, self.any_run = run_id, any_run  # the run of the live weights, or the one to follow
        self._threads, self._inject = threads or processors(), inject
        self._manifests = Manifests(store, public_key)
        self._cost = Cost()
        self._staged: Staged | None = None  # set during a commit, and after one that failed

    @property
    def ready(self) -> bool:
        """True if the target holds one whole version, so that it may serve."""
        return self.applied is not None and not self.torn

    def poll(self) -> bool:
        """Apply the newest version. Returns True if it was new; on failure False, with the reason in `error`."""
        with suppress(SyncError):
            return self.advance_to()
        return False

    def advance_to(self, sequence: int | None = None, *, head: Head | None = None) -> bool:
        """Apply the version of `sequence` (None: the newest). Returns False if it is applied already.

        Intermediate versions are staged, never served. Raises `SyncError`; then `state` is ERROR, and the old version
        goes on serving unless `torn`.
        """
        try:
            head = head or self._read_head()
            self._check_run(head.run_id, f"the store has run {head.run_id}")
            sequence = head.newest.sequence if sequence is None else sequence
            if self.torn and self._staged is not None:
                self.commit(self._staged)
            applied = self._applied_of(head.run_id)
            if applied is not None and applied.sequence == sequence:
                self.state = State.idle
                return False
            if applied is not None and applied.sequence > sequence:
                raise Refused(f"sequence {sequence} is older than {applied.sequence}, which is applied")
            if applied is None:
                self._join(head)
                applied = self._applied_of(head.run_id)
            position = None if applied is None else (applied.sequence, applied.manifest)
            if position is None or position[0] < sequence:
                links = self._route(head, position, sequence)
                staged = self.stage(links)
                self._cost.learn(links, staged.metrics)
                self.commit(staged)
        except BaseException as failure:
            suspect = isinstance(failure, codec.CodecError) or self.state is State.verify
            altered = self.audit() if suspect and not self.torn else []
            self.state, self.error = State.error, str(failure) or type(failure).__name__
            if altered:
                self.error = f"live weights were altered in memory and are fetched again: {', '.join(altered[:5])}"
            raise
        self.state, self.error = State.idle, ""
        return True

    def stage(self, links: list[Link]) -> Staged:
        """FETCH, STAGE and VERIFY every link's manifest and tensors, while the target goes on serving.

        Raises `Refused`, `StoreError` or `CodecError`, with the live weights untouched.
        """
        self._enter(State.fetch)
        began = time.perf_counter()
        manifests, applied = [], self.applied
        for link in links:
            manifest, applied = self._follow(link, applied)
            manifests.append(manifest)
        assert applied is not None, "a route has at least one link"
        plan = plan_writes(manifests[-1], self.target)
        fetched = time.perf_counter()
        self._enter(State.stage)
        staged: dict[str, staging.Staged] = {}
        reading = 0.0
        for manifest in manifests:
            reading += self._decode(manifest, plan, staged, hashes=manifest is manifests[-1])
        decoded = time.perf_counter()
        self._enter(State.verify)
        verified = self._verify(manifests[-1], plan, staged)
        metrics = {
            "sync/wire_bytes": float(sum(link.wire_bytes for link in links)),
            "sync/fetch_seconds": fetched - began + reading,
            "sync/stage_seconds": decoded - fetched - reading,
            "sync/verify_seconds": time.perf_counter() - decoded,
        }
        writes = {live: new.change for name, new in staged.items() for live in plan[name]}
        changed = {live: new for live, new in writes.items() if verified[live] != self.digests.get(live)}
        return Staged(applied, changed, verified, metrics)

    def commit(self, staged: Staged) -> None:
        """COMMIT: pause, write the changed tensors in place, read them back and verify, drop caches, resume."""
        self._enter(State.commit)
        self._staged = staged
        patches = {name: new for name, new in staged.writes.items() if isinstance(new, Patch)}
        threads = self._threads_for(patch.places for patch in patches.values())
        put = self.target.prepare(patches, threads)
        asked = time.perf_counter()

        def change() -> float:
            began = time.perf_counter()
            again, self.torn = self.torn, True
            self.target.set_version(TORN)
            self._write(staged, put, again)
            self.run_id = staged.applied.run_id  # before its number, which may be the former run's as well
            self.target.set_version(staged.applied.step)
            self.torn = False
            return time.perf_counter() - began

        paused = self.target.exclusively(change)
        self.applied, self.digests, self._staged = staged.applied, staged.digests, None
        waited = time.perf_counter() - asked - paused
        self.metrics = {**staged.metrics, "sync/pause_seconds": paused, "sync/drain_seconds": waited}
        self.state, self.error = State.idle, ""

    def audit(self) -> list[str]:
        """Names of live tensors whose bits are not those of the applied version. If there are any, the target is torn.

        Runs after a failed verification, since a delta from wrong bits never verifies. May be called at any other time.
        """
        live_digests = digests(self.digests, self._live, self._threads)
        altered = [name for name, expected in self.digests.items() if live_digests[name] != expected]
        if altered:
            self.torn, self.applied, self._staged, self.digests = True, None, None, {}
            self.target.exclusively(lambda: self.target.set_version(TORN))
        return altered

    # ---------------------------------------------------------------------------------------------- internals

    def _read_head(self) -> Head:
        content = self.store.latest()
        if content is None:
            raise Refused("the store has no version yet")
        return Head.decode(content)

    def _route(self, head: Head, position: tuple[int, bytes] | None, sequence: int) -> list[Link]:
        """The cheapest route. If it is long, the publisher is asked for a squashed delta first."""
        links = route(head, position, sequence, self._cost)
        if position is None or len(links) < SQUASHED or sequence != head.newest.sequence:
            return links
        with suppress(SyncError):  # the long route remains
            if self.store.squash(position[0]):
                fresh = self._read_head()
                return route(fresh, position, max(sequence, fresh.newest.sequence), self._cost)
        return links

    def _join(self, head: Head) -> None:
        """Begin at the live weights if they are already a version of the chain (a model loaded from disk)."""
        layout = self.target.layout()
        if layout is None:
            return
        live_digests = digests(layout, self._live, self._threads)
        root = root_hash(((name, *kind) for name, kind in layout.items()), live_digests)
        if (link := match(head, root)) is None:
            return
        manifest = self._manifest(link)
        plan_writes(manifest, self.target)
        if manifest.root == root:  # the head is not signed, so its roots prove nothing
            self.digests = live_digests
            applied = Applied(manifest.run_id, manifest.step, manifest.sequence, link.manifest, manifest.root)
            self.commit(Staged(applied, {}, live_digests, {}))

    def _write(self, staged: Staged, put: Callable[[], list[str]], again: bool) -> None:
        """Write a version's changes and verify them in memory: whole tensors by digest, patched ones (`put` writes
        those) by their changes.

        `again`, after a commit that failed: all of them by digest, and if one is wrong, the version is fetched whole.
        """
        whole = {name: new for name, new in staged.writes.items() if not isinstance(new, Patch)}
        for name, bits in whole.items():
            self.target.write(name, bits)
        live_digests = digests(whole, self._live, self._threads_for(whole.values()))
        wrong = [name for name, digest in live_digests.items() if digest != staged.digests[name]]
        wrong += put()
        if again and not wrong:
            patched = staged.writes.keys() - whole.keys()
            live_digests = digests(patched, self._live, self._threads)
            wrong = [name for name, digest in live_digests.items() if digest != staged.digests[name]]
            if wrong:
                self.applied, self._staged, self.digests = None, None, {}
        if wrong:
            raise SyncError(f"{wrong[0]} does not hold what was written to it")

    def _threads_for(self, each: Iterable[Bits | np.ndarray]) -> int:
        return self._threads if sum(one.nbytes for one in each) > SHARED else 1

    def _live(self, name: str) -> Bits:
        bits = self.target.read(name)
        assert bits is not None, f"{name} is in the layout and cannot be read"
        return bits

    def _manifest(self, link: Link) -> Manifest:
        manifest = self._manifests.read(link.manifest)
        if manifest.sequence != link.sequence:
            raise Refused(f"the head lists a manifest of sequence {manifest.sequence} as {link.sequence}: a replay")
        self._check_run(manifest.run_id, f"version {manifest.version} is offered")
        return manifest

    def _check_run(self, run_id: str, what: str) -> None:
        if not self.any_run and self.run_id not in (None, run_id):
            raise Refused(f"{what}, and this engine follows run {self.run_id} alone until it is started anew")

    def _applied_of(self, run_id: str) -> Applied | None:
        """The applied version, if it is of this run."""
        return self.applied if self.applied is not None and self.applied.run_id == run_id else None

    def _follow(self, link: Link, applied: Applied | None) -> tuple[Manifest, Applied]:
        """The manifest of `link`, and the version applied after it. Raises `Refused` if it cannot follow `applied`."""
        manifest = self._manifest(link)
        if applied is not None and applied.run_id != manifest.run_id:
            applied = None  # another run's sequences and hashes do not compare with this one's
        if applied is not None and manifest.sequence <= applied.sequence:
            raise Refused(f"version {manifest.version} is older than {applied.version}, or the same")
        if manifest.parent is not None and (applied is None or manifest.parent != applied.manifest):
            raise Refused(f"version {manifest.version} does not continue {applied.version if applied else 'nothing'}")
        for entry in manifest.tensors:
            if manifest.parent is None and entry.codec not in (*codec.WHOLE, "joined"):
                raise Refused(f"{entry.name} of anchor {manifest.version} is {entry.codec}")
        for first, *rest in groups(manifest.tensors):
            if first.size > codec.max_encoded(first.dtype, elements([first, *rest])):
                raise Refused(f"{first.name} is encoded in {first.size} bytes, more than any encoder makes")
        identity = manifest.state_of or link.manifest
        return manifest, Applied(manifest.run_id, manifest.step, manifest.sequence, identity, manifest.root)

    def _decode(
        self, manifest: Manifest, plan: Mapping[str, list[str]], staged: dict[str, staging.Staged], hashes: bool
    ) -> float:
        """Decode `manifest`'s changes into `staged`. Returns the seconds spent waiting for the store. `hashes`: no more
        changes come after these, so a device hashes what is staged at once."""

        def stage(begun: staging.Begun) -> list[staging.Staged]:
            whole = begun.group[0].codec in codec.WHOLE
            olds = [None if whole else self._before(entry, plan, staged) for entry in begun.group]
            return [
                staging.on_top(new, old) if old is not None and entry.name in staged else new
                for entry, old, new in zip(begun.group, olds, staging.stage(*begun, olds), strict=True)
            ]

        known = next((self.target.read(live) for live, *_ in plan.values()), None)
        with ThreadPoolExecutor(self._threads) as pool, StreamReader(self.store, manifest) as reader:
            begun = (
                staging.begin(group, reader.read(group[0].start, group[0].size), pool)
                for group in groups(manifest.tensors)
            )
            on_host = known is None or isinstance(known, Bits)
            named = staging.on_host(begun, stage, pool) if on_host else staging.on_device(begun, stage)
            staged.update(staging.hashed(named, lambda name: self._live(plan[name][0])) if hashes else named)
            return reader.seconds

    def _before(self, entry: Entry, plan: Mapping[str, list[str]], staged: Mapping[str, staging.Staged]) -> Bits | None:
        """The tensor that `entry` is a delta from: live, or staged by an earlier link, then in memory of its own."""
        if entry.name not in plan:
            raise Refused(f"{entry.name} is not among the tensors of the version that it leads to")
        live, earlier = plan[entry.name][0], staged.get(entry.name)
        if earlier is None:
            return self.target.read(live)
        return (
            staging.patched(self._live(live), earlier.change) if isinstance(earlier.change, Patch) else earlier.change
        )

    def _verify(
        self, manifest: Manifest, plan: Mapping[str, list[str]], staged: Mapping[str, staging.Staged]
    ) -> dict[str, bytes]:
        """Digests of every live tensor after the commit. Raises `Refused` if the state's root is not the manifest's."""
        # Some tensors were changed by links before the last one alone.
        complete = dict(staging.hashed(staged.items(), lambda name: self._live(plan[name][0])))
        staged_digests = {name: new.digest for name, new in complete.items() if new.digest is not None}
        whole: Any = {name: new.change for name, new in complete.items() if new.digest is None}
        staged_digests |= digests(whole, whole.__getitem__, self._threads_for(whole.values()))
        of_live: dict[str, bytes] = {}  # by live name
        of_tensors: dict[str, bytes] = {}
        for entry in manifest.tensors:
            for live in plan[entry.name]:
                new = staged_digests.get(entry.name) or self.digests.get(live, b"")
                if of_tensors.setdefault(entry.name, new) != new:
                    raise Refused(f"{live} would not have the bits of {manifest.version}")
                of_live[live] = new
        if (
            root_hash(((entry.name, entry.dtype, entry.shape) for entry in manifest.tensors), of_tensors)
            != manifest.root
        ):
            raise Refused(f"the tensors would not be those of {manifest.version}: they have another root")
        return of_live

    def _enter(self, state: State) -> None:
        self.state = state
        if self._inject is not None:
            self._inject(state)
