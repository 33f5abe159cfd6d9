"""Requests that no client in order sends, to each kind of server: an answer of 4xx, no traceback, and it serves on."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import struct
import time
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from rlloop.dashboard.live import Dashboard
from rlloop.dashboard.server import make_app
from rlloop.rollout import Engine
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.external_trainer import read_safetensors
from rlloop.rollout.fleet.membership import PoolSettings
from rlloop.rollout.fleet.pool import http_pool
from rlloop.rollout.fleet.trainer_server import trainer_app
from rlloop.sync.http import relay_app
from rlloop.sync.manifest import MAX_MANIFEST
from rlloop.sync.publisher import Publisher
from rlloop.sync.relay import CachingStore
from rlloop.sync.store import FolderStore
from rlloop.web.server import BackgroundServer, Listen
from tests.support.dashboard_runs import write_run
from tests.support.tiny_models import tiny_qwen3
from tests.support.weight_history import KEY, first_weights

TOKEN = "a token of some length"
DEEP, LONG = 100_000, b"9" * 5000  # digits: Python reads 4,300
NUMBERS = ["", "x", "-2", "1.5", "1e3", "NaN", "0x1", "\0", "é", "9" * 5000, str(1 << 63), str(1 << 64), "-" + "9" * 30]
BODIES = [
    b"", b"\xff\xfe", b'"\xff"', b"null", b"true", b"[]", b"{}", b'""', LONG, b"-" + LONG, b"1e999", b"NaN", b"\0" * 99,
    b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP, b'{"a": "\\ud800"}',
    b'{"url": "\xff"}', b"\xc1", b"\x91" * DEEP, b"\x81\xa1a" * DEEP, b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc7\x08\x05\0\0\0\0\0\0\0\0", b"\x80", b"\x90",
    b"\xcf" + b"\xff" * 8, b"\xd3" + b"\x80" + b"\0" * 7, b"PK\x03\x04",
]  # fmt: skip


class Words:
    has_template = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


def completions() -> list[bytes]:
    values = [LONG, b"-1", b"1.5", b"null", b"[]", b"{}", b'"x"', b"1e400", str(1 << 64).encode(), b'"\xff"', b"[[[]]]"]
    keys = ["prompt", "max_tokens", "temperature", "n", "seed", "logprobs", "stop_token_ids", "policy_version"]
    whole = b'{"model": "rlloop", "prompt": [1], "max_tokens": 1, "%s": %s}'
    return [whole % (key.encode(), value) for key, value in itertools.product(keys, values)]


def asks() -> list[bytes]:
    params = {"max_tokens": 1}
    odd = [-1, 1 << 63, 1.5, float("nan"), float("inf"), None, "x", [], {}, b"\xff"]
    sampling = [{**params, name: value} for name in ("seed", "max_tokens", "temperature", "top_k") for value in odd]
    plain = [{"prompts": prompts, "sampling": [params]} for prompts in ([[]], [[-1]], [[1 << 63]], [["x"]], [1], None)]
    versions = [{"prompts": [[1]], "sampling": [params], "lowest": value} for value in odd if value is not None]
    content = [*plain, *versions, *({"prompts": [[1]], "sampling": [each]} for each in sampling)]
    return [msgspec.msgpack.encode(each) for each in content]


def safetensors() -> list[bytes]:
    def file(header: object, data: bytes = b"\0" * 8) -> bytes:
        content = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(content)) + content + data

    def tensor(**odd: object) -> bytes:
        return file({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **odd}})

    shapes = [[0], [0, 1 << 62], [-2], [-1, -2], [1.5], ["2"], "2", None, {}, [1 << 64], [2, 10**30]]
    offsets = [[8, 0], [-8, 0], [0], [0, 8, 9], [0, 1 << 64], [0.0, 8.0], "08", None, [8, 16]]
    return [
        *(tensor(shape=shape) for shape in shapes), *(tensor(data_offsets=each) for each in offsets),
        *(tensor(dtype=kind) for kind in ("F33", 1, None, "\0")), tensor(shape=[0], data_offsets=[0, 0]),
        *map(file, BODIES), file({}), file({"w": 1}), file({"w": {}}), file({"__metadata__": 1}),
        file(b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'), b"\xff" * 8, b"\xff" * 20,
    ]  # fmt: skip


URLS = [
    "", "x", "http://", "http://[x", "http://a:99999", "http://a:-1", "http://\0", "http://é?",
    "http://" + "a" * 70_000, "ftp://a", "http://a b", "http://a\r\nX: 1", "http://" + "a." * 300, "http://xn--\uffff",
]  # fmt: skip


def of_engine() -> list[tuple[str, str, bytes]]:
    posted = ("/v1/completions", "/rlloop/generate", "/rlloop/lease")
    return [
        *(("POST", path, body) for path in posted for body in BODIES),
        *(("POST", "/v1/completions", body) for body in completions()),
        *(("POST", "/rlloop/generate", body) for body in asks()),
        *(("POST", f"/rlloop/weights/wake?version={number}&wait=0", b"") for number in NUMBERS),
        *(("POST", f"/rlloop/weights/wake?version=1&wait={number}", b"") for number in NUMBERS),
        *(("POST", f"/rlloop/pause?mode={number}", b"") for number in NUMBERS),
        *(("DELETE", f"/rlloop/requests/{number}", b"") for number in NUMBERS),
    ]


def of_store() -> list[tuple[str, str, bytes]]:
    names = [*NUMBERS, "0" * 63, "0" * 65, "g" * 64, "A" * 64, "..", "%2e%2e%2flatest", "%00"]
    return [
        *((method, f"/blobs/{name}", b"") for name in names for method in ("GET", "HEAD", "POST")),
        *(("POST", f"/squash/{number}", b"") for number in [*NUMBERS, "²", "٣"]),
        *(("GET", path, body) for path in ("/latest", "/health", "/metrics") for body in BODIES),
    ]


def of_trainer() -> list[tuple[str, str, bytes]]:
    return [
        *of_store(),
        *(("POST", path, body) for path in ("/fleet/join", "/fleet/leave", "/fleet/generate") for body in BODIES),
        *(("POST", "/fleet/join", json.dumps({"url": url}).encode()) for url in URLS),
        *(("POST", "/fleet/generate", body) for body in asks()),
        *(("POST", f"/fleet/publish?step={number}", b"") for number in [*NUMBERS, "-1"]),
        *(("POST", "/fleet/publish?step=7", body) for body in safetensors()),
    ]


def of_dashboard() -> list[tuple[str, str, bytes]]:
    runs = ["zero", "", "..", "/", "\0", "é", "x" * 5000, "%ff"]
    paths = ["totals", "series", "series.csv", "record", "certificate", "config"]
    paths += ["rollouts", "rollout", "log", "panels"]
    numbers = ["record?run=zero&step", "certificate?run=zero&last", "rollouts?run=zero&step", "rollouts?run=zero&group",
               "rollouts?run=zero&limit", "rollouts?run=zero&offset", "rollout?run=zero&line=0&step",
               "rollout?run=zero&step=1&line", "series?run=zero&generation=0&after"]  # fmt: skip
    return [
        *(("GET", f"/api/{path}?run={run}", b"") for path in paths for run in runs),
        *(("GET", f"/api/{path}={number}", b"") for path in numbers for number in NUMBERS),
        *(("GET", f"/api/rollouts?run=zero&{key}=x", b"") for key in ("order", "kind", "solved", "format")),
        *((method, "/api/runs", body) for method in ("POST", "PUT", "OPTIONS") for body in BODIES[:5]),
        *(("GET", f"/static/{name}", b"") for name in ("..", "%00", "%ff", "a" * 5000, "%2e%2e/server.py", "")),
    ]


TABLES = {"engine": of_engine, "relay": of_store, "trainer": of_trainer, "dashboard": of_dashboard}
GET, POST = (method + b" /fleet/join HTTP/1.1\r\nHost: 127.0.0.1\r\n" for method in (b"GET", b"POST"))
RAW = [
    b"\0\0\0\0", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET http://evil/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    GET + b"Host: other\r\n\r\n", GET + b"a: b\r\n" * 20_000, POST + b"Content-Length: -1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", POST + b"Content-Length: " + LONG + b"\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", POST + b"Transfer-Encoding: gzip\r\n\r\n",
    POST + b"Authorization: Bearer " + TOKEN.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\nOrigin: \xff\r\nAuthorization: Bearer \xff\r\nCookie: \xff=\xff\r\n\r\n",
    GET + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",
]  # fmt: skip


@pytest.fixture(params=TABLES)
def server(request, tmp_path):
    store = FolderStore(tmp_path / "store")
    publisher = Publisher(store, KEY, "run")
    publisher.publish(first_weights(), 0)
    undo = []
    if request.param == "engine":
        service = EngineService(Engine(tiny_qwen3(64)), max_waiting=64)
        undo.append(service.close)
        app = EngineServer(service, name="one", tokenizer=Words()).app
    elif request.param == "relay":
        app = relay_app(CachingStore(store, tmp_path / "cache", MAX_MANIFEST))
    elif request.param == "trainer":
        router = http_pool(PoolSettings(), lambda event: None, token=TOKEN)
        undo.append(router.close)

        def publish(content: bytes, step: int):
            return publisher.publish(read_safetensors(content), step).metrics

        app = trainer_app(store, router, publisher.squash_for, publish)
    else:
        write_run(tmp_path / "runs" / "zero", 2)
        dashboard = Dashboard(tmp_path / "runs", cache=tmp_path / "index")
        undo.append(dashboard.close)
        app = make_app(dashboard)
    running = BackgroundServer(app, Listen(token=TOKEN, browser=request.param == "dashboard"))
    yield request.param, running.url
    running.close()
    for each in undo:
        each()


@pytest.fixture
def errors():
    """Lines of the server's log."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    handler = Handler(logging.WARNING)
    for name in ("uvicorn.error", "asyncio", "rlloop"):
        logging.getLogger(name).addHandler(handler)
    yield found
    for name in ("uvicorn.error", "asyncio", "rlloop"):
        logging.getLogger(name).removeHandler(handler)


def test_nothing_malformed_is_a_servers_error(server, errors):
    kind, url = server
    table = TABLES[kind]()
    assert len(table) >= 100
    with httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=60
    ) as client:
        for method, path, body in table:
            with client.stream(method, httpx.URL(url).copy_with(raw_path=_raw(path)), content=body) as reply:
                assert reply.status_code < 500, (method, path[:99], body[:99], reply.read())
        for content in RAW:
            assert _answer(url, content) in (0, 400, 401, 403, 404, 405, 408, 413), content[:99]
        health = "/api/runs" if kind == "dashboard" else "/health"
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            assert client.get(health).status_code == 200
            seconds.append(time.perf_counter() - began)
        assert min(seconds) < 10.0
    assert errors == []


def _raw(path: str) -> bytes:
    """As it is, but for what cannot stand in a request's first line."""
    return b"".join(bytes([b]) if 0x21 <= b <= 0x7E else b"%%%02x" % b for b in path.encode())


def _answer(url: str, content: bytes) -> int:
    """The status that these bytes get, 0: none. Nothing follows them."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=120) as line:
        try:
            line.sendall(content)
            line.shutdown(socket.SHUT_WR)
            head = line.recv(4096)
        except ConnectionError:
            return 0
    return int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else 0
