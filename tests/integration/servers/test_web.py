"""Every route of every server: nothing for pages of other sites, nothing without the token, nothing oversize."""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response

from rlloop.cli import serve
from rlloop.cli.main import main
from rlloop.config.fleet import FleetConfig, FleetKind
from rlloop.config.run import AlgorithmConfig, RunConfig
from rlloop.errors import ConfigError
from rlloop.launch import run as launch
from rlloop.rollout import Engine
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.membership import PoolSettings
from rlloop.rollout.fleet.pool import http_pool
from rlloop.rollout.fleet.trainer_server import trainer_app
from rlloop.rollout.vllm.proxy import proxy_app
from rlloop.sync.http import relay_app
from rlloop.sync.manifest import MAX_MANIFEST
from rlloop.sync.publisher import Publisher
from rlloop.sync.relay import CachingStore
from rlloop.sync.store import FolderStore
from rlloop.web.server import BackgroundServer, Listen
from tests.support.tiny_models import tiny_qwen3
from tests.support.weight_history import KEY, first_weights

TOKEN = "a token of some length"
LIMIT = 1 << 16
NO_BODY = ("/rlloop/weights/wake", "/rlloop/pause", "/rlloop/resume", "/squash/3")  # posted to, and none is read


@pytest.fixture(params=["engine", "relay", "trainer", "proxy"])
def server(request, tmp_path):
    """Application and address; behind each is something that a stranger could read or change."""
    store = FolderStore(tmp_path / "store")
    Publisher(store, KEY, "run").publish(first_weights(), 0)
    undo = []
    if request.param == "engine":
        service = EngineService(Engine(tiny_qwen3(64)))
        undo.append(service.close)
        app = EngineServer(service, name="one").app
    elif request.param == "relay":
        app = relay_app(CachingStore(store, tmp_path / "cache", MAX_MANIFEST))
    elif request.param == "trainer":
        router = http_pool(PoolSettings(), lambda event: None, token=TOKEN)
        undo.append(router.close)
        app = trainer_app(store, router, lambda sequence: False, lambda content, step: {})
    else:
        app = proxy_app(httpx.AsyncClient(base_url="http://127.0.0.1:1"))
    running = BackgroundServer(app, Listen(token=TOKEN, max_body=LIMIT))
    yield app, running.url, store
    running.close()
    for each in undo:
        each()


def routes(app: Starlette, store: FolderStore) -> list[tuple[str, str]]:
    blob = next(store.blobs()).hex()
    values = {"{digest}": blob, "{key}": "k", "{path:path}": "v1/models", "{sequence}": "3"}.items()
    return [
        (method, reduce(lambda path, value: path.replace(*value), values, route.path))  # type: ignore[attr-defined]
        for route in app.routes
        for method in sorted(route.methods or [])  # type: ignore[attr-defined]
    ]


def test_no_route_answers_without_the_token(server):
    app, url, store = server
    asked = routes(app, store)
    assert len(asked) >= 4
    with httpx.Client(base_url=url, trust_env=False) as client:
        for method, path in [*asked, ("GET", "/docs"), ("OPTIONS", "/health"), ("PUT", "/latest")]:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
                reply = client.request(method, path, headers=headers, params={"token": TOKEN})
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
            with client.stream(method, path, content=b"x" * (2 * LIMIT)) as reply:
                assert reply.status_code == 401  # whoever has no token is not told what is too large


def test_no_route_takes_more_than_it_may(server):
    app, url, store = server

    def endless():
        for _ in range(2 * LIMIT // 4096):
            yield b"x" * 4096

    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
        for method, path in routes(app, store):
            assert client.request(method, path, content=b"x" * (LIMIT + 1)).status_code == 413, (method, path)
            if method == "POST" and path not in NO_BODY:
                assert client.request(method, path, params={"step": 1}, content=endless()).status_code == 413, (
                    method,
                    path,
                )


def test_without_a_token_no_page_of_another_site_or_name_gets_anything(server):
    """A page may send simple requests to any address (CSRF), and have its own name point to this one (rebinding)."""
    app, _, store = server
    changed = []

    async def spy(scope, receive, send):
        changed.append(scope["path"])
        await Response()(scope, receive, send)

    running = BackgroundServer(spy, Listen())
    port = running.url.rpartition(":")[2]
    own, body = f"http://127.0.0.1:{port}", {"content": b"{}"}
    origins = [
        "https://evil.example",
        "null",
        f"http://evil.example:{port}",
        "http://127.0.0.1:1",
        "",
        own + ".evil",
        "x",
    ]
    hosts = ["evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "[::2]", f"10.0.0.1:{port}"]
    refused = [{"Origin": origin, "Content-Type": "text/plain"} for origin in origins] + [
        {"Host": host} for host in hosts
    ]
    with httpx.Client(base_url=running.url, trust_env=False) as client:
        for method, path in routes(app, store):
            for headers in refused:
                assert (client.request(method, path, headers=headers, **body).status_code, changed) == (403, [])
            refused = [refused[0], refused[-1]]  # one of each will do for the other routes
            for headers in ({}, {"Origin": own}, {"Host": f"localhost:{port}"}, {"Host": "[::1]"}):
                reply = client.request(method, path, headers=headers, **body)
                assert (reply.status_code, changed.pop()) == (200, path)
            assert reply.headers["cross-origin-resource-policy"] == "same-origin"
    running.close()


def test_with_a_token_any_name_will_do_and_no_foreign_page(server):
    _, url, _ = server
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "engine-eu:7002"}
    assert httpx.get(f"{url}/health", headers=headers, trust_env=False).status_code in (200, 502)
    reply = httpx.get(f"{url}/health", headers={**headers, "Origin": "http://elsewhere"}, trust_env=False)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "foreign_origin")


def test_a_trainer_to_publish_to_always_has_a_token(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RLLOOP_TOKEN", raising=False)
    listens: list[Listen] = []
    monkeypatch.setattr(serve, "serve", lambda app, listen, announce: listens.append(listen))
    arguments = ["serve", "trainer", "--store", str(tmp_path / "w"), "--signing-key", str(tmp_path / "key"), "--run-id"]
    for run in ("one", "two"):
        assert main([*arguments, run]) == 0
    file = tmp_path / "key.token"
    assert [listen.token for listen in listens] == [file.read_text().strip()] * 2  # the same, started anew
    assert len(file.read_text()) > 60
    assert file.stat().st_mode & 0o777 == 0o600
    assert f"the fleet's token is in {file}" in capsys.readouterr().out
    monkeypatch.setenv("RLLOOP_TOKEN", TOKEN)
    assert main([*arguments, "three"]) == 0
    assert listens[-1].token == TOKEN
    file.write_text("")
    monkeypatch.delenv("RLLOOP_TOKEN")
    assert main([*arguments, "four"]) == 2


def test_a_fleet_without_the_extra_names_it(monkeypatch):
    for name in ("rlloop.launch.regions", "rlloop.rollout.fleet.trainer_server", "rlloop.web.server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("prometheus_client", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None)
    algorithm = AlgorithmConfig(loss="grpo", advantage="group_norm")
    config = RunConfig(algorithm=algorithm, fleet=FleetConfig(kind=FleetKind.regions))
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"pip install 'rlloop\[serve\]'"):
        launch.builder_of(config)(config, nothing, nothing).__enter__()
