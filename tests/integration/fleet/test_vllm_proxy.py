"""The proxy in front of `vllm serve`: what passes, what does not, and what passes unseen. Needs no vLLM."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from rlloop.cli.main import main
from rlloop.rollout.vllm.proxy import ALLOWED, proxy_app
from rlloop.web.requests import gone
from rlloop.web.server import BackgroundServer, Guard, Listen
from tests.support.waiting import left_by_its_client

TOKEN = "a token of sixteen or more"
SEEN: list[tuple[str, str, dict[str, str], bytes]] = []


async def anything(request: Request) -> JSONResponse | StreamingResponse:
    """As vLLM: answers whatever it is asked."""
    SEEN.append((request.method, request.url.path, dict(request.headers), await request.body()))
    if request.url.path == "/v1/chat/completions":
        return StreamingResponse(iter(["data: 1\n\n", "data: 2\n\n"]), 200, media_type="text/event-stream")
    return JSONResponse({"path": request.url.path}, 200, {"x-secret": "of the inside"})


METHODS = ["GET", "POST", "PUT", "DELETE"]
VLLM = Starlette(routes=[Route("/{path:path}", anything, methods=METHODS)])


def ask(method: str, path: str, *, token: str | None = TOKEN, host: str = "proxy", **options) -> httpx.Response:
    async def asked() -> httpx.Response:
        upstream = httpx.AsyncClient(
            transport=httpx.ASGITransport(VLLM), base_url="http://vllm", headers={"authorization": "Bearer inner"}
        )
        guarded = Guard(proxy_app(upstream), Listen(token=TOKEN, max_body=1000))
        headers = {"host": host, "x-other": "1", **({} if token is None else {"authorization": f"Bearer {token}"})}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://proxy") as client:
            return await client.request(method, path, headers=headers, **options)

    SEEN.clear()
    return asyncio.run(asked())


@pytest.mark.parametrize(("path", "method"), ALLOWED.items())
def test_what_is_allowed_passes_with_the_proxys_own_key(path, method):
    answer = ask(method, path, **({"json": {"prompt": [1, 2]}} if method == "POST" else {}))
    assert answer.status_code == 200
    [(seen_method, seen_path, headers, body)] = SEEN
    assert (seen_method, seen_path) == (method, path)
    assert headers["authorization"] == "Bearer inner"
    assert "x-other" not in headers
    assert body == (b'{"prompt":[1,2]}' if method == "POST" else b"")
    assert "x-secret" not in answer.headers


@pytest.mark.parametrize("host", ["x/collective_rpc?a=", "x/sleep#", "[", "x:y"])
def test_the_host_that_a_caller_names_does_not_lead_elsewhere(host):
    """Before 1.2, Starlette reads a request's path off an address that it makes of this header, too."""
    ask("POST", "/v1/completions", host=host)
    [(method, path, _, _)] = SEEN
    assert (method, path) == ("POST", "/v1/completions")
    assert ask("POST", "/sleep", host="x/v1/completions?a=").status_code == 404


def test_what_nobody_waits_for_any_more_is_not_computed():
    begun, left = threading.Event(), threading.Event()

    async def slow(request: Request) -> JSONResponse:
        await request.body()
        begun.set()
        await gone(request)
        left.set()
        return JSONResponse({})

    vllm = BackgroundServer(Starlette(routes=[Route("/v1/completions", slow, methods=["POST"])]), Listen())
    proxy = BackgroundServer(proxy_app(httpx.AsyncClient(base_url=vllm.url, trust_env=False)), Listen())
    with left_by_its_client(proxy.url, "/v1/completions", b"{}"):
        assert begun.wait(240)
    assert left.wait(240)
    proxy.close()
    vllm.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--upstream", "http://10.1.2.3:8000"], "it must be on loopback: start vLLM on this machine"),
        (["--upstream", "http://vllm.example:8000"], "must be on loopback"),
        (["--upstream", "127.0.0.1:8000"], "must be an address such as http://"),
        (["--upstream", "http://localhost:8000", "--relay", "relay:7001"], "--relay is 'relay:7001'"),
    ],
)
def test_where_vllm_may_be(options, message, capsys):
    assert main(["serve", "proxy", *options]) == 2
    assert message in capsys.readouterr().err


def test_streams_pass_through():
    answer = ask("POST", "/v1/chat/completions", json={"stream": True})
    assert answer.text == "data: 1\n\ndata: 2\n\n"
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/collective_rpc"),
        ("POST", "/update_weights"),
        ("POST", "/sleep"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/pause"),
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/completions/"),
        ("POST", "/v1/completions/../../update_weights"),
        ("POST", "/v1/../sleep"),
        ("POST", "//sleep"),
        ("POST", "/v1/completions%2f..%2f..%2fsleep"),
        ("GET", "/"),
    ],
)
def test_everything_else_is_not_there(method, path):
    answer = ask(method, path)
    assert answer.status_code == 404
    assert SEEN == []


def test_without_the_token_nothing_passes():
    for token in (None, "inner", TOKEN + "x"):
        assert ask("GET", "/v1/models", token=token).status_code == 401
        assert ask("GET", "/health", token=token).status_code == 401
    assert ask("POST", "/v1/completions", content=b"x" * 2000).status_code == 413
    assert SEEN == []


def test_an_engine_that_is_not_there():
    async def asked() -> httpx.Response:
        def refuse(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("connection refused")

        app = proxy_app(httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="http://vllm"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            return await client.get("/health")

    answer = asyncio.run(asked())
    assert answer.status_code == 502
    assert "vLLM does not answer: connection refused" in answer.json()["error"]["message"]
