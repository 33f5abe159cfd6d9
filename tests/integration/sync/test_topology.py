"""Versions on their way to many regions: relays of relays, cold regions, versions that overtake each other, routes by
cost."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlloop.sync import manifest, staging, stream
from rlloop.sync.bits import Bits
from rlloop.sync.http import StoreRoutes, relay_app
from rlloop.sync.manifest import Head, Link
from rlloop.sync.publisher import Publisher
from rlloop.sync.relay import CachingStore, Sources
from rlloop.sync.replica import Replica
from rlloop.sync.route import Cost, route
from rlloop.sync.store import FolderStore, HttpStore
from rlloop.sync.target import MemoryTarget
from rlloop.web.server import BackgroundServer, Listen
from tests.support.weight_history import KEY, PUBLIC, history, same


class Counting(FolderStore):
    """Counts what is read, and can keep a reader waiting."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.asked: list[bytes] = []
        self.go, self.arrived = threading.Event(), threading.Event()
        self.go.set()

    def get(self, digest, start=0):
        self.asked.append(digest)
        self.arrived.set()
        self.go.wait()
        yield from super().get(digest, start)


class Line(FolderStore):
    """A folder behind a line over which a few blobs come by themselves, and each other one once a tensor more is
    decoded."""

    by_themselves = 8

    def __init__(self, path) -> None:
        super().__init__(path)
        self.decoded, self.sent = threading.Semaphore(0), itertools.count(1)

    def get(self, digest, start=0):
        if next(self.sent) > self.by_themselves:
            assert self.decoded.acquire(timeout=240), "what has come is not decoded"
        yield from super().get(digest, start)


class Served(MemoryTarget):
    """Knows which versions it served."""

    def __init__(self, weights) -> None:
        super().__init__({name: Bits(bits.dtype, bits.array.copy()) for name, bits in weights.items()})
        self.served = []

    def set_version(self, step):
        super().set_version(step)
        if step >= 0:
            self.served.append(step)


def test_relays_of_relays_bring_each_blob_over_each_line_once(tmp_path):
    """trainer -> relay -> two relays -> three replicas each, all at once."""
    versions = history(3)
    origin = Counting(tmp_path / "origin")
    publisher = Publisher(origin, KEY, "run")
    for step, weights in enumerate(versions):
        publisher.publish(weights, step)
    origin.asked.clear()
    routes = StoreRoutes(origin)
    from starlette.applications import Starlette

    trainer = BackgroundServer(Starlette(routes=routes.routes, exception_handlers=dict(routes.handlers)), Listen())
    servers, stores = [trainer], []
    try:
        url, near = _relay(trainer.url, tmp_path / "near", servers, stores)
        far = [_relay(url, tmp_path / name, servers, stores) for name in ("eu", "us")]
        replicas = [Replica(HttpStore(url), PUBLIC, MemoryTarget()) for url, _ in far for _ in range(3)]
        stores += [replica.store for replica in replicas]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda replica: replica.poll(), replicas)) == [True] * 6
        assert all(same(replica.target.state, versions[3]) for replica in replicas)
        assert len(origin.asked) == len(set(origin.asked)) == near.fetches > 3
        assert [store.fetches for _, store in far] == [near.fetches] * 2
    finally:
        for store in stores:
            store.close()
        for server in reversed(servers):
            server.close()


def _relay(upstream, folder, servers, stores):
    stores.append(HttpStore(upstream))
    store = CachingStore(stores[-1], folder, 1 << 30)
    servers.append(BackgroundServer(relay_app(store), Listen()))
    return servers[-1].url, store


def test_in_a_cold_region_pieces_are_decoded_while_others_are_on_their_way(tmp_path, monkeypatch):
    """A relay with an empty cache and an engine without weights."""
    monkeypatch.setattr(manifest, "PIECE", 1 << 21)  # a tensor's bytes
    monkeypatch.setattr(stream, "PIECE", 1 << 21)
    rng = np.random.default_rng(0)
    first = {f"{i}.weight": Bits("BF16", rng.integers(0, 1 << 16, (1024, 1024), "<u2")) for i in range(12)}
    line = Line(tmp_path / "origin")
    publisher = Publisher(line, KEY, "run")
    publisher.publish(first, 0)
    publisher.publish({name: Bits(bits.dtype, bits.array ^ (rng.random(bits.shape) < 0.01).astype("<u2"))
                       for name, bits in first.items()}, 1)  # fmt: skip
    publisher.anchor()
    target = MemoryTarget()
    replica = Replica(Sources(CachingStore(line, tmp_path / "cold", 1 << 30), line), PUBLIC, target)
    line.sent, stage = itertools.count(1), staging.stage

    def staged(*given):
        made = stage(*given)
        line.decoded.release()
        return made

    monkeypatch.setattr(staging, "stage", staged)
    assert replica.poll(), replica.error
    assert next(line.sent) > line.by_themselves + 6
    assert target.version == 1


def test_publishing_does_not_wait_for_what_is_in_flight_and_what_was_overtaken_is_skipped(tmp_path):
    versions = history(4)
    store = FolderStore(tmp_path / "store")
    publisher = Publisher(store, KEY, "run")
    publisher.publish(versions[0], 0)
    slow, quick = Counting(store.path), FolderStore(store.path)
    targets = [Served(versions[0]), Served(versions[0])]
    lagging, prompt = Replica(slow, PUBLIC, targets[0]), Replica(quick, PUBLIC, targets[1])
    for replica in (lagging, prompt):
        assert replica.poll()
    publisher.publish(versions[1], 1)
    slow.go.clear()
    slow.arrived.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lagging.poll)
        assert slow.arrived.wait(240)  # version 1 is on its way,
        assert prompt.poll()
        for step in (2, 3, 4):  # and three more are published and served elsewhere
            publisher.publish(versions[step], step)
            assert prompt.poll()
        assert not first.done()
        slow.go.set()
        assert first.result(240)
    assert lagging.poll()
    assert targets[0].served == [0, 1, 4]
    assert targets[1].served == [0, 1, 2, 3, 4]
    assert same(targets[0].state, versions[4])


def link(sequence, base, wire_bytes):
    return Link(
        bytes([sequence, 0 if base is None else 1 + base]) * 16, sequence, sequence, base, bytes(32), wire_bytes
    )


CHAIN = tuple(link(sequence, sequence - 1 if sequence else None, 10_000_000) for sequence in range(11))
JUMP, SNAPSHOT = link(10, 0, 60_000_000), link(10, None, 2_000_000_000)
HERE = (0, CHAIN[0].manifest)


def learned(byte, delta, anchor):
    """A cost by seconds of a byte, of a delta's pass over the weights, and of an anchor's byte."""
    cost = Cost()
    cost.learn([link(1, 0, 1000)], {"sync/fetch_seconds": 1000 * byte, "sync/stage_seconds": delta})
    cost.learn([link(1, None, 1000)], {"sync/fetch_seconds": 1000 * byte, "sync/stage_seconds": 300 * anchor})
    cost._anchor = anchor
    return cost


@pytest.mark.parametrize(
    ("shortcuts", "cost", "chosen"),
    [
        ((SNAPSHOT,), Cost(), "chain"),  # nothing is known: the fewest bytes
        ((SNAPSHOT,), learned(1e-6, 0.1, 1e-9), "chain"),  # 1 MB/s: 101 s for the chain, 2,000 for the snapshot
        ((SNAPSHOT,), learned(1e-10, 1.0, 1e-9), "snapshot"),  # 10 GB/s, a second for each pass: 10 s, and 2.2
        ((SNAPSHOT, JUMP), learned(1e-10, 1.0, 1e-9), "jump"),  # one pass: 1 s
        ((SNAPSHOT, JUMP), learned(1e-8, 0.01, 1e-9), "jump"),  # 100 MB/s: 0.6 s, the chain 1.1
        ((JUMP,), learned(1e-8, 0.0, 1e-9), "jump"),
    ],
)
def test_the_route_is_the_cheapest_in_time(shortcuts, cost, chosen):
    head = Head("run", CHAIN, shortcuts)
    taken = route(head, HERE, 10, cost)
    expected = {"chain": list(CHAIN[1:]), "jump": [JUMP], "snapshot": [SNAPSHOT]}[chosen]
    assert taken == expected


def test_a_replica_learns_what_links_take(tmp_path):
    versions = history(3)
    publisher = Publisher(FolderStore(tmp_path), KEY, "run")
    target = MemoryTarget()
    replica = Replica(publisher.store, PUBLIC, target)
    for step, weights in enumerate(versions):
        publisher.publish(weights, step)
        assert replica.poll()
    assert publisher.head is not None
    costs = [replica._cost(each) for each in publisher.head.chain]
    assert all(0 < cost < 10 for cost in costs)  # seconds
    assert publisher.head.newest.wire_bytes > 10
