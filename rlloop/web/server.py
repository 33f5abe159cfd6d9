"""Every rlloop server: token authentication, limits of a request, TLS, start and shutdown.

Off loopback, no route is answered without the token. On loopback without a token, only programs of this machine are
answered: pages of other sites in a browser are refused by their Origin, and by the Host that they ask for. Needs the
extra `serve`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import resource
import socket
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlloop.errors import ConfigError
from rlloop.web import TOKEN_VARIABLE
from rlloop.web.clients import bearer
from rlloop.web.connections import STALL_SECONDS, Listener

try:
    import uvicorn
    from h11 import LocalProtocolError
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import RedirectResponse, Response

    from rlloop.web.requests import MAX_BODY, refusal
except ImportError:
    raise ConfigError("servers need the extra `serve`: pip install 'rlloop[serve]'") from None

SHORTEST_TOKEN = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")
BLOCK = 1 << 18  # bytes of an answer that are written at a time
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",  # where the application says nothing else
}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Listen:
    """A server's address and access rules. Raises `ConfigError` for one that would be open to the network."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    token: str | None = None
    certificate: Path | None = None  # PEM; with `key`, the server speaks TLS
    key: Path | None = None
    max_body: int = MAX_BODY  # bytes of one request
    browser: bool = False  # accept the token as ?token= as well, which becomes a cookie
    names: tuple[str, ...] = ()  # further host names that requests may ask for, such as a proxy's
    admits: Callable[[Request], bool] | None = None  # says whether a request has a key, for servers with several

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and self.token is None and self.admits is None:
            raise ConfigError(
                f"listening on {self.host} would let anyone on the network use this server; give a token by "
                f"--token-file or {TOKEN_VARIABLE}, or listen on 127.0.0.1"
            )
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"the port is {self.port}; it must be 0 (any free one) to 65535")
        if self.token is not None and len(self.token) < SHORTEST_TOKEN:
            raise ConfigError(
                f"the token has {len(self.token)} characters; it must have at least {SHORTEST_TOKEN}, as "
                "`openssl rand -hex 32` makes it"
            )
        bearer(self.token)
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs both a certificate and its key; one of the two was given")

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"

    @property
    def known_as(self) -> frozenset[str] | None:
        """Host names that requests may ask for; None: any.

        This stops DNS rebinding: a foreign page whose name was made to resolve to this machine sends its own name. It
        has no token, but may have a browser's cookies under that name.
        """
        if self.names or (self.token is None and self.admits is None) or (self.browser and is_loopback(self.host)):
            return frozenset(name.lower() for name in (*LOOPBACK, self.host, *self.names))
        return None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def read_token(file: str | Path | None) -> str | None:
    """The token from a file, else from `RLLOOP_TOKEN`; None if neither is set. Raises `ConfigError`."""
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE) or None
    else:
        try:
            token = Path(file).read_bytes().decode(errors="replace").strip()
        except OSError as error:
            create = f"; create it: openssl rand -hex 32 > {file}" if isinstance(error, FileNotFoundError) else ""
            raise ConfigError(f"the token file {file} cannot be read: {error.strerror}{create}") from None
    bearer(token)
    return token


# ------------------------------------------------------------------------------------------------ access


class Guard:
    """ASGI middleware that refuses pages of other sites (403), requests without the token (401), requests that are too
    large (413) and requests that stall (408)."""

    def __init__(self, app: App, listen: Listen, listener: Listener | None = None) -> None:
        self._app, self._listen, self._listener, self._names = app, listen, listener, listen.known_as
        self._expected = None if listen.token is None else f"Bearer {listen.token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        exchange = _Exchange(scope, receive, send, self._listen.max_body, self._listener)
        answer = self._refused(Request(scope)) or self._app
        if self._listener is not None:
            self._listener.hold(scope)
        try:
            await answer(scope, exchange.receive, exchange.send)
        except ClientDisconnect:  # in the middle of its request, so there is no one to answer
            pass
        finally:
            exchange.end()
            if self._listener is not None:
                self._listener.release(scope)

    def _refused(self, request: Request) -> Response | None:
        """The answer that refuses the request; None if it may pass."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self._names is not None and _without_port(host) not in self._names:
            return self._refusal(
                403,
                "wrong_host",
                f"this server answers as {', '.join(sorted(self._names))}, and not as {host!r}; behind a proxy or with "
                f"another name it needs {'--allow-host NAME' if self._listen.browser else 'a token'}",
            )
        if origin is not None and (not host or origin.partition("://")[2].lower() != host.lower()):
            return self._refusal(403, "foreign_origin", f"pages of {origin!r} may not use this server")
        if self._expected is not None and not self._has_token(request):
            token = request.query_params.get("token")
            if self._listen.browser and request.scope["path"] == "/" and token and self._is_token(token):
                answer = RedirectResponse("/", 303)  # keeps the token out of histories, bookmarks and screenshots
                answer.set_cookie(self._cookie, token, httponly=True, samesite="lax", max_age=30 * 86400)
                return answer
            hint = "open the address that it printed, which ends in ?token=..., or " if self._listen.browser else ""
            return self._refusal(
                401, "unauthorized", f"this server needs its token: {hint}send `Authorization: Bearer TOKEN`"
            )
        if self._listen.admits is not None and not self._listen.admits(request):
            return self._refusal(401, "unauthorized", "this server needs a key of its token file, in X-API-Key")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._listen.max_body:
            return self._refusal(413, "too_large", f"a request may have at most {self._listen.max_body} bytes")
        return None

    @property
    def _cookie(self) -> str:
        return f"rlloop_{self._listen.port}"  # browsers share cookies between all ports of a host

    def _has_token(self, request: Request) -> bool:
        assert self._expected is not None
        header = request.headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(header, self._expected):
            return True
        return self._listen.browser and self._is_token(request.cookies.get(self._cookie, ""))

    def _is_token(self, token: str) -> bool:
        assert self._expected is not None
        return hmac.compare_digest(f"Bearer {token}".encode(errors="replace"), self._expected)

    def _refusal(self, status: int, code: str, message: str) -> Response:
        if not self._listen.browser:
            return refusal(status, code, message)
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return Response(f"{message[0].upper()}{message[1:]}.\n", status, headers, media_type="text/plain")


class _Exchange:
    """One request and its answer, with a limit on the request's size and on stalls of either."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most: int, listener: Listener | None) -> None:
        self._scope, self._receive, self._send, self._listener = scope, receive, send, listener
        self._most, self._read = most, 0
        self._is_whole = self._is_answered = False  # the request has arrived; its answer has begun
        self._writes_since: float | None = None  # of the event loop's clock, while a part of the answer is written
        self._watch: asyncio.TimerHandle | None = None

    async def receive(self) -> Message:
        if self._is_whole:  # the only message that can follow is that the client has left
            return await self._receive()
        try:
            async with asyncio.timeout(STALL_SECONDS):
                message = await self._receive()
        except TimeoutError:
            return self._end(408, f"nothing of this request arrived for {STALL_SECONDS:g} seconds")
        self._is_whole = not message.get("more_body", False)
        self._read += len(message.get("body", b""))
        if self._read > self._most:
            return self._end(413, f"a request may have at most {self._most} bytes")
        return message

    def _end(self, status: int, message: str) -> Message:
        if not self._is_answered:
            raise HTTPException(status, message)
        self._drop()
        return {"type": "http.disconnect"}

    def _drop(self) -> None:
        if self._listener is not None:
            self._listener.drop(self._scope)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_answered = True
            present = {name.lower() for name, _ in message.get("headers", ())}
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in present]
            if (
                message["status"] == 500
            ):  # its exception ends the connection: no client is to send another request on it
                added.append((b"connection", b"close"))
            message["headers"] = [*message.get("headers", ()), *added]
        if len(message.get("body", b"")) > BLOCK:
            body = memoryview(message["body"])
            while len(body) > BLOCK:  # in blocks, so that a client that reads nothing is noticed
                await self._written({**message, "body": bytes(body[:BLOCK]), "more_body": True})
                body = body[BLOCK:]
            message = {**message, "body": bytes(body)}
        await self._written(message)

    def end(self) -> None:
        """Nothing more is written."""
        if self._watch is not None:
            self._watch.cancel()

    def _look(self) -> None:
        """Drop the connection if a part has been written for too long; else look again when it could have been. One
        timer for a whole answer, since a stream has a part for each token, and a time-out for each costs more."""
        loop, self._watch = asyncio.get_running_loop(), None
        if self._writes_since is None:
            return
        left = self._writes_since + STALL_SECONDS - loop.time()
        if left > 0:
            self._watch = loop.call_later(left, self._look)
        else:
            self._drop()  # what is being written notices that the client is gone

    async def _written(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        self._writes_since = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(STALL_SECONDS, self._look)
        try:
            await self._send(message)
        except LocalProtocolError:  # bytes that are not HTTP followed the request: the connection is being closed
            while (await self._receive())["type"] != "http.disconnect":
                pass
        finally:
            self._writes_since = None


def _without_port(host: str) -> str:
    """`[::1]:80` -> `::1`; `Localhost:80` -> `localhost`"""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()


# ------------------------------------------------------------------------------------------------ serving


def serve(app: App, listen: Listen, announce: Callable[[str], None], ending: Callable[[], None] | None = None) -> None:
    """Serve until a signal. `announce` gets the address as soon as the socket listens; `ending` is called at shutdown,
    before waiting for open answers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))  # a connection is a descriptor
    listener = _bind(listen)
    server, url = _server(app, listen, listener, ending), _address(listen, listener)
    announce(url)
    server.run(sockets=[listener])


class BackgroundServer:
    """A server in a thread of its own, for processes that do something else."""

    def __init__(self, app: App, listen: Listen) -> None:
        listener = _bind(listen)
        self._server = _server(app, listen, listener)
        self.url = _address(listen, listener)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True, name="http server")
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        assert self._server.started, "the server did not start"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def _bind(listen: Listen) -> Listener:
    try:
        family = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:  # UnicodeError: names with an empty part
        raise ConfigError(f"cannot listen on {listen.host}: {error}") from None
    listener = Listener(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listen.host, listen.port))
    except OSError as error:
        listener.close()
        where = f"{listen.host}, port {listen.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; port 0 is any free one") from None
    listener.listen(128)
    return listener


def _address(listen: Listen, listener: socket.socket) -> str:
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{listen.scheme}://{host}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    ending: Callable[[], None] | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.ending is not None:
            self.ending()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):  # whose clients do not read to the end
            connection.transport.abort()
        await asyncio.sleep(0)  # their sockets are closed then, and not only when they are collected


def _server(app: App, listen: Listen, listener: Listener, ending: Callable[[], None] | None = None) -> uvicorn.Server:
    async def every_second() -> None:
        listener.sweep()

    listen = replace(listen, port=listener.getsockname()[1])
    config = uvicorn.Config(
        Guard(app, listen, listener),
        loop="asyncio",  # `Listener` depends on how asyncio accepts connections
        http="auto",  # httptools where it is installed: a third of h11's time
        ws="none",
        log_level="error",  # no line for each request that is not HTTP
        access_log=False,
        server_header=False,
        proxy_headers=False,  # headers cannot change a client's address
        backlog=128,
        timeout_graceful_shutdown=2,
        callback_notify=every_second,
        timeout_notify=1,
        ssl_certfile=listen.certificate,
        ssl_keyfile=listen.key,
    )
    try:
        config.load()
    except OSError as error:  # also ssl.SSLError
        listener.close()
        raise ConfigError(f"certificate {listen.certificate} and key {listen.key} cannot be used: {error}") from None
    server = _Server(config)
    server.ending = ending
    return server
