"""The relay: each blob once over the wide network, whoever asks and whatever the disk does to it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.applications import Starlette

from rlloop.errors import ConfigError
from rlloop.sync.http import StoreRoutes, relay_app
from rlloop.sync.manifest import MAX_MANIFEST, hash_of
from rlloop.sync.publisher import Publisher
from rlloop.sync.relay import CachingStore, Sources
from rlloop.sync.replica import Replica
from rlloop.sync.store import FolderStore, HttpStore, Missing, StoreError, fetch
from rlloop.sync.target import MemoryTarget
from rlloop.web.server import BackgroundServer, Listen
from tests.support.waiting import until
from tests.support.weight_history import KEY, PUBLIC, history, same

TOKEN = "a token of some length"


class Counting(FolderStore):
    """Counts what is read; may break off a transfer, or be out of reach."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.asked: list[tuple[bytes, int]] = []
        self.heads = 0
        self.break_at: int | None = None
        self.gone = False
        self.gate = threading.Event()
        self.gate.set()

    def latest(self):
        self.heads += 1
        self.gate.wait()
        if self.gone:
            raise StoreError("out of reach")
        return super().latest()

    def get(self, digest, start=0):
        self.asked.append((digest, start))
        self.gate.wait()
        if self.gone:
            raise StoreError("out of reach")
        content = b"".join(super().get(digest, start))
        if self.break_at is not None:
            at, self.break_at = self.break_at, None
            yield content[:at]
            raise StoreError("the line broke")
        yield content


@pytest.fixture
def origin(tmp_path) -> Counting:
    return Counting(tmp_path / "origin")


@pytest.fixture
def relay(origin, tmp_path) -> CachingStore:
    return CachingStore(origin, tmp_path / "cache", MAX_MANIFEST)


def whole(store, digest: bytes) -> bytes:
    return b"".join(store.get(digest))


def test_many_who_ask_at_once_cost_one_fetch(origin, relay):
    digest = origin.put(b"weights" * 1000)
    origin.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(whole, relay, digest) for _ in range(8)]
        until(lambda: origin.asked)
        origin.gate.set()
        assert {hash_of(each.result()) for each in asking} == {digest}
    assert origin.asked == [(digest, 0)]
    assert whole(relay, digest) == b"weights" * 1000
    assert (relay.fetches, relay.fetched_bytes, len(origin.asked)) == (1, 7000, 1)


def test_a_transfer_that_breaks_goes_on_where_it_broke(origin, relay):
    digest = origin.put(bytes(range(256)) * 100)
    origin.break_at = 10_000
    assert hash_of(whole(relay, digest)) == digest
    assert origin.asked == [(digest, 0), (digest, 10_000)]


def test_a_bit_that_flipped_in_the_cache_costs_a_fetch_and_reaches_nobody(origin, relay):
    digest = origin.put(b"weights" * 1000)
    whole(relay, digest)
    file = next(relay._disk.path.glob("blobs/??/*"))
    damaged = bytearray(file.read_bytes())
    damaged[1234] ^= 4
    file.write_bytes(damaged)
    assert whole(relay, digest) == b"weights" * 1000
    assert (relay.damaged, relay.fetches) == (1, 2)


def test_the_cache_is_bounded_and_the_least_used_goes_first(origin, tmp_path):
    size = MAX_MANIFEST // 4
    digests = [origin.put(bytes([i]) * size) for i in range(5)]
    relay = CachingStore(origin, tmp_path / "cache", MAX_MANIFEST)
    for digest in digests[:4]:
        whole(relay, digest)
    whole(relay, digests[0])
    whole(relay, digests[4])
    held = set(FolderStore(tmp_path / "cache").blobs())
    assert held == {digests[i] for i in (0, 2, 3, 4)}
    again = CachingStore(origin, tmp_path / "cache", MAX_MANIFEST)  # a restarted relay has what it had
    origin.gone = True
    assert hash_of(whole(again, digests[0])) == digests[0]
    with pytest.raises(ConfigError, match="must have at least"):
        CachingStore(origin, tmp_path / "small", 1000)


def test_a_store_out_of_reach_is_not_hidden(origin, relay):
    digest = origin.put(b"weights")
    origin.swap_latest(None, b"head 1")
    assert relay.latest() == b"head 1"
    origin.swap_latest(b"head 1", b"head 2")
    assert relay.latest() == b"head 2"
    origin.gone = True
    with pytest.raises(StoreError):
        relay.latest()
    with pytest.raises(StoreError):
        whole(relay, digest)
    origin.gone = False
    assert whole(relay, digest) == b"weights"


def test_over_http_with_ranges_tags_and_the_token(origin, relay):
    digest = origin.put(bytes(range(200)))
    server = BackgroundServer(relay_app(relay), Listen(token=TOKEN))
    store = HttpStore(server.url, token=TOKEN)
    assert store.latest() is None
    origin.swap_latest(None, b"a head")
    assert store.latest() == store.latest() == b"a head"
    assert fetch(store, digest, 200, limit=1000) == bytes(range(200))
    assert b"".join(store.get(digest, 150)) == bytes(range(150, 200))
    assert b"".join(store.get(digest, 200)) == b""
    assert (store.has(digest), store.has(bytes(32))) == (True, False)
    with pytest.raises(Missing):
        whole(store, bytes(32))
    for path in ("/latest", f"/blobs/{digest.hex()}", "/health", "/metrics", "/blobs/../latest"):
        assert httpx.get(server.url + path, trust_env=False).status_code == 401
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as client:
        assert client.get("/blobs/no").status_code == 404
        tag = client.get("/latest").headers["etag"]
        assert client.get("/latest", headers={"If-None-Match": tag}).status_code == 304
        assert client.get("/health").json()["fetches"] == 1
        assert "rlloop_relay_fetched_bytes 200.0" in client.get("/metrics").text
        origin.gone = True
        assert client.get("/latest").status_code == 502
    store._client.close()
    server.close()


class Liar(FolderStore):
    """A relay that gives out other bytes."""

    def get(self, digest, start=0):
        yield b"something else"[start:]


def test_past_a_relay_that_lies_or_is_gone_the_store_itself_is_read(origin, tmp_path):
    digest = origin.put(b"weights")
    origin.swap_latest(None, b"head")
    liar = Liar(tmp_path / "liar")
    assert fetch(Sources(liar, origin), digest, limit=100) == b"weights"
    assert Sources(liar, origin).latest() == b"head"  # of which the relay says that there is none,
    liar.swap_latest(None, b"no head")
    assert Sources(liar, origin).latest() == b"head"  # or another
    gone = Counting(tmp_path / "gone")
    gone.gone = True
    sources = Sources(gone, origin)
    assert sources.latest() == b"head"
    assert fetch(sources, digest, limit=100) == b"weights"


def test_a_replica_that_lags_asks_for_one_delta_through_its_relay(tmp_path):
    versions = history(9)
    publisher = Publisher(FolderStore(tmp_path / "store"), KEY, "run")
    publisher.publish(versions[0], 0)
    assert publisher.head is not None
    served = StoreRoutes(publisher.store, publisher.squash_for)
    trainer = BackgroundServer(Starlette(routes=served.routes), Listen())
    upstream, direct = HttpStore(trainer.url), HttpStore(trainer.url)
    relay = BackgroundServer(relay_app(CachingStore(upstream, tmp_path / "cache", MAX_MANIFEST)), Listen())
    near = HttpStore(relay.url)
    target = MemoryTarget()
    replica = Replica(Sources(near, direct), PUBLIC, target)
    assert replica.poll()
    for step in (1, 2, 3):
        publisher.publish(versions[step], step)
    assert replica.poll()  # three behind: as they come
    assert publisher.head.shortcuts == ()
    for step in (4, 5, 6, 7):
        publisher.publish(versions[step], step)
    chain = sum(link.wire_bytes for link in publisher.head.chain[4:])
    assert replica.poll()
    [squashed] = publisher.head.shortcuts
    assert (squashed.base, squashed.sequence) == (3, 7)
    assert replica.metrics["sync/wire_bytes"] == squashed.wire_bytes < chain
    assert same(target.state, versions[7])
    publisher.publish(versions[8], 8)
    assert replica.poll()
    assert same(target.state, versions[8])
    assert not publisher.squash_for(8)
    assert not publisher.squash_for(99)
    for each in (near, direct, upstream, relay, trainer):
        each.close()


def test_where_nobody_squashes_the_chain_is_followed(tmp_path):
    versions = history(5)
    store = FolderStore(tmp_path / "store")
    publisher, target = Publisher(store, KEY, "run"), MemoryTarget()
    publisher.publish(versions[0], 0)
    assert publisher.head is not None
    server = BackgroundServer(Starlette(routes=StoreRoutes(store).routes), Listen())
    reading = HttpStore(server.url)
    replica = Replica(reading, PUBLIC, target)
    assert replica.poll()
    for step in (1, 2, 3, 4, 5):
        publisher.publish(versions[step], step)
    assert replica.poll()
    assert same(target.state, versions[5])
    assert publisher.head.shortcuts == ()
    reading.close()
    server.close()
