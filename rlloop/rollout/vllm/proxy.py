"""Proxy that passes exact routes of a `vllm serve` and refuses all others.

vLLM's API key covers only /v1: its routes for weights, pausing, caches, profiling and remote calls answer anyone who
reaches the port. So vLLM listens on loopback behind this proxy, which passes exact routes and methods, requires
rlloop's token, and forwards only the content type of the caller's headers. Everything else is a 404.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rlloop.web.requests import gone, refusal

ALLOWED = {
    "/health": "GET",
    "/v1/models": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/inference/v1/generate": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
}
# Beside an engine's own routes: what no weights decide.
BESIDE = {"/tokenize": "POST", "/detokenize": "POST"}


def proxy_app(upstream: httpx.AsyncClient, allowed: Mapping[str, str] = ALLOWED) -> Starlette:
    """Forwards `allowed` to `upstream`, whose base URL and key are the client's own. Answers stream through."""

    def forward(path: str) -> Callable[[Request], Awaitable[Response]]:
        """Forwards to exactly this path: callers choose a request's URL, by the Host header too."""

        async def forwarded(request: Request) -> Response:
            headers = {name: request.headers[name] for name in ("content-type",) if name in request.headers}
            sent = upstream.build_request(request.method, path, headers=headers, content=await request.body())
            sending, left = asyncio.create_task(upstream.send(sent, stream=True)), asyncio.create_task(gone(request))
            await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
            left.cancel()
            if not sending.done():  # so that vLLM stops computing for a client that disconnected
                sending.cancel()
                return Response(status_code=499)
            try:
                answer = sending.result()
            except httpx.TransportError as error:
                return refusal(502, "upstream", f"vLLM does not answer: {error}")
            kept = {name: answer.headers[name] for name in ("content-type",) if name in answer.headers}
            return StreamingResponse(
                answer.aiter_bytes(), answer.status_code, kept, background=BackgroundTask(answer.aclose)
            )

        return forwarded

    async def unknown(request: Request, error: Exception) -> Response:
        listed = ", ".join(f"{method} {path}" for path, method in allowed.items())
        return refusal(404, "not_found", f"{request.method} {request.scope['path']} is not among {listed}")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with upstream:
            yield

    routes = [Route(path, forward(path), methods=[method]) for path, method in allowed.items()]
    app = Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown}, lifespan=lifespan)
    app.router.redirect_slashes = False
    return app
