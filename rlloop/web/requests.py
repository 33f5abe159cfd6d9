"""Helpers of route handlers: parsing requests, and error answers."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from rlloop.errors import UNREADABLE, ConfigError, readable

MAX_BODY = 64 << 20  # bytes of one request
MAX_NUMBER = (1 << 63) - 1  # in queries and paths: what SQLite, msgpack and numpy hold

T = TypeVar("T")


def refusal(status: int, code: str, message: str, **details: Any) -> JSONResponse:
    """An error answer in OpenAI's format. `details` are further keys beside the message."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    headers = {"Retry-After": "1"} if status in (409, 429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code, **details}}, status, headers
    )


async def body_of(request: Request) -> bytes:
    """The body of a request of at most `MAX_BODY` bytes, for routes with a smaller limit than their server's."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY:
            raise HTTPException(413, f"a request to {request.url.path} may have at most {MAX_BODY} bytes")
    return bytes(content)


def parsed(body: bytes, kind: type[T], *, packed: bool = False) -> T:
    """A body decoded from JSON, or from msgpack if `packed`. Raises `ConfigError`."""
    try:
        return (msgspec.msgpack if packed else msgspec.json).decode(body, type=readable(kind))
    except UNREADABLE as error:
        form = "msgpack" if packed else "JSON"
        raise ConfigError(f"the body must be {form} of {kind.__module__}.{kind.__qualname__}: {error}") from None


def whole_number(text: str | None, name: str, default: int | None = None) -> int:
    """A whole number of a query or path, -1 or more. Raises `ConfigError`."""
    if text is None and default is not None:
        return default
    try:
        number = int(text or "")
    except ValueError:  # also for thousands of digits
        number = -2
    if not -1 <= number <= MAX_NUMBER:
        raise ConfigError(f"{name} is {text!r:.60}; it must be a whole number up to {MAX_NUMBER}")
    return number


async def gone(request: Request) -> None:
    """Wait until the client disconnects. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
