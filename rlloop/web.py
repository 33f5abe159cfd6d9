"""What every server of rlloop shares: who may ask, how much, over what; and how a server starts and ends.

Off loopback nothing is answered without the token, on any route. Needs the extra `serve`.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlloop.errors import ConfigError
from rlloop.sync.store import bearer

try:
    import uvicorn
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse
except ImportError:
    raise ConfigError("servers need the extra `serve`: pip install 'rlloop[serve]'") from None

TOKEN_VARIABLE = "RLLOOP_TOKEN"
SHORTEST_TOKEN = 16

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Listen:
    """Where a server listens, and for whom. Raises `ConfigError` for what would be open to strangers."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    token: str | None = None
    certificate: Path | None = None  # PEM; with `key`, the server speaks TLS
    key: Path | None = None
    max_body: int = 64 << 20  # bytes of one request

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and self.token is None:
            raise ConfigError(
                f"listening on {self.host} would let anyone on the network use this server; give a token by "
                f"--token-file or {TOKEN_VARIABLE}, or listen on 127.0.0.1"
            )
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"the port is {self.port}; it must be 0 (any free one) to 65535")
        if self.token is not None and len(self.token) < SHORTEST_TOKEN:
            raise ConfigError(f"the token has {len(self.token)} characters; it must have at least {SHORTEST_TOKEN}")
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs both a certificate and its key; one of the two was given")

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def read_token(file: str | Path | None) -> str | None:
    """The token of a file, else of the environment; None where neither is given."""
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE) or None
    else:
        try:
            token = Path(file).read_bytes().decode(errors="replace").strip()
        except OSError as error:
            raise ConfigError(f"the token file {file} cannot be read: {error.strerror}") from None
    bearer(token)
    return token


class Guard:
    """In front of an application: refuses who has no token (401) and what is too large (413)."""

    def __init__(self, app: App, token: str | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._expected is not None and not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            await refusal(401, "unauthorized", "this server wants `Authorization: Bearer <token>`")(
                scope, receive, send
            )
            return
        if scope["type"] != "http":
            return
        too_large = refusal(413, "too_large", f"a request may have {self._max_body} bytes")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body:
            await too_large(scope, receive, send)
            return
        read = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:
                raise HTTPException(413, f"a request may have {self._max_body} bytes")
            return message

        await self._app(scope, counted, send)


def refusal(status: int, code: str, message: str, **details: Any) -> JSONResponse:
    """An error in the shape that OpenAI's clients read. `details` stand beside the message."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    headers = {"Retry-After": "1"} if status in (409, 429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code, **details}}, status, headers
    )


async def gone(request: Request) -> None:
    """Returns when the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def serve(app: App, listen: Listen, announce: Callable[[str], None]) -> None:
    """Until a signal ends it. `announce` gets the address as soon as the socket listens."""
    server, listener = _server(app, listen), _bind(listen)
    announce(_address(listen, listener))
    server.run(sockets=[listener])


class BackgroundServer:
    """The same in a thread, for a process whose main work is another."""

    def __init__(self, app: App, listen: Listen) -> None:
        self._server, listener = _server(app, listen), _bind(listen)
        self.url = _address(listen, listener)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True, name="http server")
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        assert self._server.started, "the server did not start"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def _bind(listen: Listen) -> socket.socket:
    try:
        family = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:  # the latter for names with an empty part
        raise ConfigError(f"cannot listen on {listen.host}: {error}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listen.host, listen.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {listen.host}:{listen.port}: {error.strerror}") from None
    listener.listen(128)
    return listener


def _address(listen: Listen, listener: socket.socket) -> str:
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{listen.scheme}://{host}:{listener.getsockname()[1]}"


def _server(app: App, listen: Listen) -> uvicorn.Server:
    config = uvicorn.Config(
        Guard(app, listen.token, listen.max_body),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=2,
        ssl_certfile=listen.certificate,
        ssl_keyfile=listen.key,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"certificate {listen.certificate} and key {listen.key} cannot be used: {error}") from None
    return uvicorn.Server(config)
