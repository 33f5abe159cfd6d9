"""Server side of a store over HTTP, which `rlloop.sync.store.HttpStore` reads: `rlloop serve relay` and the trainer's.

GET  /latest             the head, with its ETag; 404 before the first version
GET  /blobs/{hash}       a blob, whole or from where a transfer broke (Range)
POST /squash/{sequence}  asks for one delta from that version to the newest: 201 if the head now has it, else 204
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlloop.errors import ConfigError, SyncError
from rlloop.sync.manifest import hash_of
from rlloop.sync.relay import CachingStore
from rlloop.sync.store import Missing, Store
from rlloop.web.requests import refusal, whole_number

HASH = re.compile("[0-9a-f]{64}")
RANGE = re.compile(r"bytes=([0-9]{1,18})-")


class StoreRoutes:
    """Routes and exception handlers that serve `store`. `squash`: the publisher's, if it is in this process; None: the
    store's own, which passes the request on."""

    def __init__(self, store: Store, squash: Callable[[int], bool] | None = None) -> None:
        self.store, self._squash = store, squash or store.squash
        self.served_bytes = 0
        self.routes = [
            Route("/latest", self._latest),
            Route("/blobs/{digest}", self._blob),
            Route("/squash/{sequence}", self._squashed, methods=["POST"]),
        ]
        self.handlers: Mapping[type[Exception], Callable[[Request, Exception], Response]] = {
            Missing: lambda _, error: refusal(404, "no_such_blob", str(error)),
            SyncError: lambda _, error: refusal(502, "store_failed", str(error)),
            ConfigError: lambda _, error: refusal(400, "bad_request", str(error)),
        }

    async def _latest(self, request: Request) -> Response:
        head = await run_in_threadpool(self.store.latest)
        if head is None:
            return refusal(404, "no_version", "nothing has been published yet")
        tag = f'"{hash_of(head).hex()}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        self.served_bytes += len(head)
        return Response(head, headers={"ETag": tag, "Cache-Control": "no-cache"}, media_type="application/octet-stream")

    async def _squashed(self, request: Request) -> Response:
        sequence = whole_number(request.path_params["sequence"], "the version")
        in_head = await run_in_threadpool(self._squash, sequence)
        return Response(status_code=201 if in_head else 204)

    async def _blob(self, request: Request) -> Response:
        name = request.path_params["digest"]
        if not HASH.fullmatch(name):
            return refusal(404, "no_such_blob", "a blob's name is its hash: 64 hexadecimal digits")
        digest = bytes.fromhex(name)
        if request.method == "HEAD":
            return Response(status_code=200 if await run_in_threadpool(self.store.has, digest) else 404)
        content = await run_in_threadpool(lambda: b"".join(self.store.get(digest)))
        wanted = RANGE.fullmatch(request.headers.get("range", ""))
        headers = {"Accept-Ranges": "bytes", "Cache-Control": "public, max-age=31536000, immutable"}
        status, start = 200, 0
        if wanted is not None:
            status, start = 206, int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            if start >= len(content):
                return Response(status_code=416, headers={"Content-Range": f"bytes */{len(content)}"})
        self.served_bytes += len(content) - start
        return Response(content[start:], status, headers, media_type="application/octet-stream")


def relay_app(store: CachingStore) -> Starlette:
    """The application of `rlloop serve relay`."""
    routes = StoreRoutes(store)
    registry = CollectorRegistry()
    gauges = {
        "served_bytes": ("bytes served to the region", lambda: routes.served_bytes),
        "fetched_bytes": ("bytes of blobs fetched from upstream", lambda: store.fetched_bytes),
        "fetches": ("blobs fetched from upstream", lambda: store.fetches),
        "hits": ("blobs served from the cache", lambda: store.hits),
        "damaged": ("cached blobs found damaged and fetched again", lambda: store.damaged),
    }
    for name, (text, read) in gauges.items():
        Gauge(f"rlloop_relay_{name}", text, registry=registry).set_function(read)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ready", **{name: read() for name, (_, read) in gauges.items()}})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[*routes.routes, Route("/health", health), Route("/metrics", metrics)],
        exception_handlers=dict(routes.handlers),
    )
