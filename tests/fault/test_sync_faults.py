"""Weight sync under faults. What must hold: a target that serves a version holds exactly that version's bits, and once
the faults end, everybody comes to the newest one."""

import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from rlloop.errors import SyncError
from rlloop.sync import codec, packing
from rlloop.sync.bits import Bits
from rlloop.sync.manifest import MAGIC, Ed25519PrivateKey, Head, Refused, hash_of
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica, State
from rlloop.sync.store import Conflict, FolderStore, StoreError
from rlloop.sync.target import TORN, MemoryTarget
from tests.support.weight_history import KEY, PUBLIC, history, same


class Fault(SyncError):
    """Error raised by these tests."""


class FaultyStore:
    """A folder behind a line that drops, damages, repeats and goes back, by a seed; `rate` 0 is a good one."""

    def __init__(self, folder: FolderStore, seed: int, rate: float) -> None:
        self.folder, self.rate, self.random = folder, rate, np.random.default_rng(seed)
        self.heads: list[bytes] = []
        self.happened = Counter()
        self.publishes = lambda sequence: False  # asked for one delta of several

    def unlucky(self, what: str) -> bool:
        if self.random.random() >= self.rate:
            return False
        self.happened[what] += 1
        return True

    def latest(self):
        head = self.folder.latest()
        if head is not None and head not in self.heads:
            self.heads.append(head)
        if self.unlucky("head unreachable"):
            raise StoreError("unreachable")
        if head is not None and self.unlucky("head replayed"):
            return self.heads[self.random.integers(len(self.heads))]
        return head

    def get(self, digest, start=0):
        content = b"".join(self.folder.get(digest, start))
        if self.unlucky("blob damaged") and content:
            damaged = bytearray(content)
            damaged[self.random.integers(len(damaged))] ^= 1 << self.random.integers(8)
            content = bytes(damaged)
        if self.unlucky("blob swapped"):
            content = b"".join(self.folder.get(next(self.folder.blobs())))
        if self.unlucky("blob doubled"):
            content += content
        half = len(content) // 2
        yield content[:half]
        if self.unlucky("blob cut"):
            raise StoreError("the line broke")
        yield content[half:]

    def has(self, digest):
        return self.folder.has(digest)

    def put(self, blob):
        if self.unlucky("disk full"):
            raise StoreError("no space left on device")
        return self.folder.put(blob)

    def swap_latest(self, expected, new):
        if self.unlucky("swap failed"):
            raise StoreError("timed out before")
        self.folder.swap_latest(expected, new)
        if self.unlucky("swap unanswered"):
            raise StoreError("timed out after")

    def blobs(self):
        return self.folder.blobs()

    def delete(self, digest):
        self.folder.delete(digest)

    def squash(self, sequence):
        if self.unlucky("squash unheard"):
            raise StoreError("timed out before")
        done = self.publishes(sequence)
        if self.unlucky("squash unanswered"):
            raise StoreError("timed out after")
        return done


class Watched(MemoryTarget):
    """Knows what every version must hold, and looks at itself whenever it serves. Fails on request."""

    def __init__(self, weights, versions) -> None:
        super().__init__({name: Bits(bits.dtype, bits.array.copy()) for name, bits in weights.items()})
        self.versions, self.served = versions, []
        self.fails = lambda: False

    def write(self, name, bits):
        assert self.version == TORN, "written to while it served"
        if self.fails():
            raise Fault("the device failed")
        self.state[name] = Bits(bits.dtype, bits.array.copy())

    def set_version(self, step):
        super().set_version(step)
        if step != TORN:
            self.check()
            self.served.append(step)

    def check(self):
        assert self.version == TORN or same(self.state, self.versions[self.version])


@pytest.mark.parametrize("seed", range(8))
def test_any_faults_in_any_order(tmp_path, seed):
    """Seeds 0 to 7, 120 events each."""
    rng = np.random.default_rng(1000 + seed)
    versions = history(40, seed)
    folder = FolderStore(tmp_path / "store")
    stores = [FaultyStore(folder, 10 * seed + i, 0.08) for i in range(4)]
    published = 0

    def crash(state: State) -> None:
        if rng.random() < 0.06:
            raise Fault(f"crashed in {state}")

    def new_replica(store: FaultyStore) -> Replica:
        target = Watched(versions[0], versions)
        target.fails = lambda: rng.random() < 0.02
        return Replica(store, PUBLIC, target, inject=crash)

    publisher, replicas = None, [new_replica(store) for store in stores[1:]]
    counts = Counter()
    for _ in range(120):
        event = rng.choice(["publish"] * 4 + ["poll"] * 6 + ["restart", "resume", "anchor", "squash", "bit", "litter"])
        counts[event] += 1
        which = rng.integers(len(replicas))
        replica = replicas[which]
        try:
            if publisher is None or event == "resume":
                publisher = Publisher(stores[0], KEY, "run", anchor_every=4)
                for store in stores[1:]:
                    store.publishes = publisher.squash_for
            if event == "publish" and published < 40:
                publisher.publish(versions[published], published)
                published += 1
            elif event == "poll":
                replica.poll()
            elif event == "restart":
                replicas[which] = new_replica(stores[1 + which])
            elif event == "anchor" and publisher.head:
                publisher.anchor()
            elif event == "squash" and publisher.head and len(publisher.head.chain) > 2:
                publisher.squash(publisher.head.chain[-3].sequence)
            elif event == "bit" and replica.ready:  # in the memory of an engine: what it serves is wrong until found
                bits = replica.target.state["model.embed_tokens.weight"]
                bits.array[rng.integers(60), 0] ^= 1
                assert replica.audit() == ["model.embed_tokens.weight"]
                assert not replica.ready
            elif event == "litter":
                folder.put(rng.bytes(100))
        except SyncError as error:
            counts[type(error).__name__] += 1
            if isinstance(error, Conflict) or event in ("publish", "anchor", "squash"):
                publisher = None  # as after a crash
        for each in replicas:
            each.target.check()
    for store in stores:
        store.rate = 0
    publisher = Publisher(stores[0], KEY, "run")
    publisher.publish(versions[published], published)
    for replica in replicas:
        replica._inject, replica.target.fails = None, lambda: False
        if not replica.poll():  # it failed, or had that version from a publication whose answer was lost
            replica.poll()
        assert replica.target.version == published, replica.error
        assert same(replica.target.state, versions[published])
        assert replica.ready
        assert replica.error == ""
    assert counts["SyncError"] + counts["StoreError"] + counts["Refused"] + counts["Fault"] > 0
    assert sum(len(store.happened) for store in stores) > 10, "too few kinds of faults for a test"


# ---------------------------------------------------------------------------------------------------- one at a time


@pytest.fixture
def line(tmp_path):
    """(publisher, replica, target, versions): version 0 is served, version 1 published."""
    versions = history(3)
    store = FolderStore(tmp_path / "store")
    publisher = Publisher(store, KEY, "run")
    publisher.publish(versions[0], 0)
    target = Watched(versions[0], versions)
    replica = Replica(store, PUBLIC, target)
    assert replica.poll()
    publisher.publish(versions[1], 1)
    return publisher, replica, target, versions


@pytest.mark.parametrize("state", [State.fetch, State.stage, State.verify, State.commit])
def test_a_failure_in_any_state_leaves_the_old_version_serving(line, state):
    _, replica, target, versions = line

    def fail(entered: State) -> None:
        if entered is state:
            raise Fault("now")

    replica._inject = fail
    assert not replica.poll()
    assert (replica.state, replica.error, replica.ready, target.version) == (State.error, "now", True, 0)
    assert same(target.state, versions[0])
    replica._inject = None
    assert replica.poll()
    assert target.version == 1


def test_a_commit_that_fails_half_way_serves_nothing_and_is_finished_by_the_next_try(line):
    _, replica, target, versions = line
    writes = iter([False, True, True, False, False, False, False])
    target.fails = lambda: next(writes)
    for _ in range(2):
        assert not replica.poll()
        assert (replica.torn, replica.ready, target.version) == (True, False, TORN)
    target.fails = lambda: False
    assert replica.poll() or replica.ready
    assert same(target.state, versions[1])
    assert target.served == [0, 1]


def test_what_was_written_is_read_back(line):
    _, replica, target, _ = line
    write = target.write
    target.write = lambda name, bits: write(name, Bits(bits.dtype, bits.array ^ 1))
    assert not replica.poll()
    assert "does not hold what was written" in replica.error
    assert target.version == TORN
    target.write = write
    replica.poll()
    assert target.version == 1


def test_live_weights_that_changed_by_themselves_are_found_and_fetched_anew(line):
    publisher, replica, target, versions = line
    target.state["model.layers.0.mlp.up_proj.weight"].array[3, 4] ^= 0x80
    assert not replica.poll()
    assert replica.error == (
        "live weights were altered in memory and are fetched again: model.layers.0.mlp.up_proj.weight"
    )
    assert (replica.ready, target.version) == (False, TORN)
    assert replica.poll()
    assert same(target.state, versions[1])
    publisher.publish(versions[2], 2)
    assert replica.poll()


def test_a_blob_damaged_on_the_disk_is_refused(line):
    publisher, replica, target, _ = line
    for place in (
        replica.store._path_of(publisher.last.pieces[0]),
        replica.store._path_of(publisher.head.newest.manifest),
    ):
        content = place.read_bytes()
        place.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert not replica.poll()
        assert "arrived damaged" in replica.error
        assert target.version == 0
        place.write_bytes(content)
    assert replica.poll()


def replaced(publisher: Publisher, **changes) -> Head:
    """The head with its newest link changed."""
    head = publisher.head
    return msgspec.structs.replace(head, chain=(*head.chain[:-1], msgspec.structs.replace(head.newest, **changes)))


def test_an_old_signed_manifest_is_not_applied_again(line):
    publisher, replica, target, versions = line
    first, second = publisher.head.chain
    replica.poll()
    with pytest.raises(Refused, match="a replay"):
        replica.advance_to(head=replaced(publisher, sequence=2, base=None, manifest=first.manifest))
    with pytest.raises(Refused, match="a replay"):
        replica.advance_to(head=replaced(publisher, sequence=2, base=1, manifest=second.manifest))
    with pytest.raises(Refused, match="older than 1"):
        replica.advance_to(head=Head("run", (first,)))
    assert target.version == 1
    assert same(target.state, versions[1])


def test_versions_that_arrive_out_of_order_or_not_at_all(line):
    publisher, replica, target, versions = line
    publisher.publish(versions[2], 2)
    first, second, third = publisher.head.chain
    with pytest.raises(Refused, match="no route leads"):  # the second was dropped
        replica.advance_to(head=Head("run", (first, third)))
    skipping = msgspec.structs.replace(third, base=0)
    with pytest.raises(Refused, match="does not continue run/0"):
        replica.advance_to(head=Head("run", (first, skipping)))
    assert target.version == 0
    assert replica.advance_to(head=Head("run", (first, second)))
    assert replica.advance_to(head=Head("run", (first, second, second, third)))
    assert target.served == [0, 1, 2]


def signed_by_us(publisher: Publisher, store: FolderStore, **changes) -> Head:
    """A head that leads to a manifest with other content and a good signature."""
    manifest = msgspec.structs.replace(publisher.last, **changes)
    return replaced(publisher, manifest=store.put(manifest.sign(KEY)))


def test_forged_and_oversize_content_is_refused(line):
    publisher, replica, target, _ = line
    store, manifest = replica.store, publisher.last
    other = store.put(manifest.sign(Ed25519PrivateKey.generate()))
    unsigned = store.put(manifest.sign(KEY)[: len(MAGIC)] + bytes(64) + b"x")
    first, rest = manifest.tensors[0], manifest.tensors[1:]
    large = codec.max_encoded(first.dtype, packing.elements(next(packing.groups(manifest.tensors)))) + 1
    moved = [msgspec.structs.replace(entry, start=entry.start + large - first.size) for entry in rest]
    for head, why in (
        (replaced(publisher, manifest=other), "another key"),
        (replaced(publisher, manifest=unsigned), "signature"),
        (signed_by_us(publisher, store, tensors=(msgspec.structs.replace(first, size=large), *moved)), "any encoder"),
        (signed_by_us(publisher, store, parent=None), "is adaptive"),
        (signed_by_us(publisher, store, pieces=(store.put(bytes(9 << 20)),)), "larger than"),
    ):
        with pytest.raises(Refused, match=why):
            replica.advance_to(head=head)
        assert target.version == 0
    assert replica.poll()


# ---------------------------------------------------------------------------------------------------- real processes


def in_a_process(work: str, folder: object) -> list[str]:
    """Runs a function of this file in a process of its own, which may fork and be limited. What it printed."""
    program = f"import sys; sys.path[:0] = {sys.path!r}; from {__name__} import {work}; {work}({str(folder)!r})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def forked(work: Callable[[], object]) -> str:
    """Runs `work` in a copy of this process; how that ended."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    return "killed" if os.WIFSIGNALED(status) else f"ended with {os.WEXITSTATUS(status)}"


def publish_on_a_full_disk(folder: str) -> None:
    publisher = Publisher(FolderStore(folder), KEY, "run")
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    with pytest.raises(StoreError, match="could not be written"):
        publisher.publish(history(2)[2], 2)
    print(len(list(publisher.store.path.rglob("partial_*"))), "left over")


def test_a_full_disk_stops_a_publication_and_nothing_else(line):
    publisher, replica, target, versions = line
    replica.poll()
    head = replica.store.latest()
    assert in_a_process("publish_on_a_full_disk", replica.store.path) == ["0 left over"]
    assert replica.store.latest() == head
    assert not replica.poll()
    publisher.publish(versions[2], 2)
    assert replica.poll()
    assert same(target.state, versions[2])


class Dying(FolderStore):
    """Kills its process before or after the `left`-th half of a write."""

    def __init__(self, path: str, left: int) -> None:
        super().__init__(path)
        self.left = left

    def _write(self, target, content):
        self.step()
        super()._write(target, content)
        self.step()

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def publish_until(folder: str, left: int) -> None:
    versions, publisher = history(6), Publisher(Dying(folder, left), KEY, "run")
    for step in range(0 if publisher.last is None else publisher.last.step + 1, 7):
        publisher.publish(versions[step], step)
        if step == 2:
            publisher.anchor()


def kill_publishers(folder: str) -> None:
    versions, store = history(6), FolderStore(folder)
    target = Watched(versions[0], versions)
    replica = Replica(store, PUBLIC, target)
    for left in (1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 9, 14, 0):
        print(forked(lambda left=left: publish_until(folder, left)))
        replica.poll()
        target.check()
    assert replica.ready
    assert same(target.state, versions[6])
    Publisher(store, KEY, "run").collect()
    assert all(hash_of(b"".join(store.get(blob))) == blob for blob in store.blobs())


def test_kill_9_of_the_publisher_at_any_write(tmp_path):
    """Before and after each file that it writes: 1st, 2nd, ... Every process goes on where the store stands."""
    ended = in_a_process("kill_publishers", tmp_path / "store")
    assert ended.count("killed") >= 8
    assert ended[-1] == "ended with 0"


def kill_replicas(folder: str) -> None:
    def follow(last: State | None) -> None:
        def inject(state: State) -> None:
            if state is last:
                os.kill(os.getpid(), signal.SIGKILL)

        versions = history(1)
        target = MemoryTarget(versions[0])
        assert Replica(FolderStore(folder), PUBLIC, target, inject=inject).poll()
        assert same(target.state, versions[1])

    for last in (State.fetch, State.stage, State.verify, State.commit, None):
        print(forked(lambda last=last: follow(last)))


def test_kill_9_of_a_replica_in_any_state_hurts_nobody_else(line):
    publisher, replica, _, _ = line
    before = {blob: b"".join(replica.store.get(blob)) for blob in replica.store.blobs()}
    assert in_a_process("kill_replicas", replica.store.path) == ["killed"] * 4 + ["ended with 0"]
    assert {blob: b"".join(replica.store.get(blob)) for blob in replica.store.blobs()} == before
    assert replica.poll()
    assert publisher.store.latest() == publisher.head.encode()
