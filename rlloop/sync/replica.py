"""The engine's end: fetch, stage beside the live weights, verify, and only then commit, in a short pause.

    IDLE -> FETCH -> STAGE -> VERIFY -> COMMIT -> IDLE
               any of them -> ERROR, the old version still serving; the next try begins anew

What fails before COMMIT has touched nothing. A commit that fails half-way leaves the replica `torn`, its target at
version `TORN`, which must not serve, and the next try finishes it, since every write is staged and can be repeated.
Live weights that are found to be no version at all (a bit flipped in memory) are torn, too, and fetched anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rlloop.errors import SyncError
from rlloop.sync import codec
from rlloop.sync.bits import Bits, digest
from rlloop.sync.manifest import MAX_MANIFEST, Entry, Head, Link, Listing, Manifest, Refused, root_hash
from rlloop.sync.packing import elements, groups, unpack
from rlloop.sync.route import match, route
from rlloop.sync.store import Store, fetch
from rlloop.sync.stream import StreamReader
from rlloop.sync.target import TORN, Target, plan_writes

SQUASHED = 4  # versions behind, from which on one delta of them all is asked for


class State(StrEnum):
    idle = "IDLE"
    fetch = "FETCH"
    stage = "STAGE"
    verify = "VERIFY"
    commit = "COMMIT"
    error = "ERROR"


@dataclass(frozen=True)
class Applied:
    """Where a replica stands."""

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
    """A version decoded and verified beside the live weights."""

    applied: Applied  # where the replica stands after its commit
    writes: Mapping[str, Bits]  # live name -> what it gets; changed tensors only
    digests: Mapping[str, bytes]  # of every live tensor afterwards
    metrics: Mapping[str, float]


class Manifests:
    """A store's manifests, each checked; the listing that they share is fetched once."""

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

    `run_id`: the only run whose versions are taken; None: the first that is met. `any_run`: another run may follow it,
    beginning with a whole version. `threads` fetch and decode.
    `inject(state)` is called as each state is entered: tests raise in it.
    """

    def __init__(
        self,
        store: Store,
        public_key: Ed25519PublicKey,
        target: Target,
        *,
        run_id: str | None = None,
        any_run: bool = False,
        threads: int = 1,
        inject: Callable[[State], None] | None = None,
    ) -> None:
        self.store, self.target = store, target
        self.state = State.idle
        self.error = ""  # why, in ERROR
        self.torn = False  # a commit began and did not end
        self.applied: Applied | None = None
        self.metrics: Mapping[str, float] = {}  # sync/* of the last version applied
        self.digests: Mapping[str, bytes] = {}  # of the live tensors
        self.run_id, self.any_run = run_id, any_run  # of what is live, or is to be
        self._threads, self._inject = threads, inject
        self._manifests = Manifests(store, public_key)
        self._staged: Staged | None = None  # what is being committed

    @property
    def ready(self) -> bool:
        """Whether the target holds one whole version and may serve."""
        return self.applied is not None and not self.torn

    def poll(self) -> bool:
        """Look for a newer version and bring it over. Returns whether one was; a failure stands in `error`."""
        with suppress(SyncError):
            return self.advance_to()
        return False

    def advance_to(self, sequence: int | None = None, *, head: Head | None = None) -> bool:
        """Bring over the version of `sequence` (None: the newest). Returns False where it is applied already.

        Intermediate versions are staged, never served. Raises `SyncError`; then `state` is ERROR, and what was served
        before still is unless `torn`.
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
            standing = None if applied is None else (applied.sequence, applied.manifest)
            if standing is None or standing[0] < sequence:
                self.commit(self.stage(self._way(head, standing, sequence)))
        except BaseException as failure:
            doubtful = isinstance(failure, codec.CodecError) or self.state is State.verify
            odd = self.audit() if doubtful and not self.torn else []
            self.state, self.error = State.error, str(failure) or type(failure).__name__
            if odd:
                self.error = f"live weights have changed by themselves, and are fetched anew: {', '.join(odd[:5])}"
            raise
        self.state, self.error = State.idle, ""
        return True

    def stage(self, links: list[Link]) -> Staged:
        """FETCH, STAGE and VERIFY: every link's manifest, then the tensors, while the target serves.

        Raises `Refused`, `StoreError` or `CodecError`; nothing live was touched.
        """
        self._enter(State.fetch)
        began = time.perf_counter()
        manifests, standing = [], self.applied
        for link in links:
            manifest, standing = self._follow(link, standing)
            manifests.append(manifest)
        assert standing is not None, "a way of no links leads nowhere"
        plan = plan_writes(manifests[-1], self.target)
        fetched = time.perf_counter()
        self._enter(State.stage)
        staged: dict[str, Bits] = {}
        reading = 0.0
        for manifest in manifests:
            reading += self._decode(manifest, plan, staged)
        decoded = time.perf_counter()
        self._enter(State.verify)
        digests = self._verify(manifests[-1], plan, staged)
        metrics = {
            "sync/wire_bytes": float(sum(link.wire_bytes for link in links)),
            "sync/fetch_seconds": fetched - began + reading,
            "sync/stage_seconds": decoded - fetched - reading,
            "sync/verify_seconds": time.perf_counter() - decoded,
        }
        writes = {live: staged[name] for name, bits in staged.items() for live in plan[name]}
        changed = {live: bits for live, bits in writes.items() if digests[live] != self.digests.get(live)}
        return Staged(standing, changed, digests, metrics)

    def commit(self, staged: Staged) -> None:
        """COMMIT: pause, copy what changed in place, read it back from the live weights, drop caches, resume."""
        self._enter(State.commit)
        self._staged, asked = staged, time.perf_counter()

        def change() -> float:
            began = time.perf_counter()
            self.torn = True
            self.target.set_version(TORN)
            for name, bits in staged.writes.items():
                self.target.write(name, bits)
            for name in staged.writes:
                live = self.target.read(name)
                if live is None or digest(live.array) != staged.digests[name]:
                    raise SyncError(f"{name} does not hold what was written to it")
            self.target.set_version(staged.applied.step)
            self.torn = False
            return time.perf_counter() - began

        paused = self.target.exclusively(change)
        self.applied, self.digests, self._staged = staged.applied, staged.digests, None
        self.run_id = staged.applied.run_id
        waited = time.perf_counter() - asked - paused
        self.metrics = {**staged.metrics, "sync/pause_seconds": paused, "sync/drain_seconds": waited}
        self.state, self.error = State.idle, ""

    def audit(self) -> list[str]:
        """Names whose live bits are not those of the applied version. With any, the target is torn.

        Called after a verification has failed, since a delta from the wrong bits never fits; call it at leisure, too.
        """
        odd = [name for name, expected in self.digests.items() if self._live_digest(name) != expected]
        if odd:
            self.torn, self.applied, self._staged, self.digests = True, None, None, {}
            self.target.exclusively(lambda: self.target.set_version(TORN))
        return odd

    # ---------------------------------------------------------------------------------------------- parts

    def _read_head(self) -> Head:
        content = self.store.latest()
        if content is None:
            raise Refused("the store has no version yet")
        return Head.decode(content)

    def _way(self, head: Head, standing: tuple[int, bytes] | None, sequence: int) -> list[Link]:
        """The cheapest; where it is a long one, after whoever publishes was asked for a shorter."""
        way = route(head, standing, sequence)
        if standing is None or len(way) < SQUASHED or sequence != head.newest.sequence:
            return way
        with suppress(SyncError):  # the long way is there
            if self.store.squash(standing[0]):
                fresh = self._read_head()
                return route(fresh, standing, max(sequence, fresh.newest.sequence))
        return way

    def _join(self, head: Head) -> None:
        """Where the live weights are a version of the chain already (a model loaded from disk), begin there."""
        layout = self.target.layout()
        if layout is None:
            return
        digests = {name: self._live_digest(name) for name in layout}
        root = root_hash(((name, *kind) for name, kind in layout.items()), digests)
        if (link := match(head, root)) is None:
            return
        manifest = self._manifest(link)
        plan_writes(manifest, self.target)
        if manifest.root == root:  # else the head, which nobody signs, was wrong
            self.digests = digests
            standing = Applied(manifest.run_id, manifest.step, manifest.sequence, link.manifest, manifest.root)
            self.commit(Staged(standing, {}, digests, {}))

    def _live_digest(self, name: str) -> bytes:
        bits = self.target.read(name)
        assert bits is not None, f"{name} is in the layout and cannot be read"
        return digest(bits.array)

    def _manifest(self, link: Link) -> Manifest:
        manifest = self._manifests.read(link.manifest)
        if manifest.sequence != link.sequence:
            raise Refused(f"a manifest of sequence {manifest.sequence} is offered as {link.sequence}: a replay")
        self._check_run(manifest.run_id, f"version {manifest.version} is offered")
        return manifest

    def _check_run(self, run_id: str, what: str) -> None:
        if not self.any_run and self.run_id not in (None, run_id):
            raise Refused(f"{what}, and this engine follows run {self.run_id} alone until it is started anew")

    def _applied_of(self, run_id: str) -> Applied | None:
        """Where the replica stands in a run."""
        return self.applied if self.applied is not None and self.applied.run_id == run_id else None

    def _follow(self, link: Link, standing: Applied | None) -> tuple[Manifest, Applied]:
        """The manifest of `link`, where it may follow `standing`; and where it leads."""
        manifest = self._manifest(link)
        if standing is not None and standing.run_id != manifest.run_id:
            standing = None  # runs have nothing in common but the key
        if standing is not None and manifest.sequence <= standing.sequence:
            raise Refused(f"version {manifest.version} is older than {standing.version}, or the same")
        if manifest.parent is not None and (standing is None or manifest.parent != standing.manifest):
            raise Refused(f"version {manifest.version} does not continue {standing.version if standing else 'nothing'}")
        for entry in manifest.tensors:
            if manifest.parent is None and entry.codec not in ("full", "joined"):
                raise Refused(f"{entry.name} of anchor {manifest.version} is {entry.codec}")
        for first, *rest in groups(manifest.tensors):
            if first.size > codec.max_encoded(first.dtype, elements([first, *rest])):
                raise Refused(f"{first.name} is encoded in {first.size} bytes, more than any encoder makes")
        identity = manifest.state_of or link.manifest
        return manifest, Applied(manifest.run_id, manifest.step, manifest.sequence, identity, manifest.root)

    def _decode(self, manifest: Manifest, plan: Mapping[str, list[str]], staged: dict[str, Bits]) -> float:
        """Bring `staged` to the state of `manifest`. Returns the seconds spent waiting for the store."""

        def one(group: list[Entry], content: bytes) -> list[Bits]:
            olds = [None if group[0].codec == "full" else self._before(entry, plan, staged) for entry in group]
            return unpack(group, content, olds)

        with ThreadPoolExecutor(self._threads) as pool, StreamReader(self.store, manifest) as reader:
            pending: list[tuple[list[Entry], Future[list[Bits]]]] = []
            for group in groups(manifest.tensors):
                content = reader.read(group[0].start, group[0].size)
                pending.append((group, pool.submit(one, group, content)))
            for group, made in pending:
                staged.update(zip((entry.name for entry in group), made.result(), strict=True))
            return reader.seconds

    def _before(self, entry: Entry, plan: Mapping[str, list[str]], staged: Mapping[str, Bits]) -> Bits | None:
        """The tensor that `entry` is a change of: staged by an earlier link, or live."""
        if entry.name not in plan:
            raise Refused(f"{entry.name} is not among the tensors of the version that it leads to")
        return staged.get(entry.name) or self.target.read(plan[entry.name][0])

    def _verify(
        self, manifest: Manifest, plan: Mapping[str, list[str]], staged: Mapping[str, Bits]
    ) -> dict[str, bytes]:
        """Digests of every live tensor after the commit. Raises `Refused` where the state would not be the root's."""
        with ThreadPoolExecutor(self._threads) as pool:
            found = dict(zip(staged, pool.map(lambda name: digest(staged[name].array), staged), strict=True))
        digests: dict[str, bytes] = {}  # by live name
        of_tensors: dict[str, bytes] = {}
        for entry in manifest.tensors:
            for live in plan[entry.name]:
                have = found.get(entry.name) or self.digests.get(live, b"")
                if of_tensors.setdefault(entry.name, have) != have:
                    raise Refused(f"{live} would not be what {manifest.version} says")
                digests[live] = have
        if (
            root_hash(((entry.name, entry.dtype, entry.shape) for entry in manifest.tensors), of_tensors)
            != manifest.root
        ):
            raise Refused(f"the tensors would not be those of {manifest.version}: another root")
        return digests

    def _enter(self, state: State) -> None:
        self.state = state
        if self._inject is not None:
            self._inject(state)
