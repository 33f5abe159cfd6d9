"""Limits of the HTTP client on answers of another process: raw bytes, their number, and time."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import httpx
import pytest
import zstandard
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import rlloop
from rlloop.errors import ConfigError
from rlloop.rewards.http import HttpReward
from rlloop.rollout.fleet.client import RemoteEngine
from rlloop.rollout.fleet.wire import BadAnswer
from rlloop.sync.publisher import Publisher
from rlloop.sync.relay import Sources
from rlloop.sync.store import FolderStore, HttpStore, StoreError, fetch
from rlloop.types import Example
from rlloop.web import clients
from rlloop.web.clients import async_client, client
from rlloop.web.server import BackgroundServer, Listen
from tests.support.weight_history import KEY, first_weights


@pytest.fixture(scope="module")
def hostile():
    packed = zstandard.compress(bytes(64 << 20))
    assert len(packed) < 10_000
    asked: list[str] = []

    async def answer(request):
        asked.append(request.headers.get("accept-encoding", ""))
        return Response(packed, headers={"Content-Encoding": "zstd"})

    async def endless(request):
        async def parts():
            while True:
                yield bytes(1 << 16)
                await asyncio.sleep(0)

        return StreamingResponse(parts())

    routes = [Route("/endless/{path:path}", endless, methods=["GET", "POST", "DELETE"])]
    every = [*routes, Route("/{path:path}", answer, methods=["GET", "POST", "DELETE"])]
    server = BackgroundServer(Starlette(routes=every), Listen())
    yield server.url, asked
    server.close()


def test_no_client_unpacks_what_it_is_answered(hostile):
    url, asked = hostile
    asked.clear()
    with HttpStore(url) as store:
        for ask in (store.latest, lambda: b"".join(store.get(bytes(32))), lambda: store.squash(3)):
            with pytest.raises(StoreError, match="encoded as 'zstd'"):
                ask()
    with RemoteEngine(url) as engine, pytest.raises(BadAnswer, match="encoded as 'zstd'"):
        engine.fingerprint()
    reward = HttpReward(f"{url}/judge", retries=0)
    with pytest.raises(httpx.DecodingError, match="encoded as 'zstd'"):
        asyncio.run(reward("", "", Example("", "", [1], {})))
    assert set(asked) == {"identity"}
    assert len(asked) == 5


def test_no_client_reads_without_end(hostile, monkeypatch):
    url = f"{hostile[0]}/endless/x"
    with HttpStore(url) as store:
        with pytest.raises(StoreError, match="has more than 67108864 bytes"):
            store.squash(3)
        for ask in (store.latest, lambda: fetch(store, bytes(32), limit=1000)):
            with pytest.raises(Exception, match="larger than"):
                ask()
    with client(most=1000) as short, pytest.raises(httpx.DecodingError, match="more than 1000"):
        short.get(url)

    async def asked() -> None:
        async with async_client(most=1000) as short:
            with pytest.raises(httpx.DecodingError, match="more than 1000"):
                await short.get(url)

    asyncio.run(asked())
    monkeypatch.setattr(clients, "PATIENCE", 0.0)
    monkeypatch.setattr(clients, "SLOWEST", 1 << 50)
    with client(most=1 << 60) as slow, pytest.raises(httpx.ReadTimeout, match="bytes took more than"):
        slow.get(url)


def test_an_address_that_is_none_is_said_so():
    with pytest.raises(ConfigError, match="is not an address"):
        client(most=1, base_url="http://\0")


def test_every_client_is_made_in_one_place():
    makers = {"httpx.Client", "httpx.AsyncClient", "httpx.request", "httpx.get", "httpx.post", "httpx.stream"}
    made = [
        file.name
        for file in Path(rlloop.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in makers
    ]
    assert sorted(made) == ["clients.py", "clients.py"]


ODD = {
    "not UTF-8": b"\x94\x02\xa3\xff\xfe\xfd\x90\x90",
    "nested": b"\x91" * 100_000,
    "nothing": b"",
    "no format": b"\x94\x01\xa3run\x90\x90",
    "text": b"<html>",
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
@pytest.mark.parametrize("tag", ['"a"', "é", ""])
def test_past_a_relay_whose_head_is_none_the_origin_is_asked(tmp_path, content, tag):
    origin = FolderStore(tmp_path)
    Publisher(origin, KEY, "run").publish(first_weights(), 0)

    async def latest(request):
        return Response(content, headers={"ETag": tag} if tag else {})

    async def nothing(request):
        return Response(status_code=404)

    routes = [Route("/latest", latest), Route("/blobs/{digest}", nothing)]
    relay = BackgroundServer(Starlette(routes=routes), Listen())
    with HttpStore(relay.url) as near:
        sources = Sources(near, origin)
        for _ in range(3):  # the second time with the tag of the first
            assert sources.latest() == origin.latest()
        for digest in origin.blobs():  # of which the relay says that there are none
            assert fetch(sources, digest, limit=1 << 20, attempts=1)
    relay.close()
