"""An application with quick routes and one of a large answer."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

LARGE = bytes(64 << 20)


async def health(request: Request) -> Response:
    return JSONResponse({})


async def echo(request: Request) -> Response:
    return JSONResponse(len(await request.body()))


async def large(request: Request) -> Response:
    return Response(LARGE)


APP = Starlette(
    routes=[Route("/health", health), Route("/echo", echo, methods=["POST"]), Route("/large", large)],
)
