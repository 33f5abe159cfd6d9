import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from rlloop.errors import ConfigError
from rlloop.sync import store as stores
from rlloop.sync.manifest import MAX_HEAD, Refused, hash_of
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica
from rlloop.sync.store import Conflict, FolderStore, FsspecStore, HttpStore, Missing, Store, StoreError, fetch
from rlloop.sync.target import MemoryTarget
from tests.support.weight_history import KEY, PUBLIC, history, same

BLOB = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8).tobytes()


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Options for s3fs of a real S3 server in this process, with a bucket."""
    import logging

    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "key", "secret": "secret", "endpoint_url": f"http://{host}:{port}"}
    s3fs.S3FileSystem(**options).mkdir("bucket")
    yield options
    server.stop()


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def make(request, tmp_path):
    """Opens one store, again and again."""
    name = uuid4().hex
    if request.param == "folder":
        return lambda: stores.open_store(str(tmp_path / "store"))
    if request.param == "file":
        return lambda: stores.open_store(f"file://{tmp_path}/store")
    if request.param == "memory":
        return lambda: stores.open_store(f"memory://{name}")
    options = request.getfixturevalue("s3")
    return lambda: stores.open_store(f"s3://bucket/{name}", **options)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:s3cret@bucket/p", "s3://key:s3/cret@bucket", "simplecache::s3://k:s3cret@b", "sftp://me:s3cret@host/p",
        "sftp://me%3As3cret@host/p", "sftp://me@s3cret@host/p", "https://s3cret@host/p", "HTTP://s3cret@host",
    ],
)  # fmt: skip
def test_a_login_in_a_runs_store_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match=r"fleet.store has a login .*AWS_ACCESS_KEY_ID") as refused:
        stores.check_store(url)
    assert "cret" not in str(refused.value)
    names = "abfs://container@account.dfs.core.windows.net/p", "sftp://me@host:22/p", "hdfs://me.too@host/p"
    for good in ("s3://bucket/me@here", "folder/me@here", *names):
        stores.check_store(good)


def test_blobs(make):
    store: Store = make()
    assert list(store.blobs()) == []
    digest = store.put(BLOB)
    assert digest == hash_of(BLOB) == store.put(BLOB)
    other = make()
    assert other.has(digest)
    assert b"".join(other.get(digest)) == BLOB
    assert b"".join(other.get(digest, 2_999_990)) == BLOB[2_999_990:]
    assert list(other.blobs()) == [digest]
    other.delete(digest)
    assert not store.has(digest)
    with pytest.raises(Missing):
        b"".join(store.get(digest))


def test_head_moves_by_compare_and_swap(make):
    first, second = make(), make()
    assert first.latest() is None
    first.swap_latest(None, b"one")
    with pytest.raises(Conflict):
        second.swap_latest(None, b"uno")
    assert second.latest() == b"one"
    second.swap_latest(b"one", b"two")
    with pytest.raises(Conflict):
        first.swap_latest(b"one", b"deux")
    for number in range(5):
        first.swap_latest(first.latest(), b"%d" % number)
    assert second.latest() == b"4"


def test_of_many_who_swap_at_once_one_wins(make):
    make().swap_latest(None, b"start")
    won, barrier = [], threading.Barrier(6)

    def swap(who: int) -> None:
        store = make()
        barrier.wait()
        try:
            store.swap_latest(b"start", b"%d" % who)
            won.append(b"%d" % who)
        except Conflict:
            pass

    threads = [threading.Thread(target=swap, args=(who,)) for who in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [make().latest()] == won


def test_publishers_and_replicas_over_it(make):
    versions = history(4)
    publisher, target = Publisher(make(), KEY, "run"), MemoryTarget()
    replica = Replica(make(), PUBLIC, target)
    for step in (0, 1):
        publisher.publish(versions[step], step)
        assert replica.poll(), replica.error
    publisher = Publisher(make(), KEY, "run")  # goes on where the store stands
    publisher.publish(versions[2], 2)
    publisher.publish(versions[3], 3)
    publisher.squash(1)
    assert replica.poll(), replica.error
    assert same(target.state, versions[3])
    publisher.anchor()
    publisher.publish(versions[4], 4)
    publisher.collect()
    joiner = MemoryTarget()
    for late, where in ((replica, target), (Replica(make(), PUBLIC, joiner), joiner)):
        assert late.poll(), late.error
        assert same(where.state, versions[4])


def test_a_store_that_cannot_be_reached_is_a_store_error(s3):
    with socket.socket() as taken:  # bound, not listening
        taken.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with HttpStore(place) as store, pytest.raises(StoreError):
            store.latest()
        unreachable = FsspecStore("s3://bucket/x", key="k", secret="s", endpoint_url=place,
                                  config_kwargs={"retries": {"max_attempts": 1}})  # fmt: skip
        with pytest.raises(StoreError):
            unreachable.put(b"x")


def test_a_folder_that_cannot_be_written_is_a_store_error(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreError):
        FolderStore(tmp_path / "store").put(b"x")
    for path in (tmp_path / "store", tmp_path / "store" / "below"):
        with pytest.raises(StoreError):
            FolderStore(path).latest()
        with pytest.raises(StoreError):
            FolderStore(path).swap_latest(None, b"head")


def test_unknown_file_systems_are_refused():
    with pytest.raises(ConfigError, match="nothing://x"):
        stores.open_store("nothing://x")
    with pytest.raises(ConfigError, match="write http://trainer:7000"):
        stores.open_store("trainer:7000")


# ---------------------------------------------------------------------------------------------------- over HTTP


@contextmanager
def served(folder: Path, *, breaks: int | None = None, damage: int = 0, ranges: bool = True) -> Iterator[tuple]:
    """(url, requests) of a server over a FolderStore: it hangs up after `breaks` bytes of a blob, and damages the first
    `damage` answers."""
    store, asked = FolderStore(folder), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            found = store.has(bytes.fromhex(self.path.rpartition("/")[2]))
            self.send_response(200 if found else 404)
            self.end_headers()

        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("Range"), self.headers.get("If-None-Match")))
            if self.path == "/latest":
                self._head(store.latest())
                return
            try:
                content = b"".join(store.get(bytes.fromhex(self.path.rpartition("/")[2])))
            except Missing:
                self._answer(404, b"")
                return
            wanted = self.headers.get("Range")
            start = int(wanted[6:-1]) if wanted and ranges else 0
            if start >= len(content):
                self._answer(416, b"")
                return
            content = content[start:]
            if sum(path == self.path for path, *_ in asked) <= damage:
                content = bytes([content[0] ^ 1]) + content[1:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:breaks])
            if breaks is not None and len(content) > breaks:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        def _head(self, content: bytes | None) -> None:
            tag = f'"{hash_of(content or b"").hex()}"'
            if content is None:
                self._answer(404, b"")
            elif self.headers.get("If-None-Match") == tag:
                self.send_response(304)
                self.end_headers()
            else:
                self._answer(200, content, ETag=tag)

        def _answer(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_http_reads_the_head_once_while_it_stays(tmp_path):
    folder = FolderStore(tmp_path)
    with served(tmp_path) as (url, asked), HttpStore(url) as store:
        assert store.latest() is None
        folder.swap_latest(None, b"one")
        assert store.latest() == store.latest() == b"one"
        assert [tag is not None for _, _, tag in asked] == [False, False, True]
        folder.swap_latest(b"one", b"two")
        assert store.latest() == b"two"
        folder.swap_latest(b"two", bytes(MAX_HEAD + 1))
        with pytest.raises(Refused, match="larger"):
            store.latest()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_transfer_that_breaks_goes_on_where_it_broke(tmp_path, ranges):
    digest = FolderStore(tmp_path).put(BLOB)
    with served(tmp_path, breaks=1_100_000 if ranges else None, ranges=ranges) as (url, asked), HttpStore(url) as store:
        assert store.has(digest)
        assert not store.has(hash_of(b"another"))
        if ranges:
            assert fetch(store, digest, len(BLOB), limit=len(BLOB)) == BLOB
            starts = [int(given[6:-1]) for _, given, _ in asked if given]
            assert len(asked) == 3
            assert 0 < starts[0] < starts[1]
        else:  # a server without ranges sends it all again
            assert b"".join(store.get(digest, 17)) == BLOB[17:]
        with pytest.raises(Missing):
            fetch(store, hash_of(b"another"), limit=10)


def test_damage_is_fetched_again_and_then_refused(tmp_path):
    digest = FolderStore(tmp_path).put(BLOB)
    with served(tmp_path, damage=2) as (url, asked), HttpStore(url) as store:
        assert fetch(store, digest, limit=len(BLOB)) == BLOB
        assert len(asked) == 3
    with served(tmp_path, damage=9) as (url, _), HttpStore(url) as store, pytest.raises(Refused, match="damaged"):
        fetch(store, digest, limit=len(BLOB))


def test_more_bytes_than_announced_are_not_read(tmp_path):
    digest = FolderStore(tmp_path).put(BLOB)
    with served(tmp_path) as (url, _), HttpStore(url) as store, pytest.raises(Refused, match="larger than 1000"):
        fetch(store, digest, limit=1000)
    with pytest.raises(Refused, match="larger than 2999999"):
        fetch(FolderStore(tmp_path), digest, 2_999_999, limit=1 << 30)


def test_old_heads_and_blobs_that_cannot_be_deleted_stop_no_publication(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError("503 SlowDown")

    store = stores.open_store(f"memory://{uuid4().hex}")
    publisher = Publisher(store, KEY, "run")
    versions = iter(history(6))
    for step in range(2):
        publisher.publish(next(versions), step)
    with monkeypatch.context() as patch:
        patch.setattr(type(store._files), "rm_file", refused)
        for step in range(2, 5):
            publisher.publish(next(versions), step)
            publisher.anchor()
    publisher.publish(next(versions), 5)
    assert len(store._heads()) == 3  # what was left is gone
    folder = FolderStore(tmp_path)
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(StoreError, match="503"):
        folder.delete(folder.put(b"x"))
