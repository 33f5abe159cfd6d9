"""Every rlloop HTTP client: TLS authorities, the token, and limits on answers.

An answer has a largest size and a slowest rate. One with a Content-Encoding is refused, since a few kilobytes of it may
unpack to gigabytes.
"""

from __future__ import annotations

import functools
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

from rlloop.errors import ConfigError

CONNECT_SECONDS = 5.0
BASIC = "export LOGIN=\"Basic $(printf %s 'user:password' | base64 | tr -d '\\n')\""  # for `authorization`
BEGINNING = re.compile(r"(?i:https?:/*|[^:/?#]*:?//)([^/?#]*)")  # of an address, with its host
HOST = re.compile(r"(\[[^]]*\]|[^][:]*)(:\d*)?")
USER = re.compile(r"(?!(?i:https?):)[\w+.-]+://[^][:/?#@%]+@[^@]*")  # a name alone, as of SFTP, databases and Azure
PATIENCE, SLOWEST = 60.0, 1024  # an answer's body may take 60 seconds, and one more for every 1,024 bytes


def client(*, token: str | None = None, ca_file: str | Path | None = None, most: int, **options: Any) -> httpx.Client:
    """A client. `token`: sent to every server; `ca_file`: authorities to trust instead of the system's; `most`: largest
    answer in bytes; `options`: httpx's own, such as `timeout`."""

    def bound(response: httpx.Response) -> None:
        response.stream = _Bounded(response, most)

    return httpx.Client(**_options(token, ca_file, options), event_hooks={"response": [bound]})


def async_client(
    *, token: str | None = None, ca_file: str | Path | None = None, most: int | None, **options: Any
) -> httpx.AsyncClient:
    """The same for asyncio. `most` None: no limit of size or rate, for callers that stream an answer on."""

    async def bound(response: httpx.Response) -> None:
        response.stream = _Bounded(response, most)

    return httpx.AsyncClient(**_options(token, ca_file, options), event_hooks={"response": [bound]})


def _options(token: str | None, ca_file: str | Path | None, options: dict[str, Any]) -> dict[str, Any]:
    headers = {**options.pop("headers", {}), **bearer(token), "Accept-Encoding": "identity"}
    try:
        httpx.URL(options.get("base_url", ""))
    except httpx.InvalidURL as error:
        raise ConfigError(f"{options['base_url']!r:.200} is not an address: {error}") from None
    defaults = {"timeout": httpx.Timeout(30.0, connect=CONNECT_SECONDS), "trust_env": False}
    return {**defaults, **options, "headers": headers, "verify": tls_context(ca_file)}


class _Bounded(httpx.SyncByteStream, httpx.AsyncByteStream):
    """An answer's body. Raises `httpx.DecodingError` if it is encoded or too long, `ReadTimeout` if it is too slow."""

    def __init__(self, response: httpx.Response, most: int | None) -> None:
        coding = response.headers.get("Content-Encoding", "identity")
        if coding.lower() != "identity":
            raise httpx.DecodingError(
                f"it is encoded as {coding!r}; only raw bytes are accepted", request=response.request
            )
        self._stream: Any = response.stream
        self._request, self._most = response.request, most
        self._read, self._begun = 0, time.monotonic()

    def _counted(self, chunk: bytes) -> bytes:
        self._read += len(chunk)
        if self._most is None:
            return chunk
        if self._read > self._most:
            raise httpx.DecodingError(f"it has more than {self._most} bytes", request=self._request)
        if time.monotonic() - self._begun > PATIENCE + self._read / SLOWEST:
            raise httpx.ReadTimeout(f"{self._read} bytes took more than {PATIENCE:g} seconds", request=self._request)
        return chunk

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            yield self._counted(chunk)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield self._counted(chunk)

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()


def bearer(token: str | None) -> dict[str, str]:
    """The header with a server's token. Raises `ConfigError`, which unlike an HTTP library's error does not contain the
    token, for one that no header can hold."""
    if token is None:
        return {}
    if not token or token != token.strip() or not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"the token ({len(token)} characters) cannot be sent in a header: it is empty, has several lines or is not "
            "ASCII; give one line of letters and digits"
        )
    return {"Authorization": f"Bearer {token}"}


def from_environment(key: str, name: str) -> str:
    """Value of the environment variable `name`, which the configuration's `key` gives. Raises `ConfigError`."""
    if (value := os.environ.get(str(name))) is None:
        raise ConfigError(f"{key} names {name!r}, and that environment variable is not set")
    return value


def authorization(key: str, token_env: str | None) -> dict[str, str]:
    """The header of the token in the environment variable `token_env`, which `key` names: a bearer's, or `Basic ...` as
    it stands. Raises `ConfigError`."""
    if token_env is None:
        return {}
    token = from_environment(key, token_env)
    return bearer(token) | ({"Authorization": token} if token.startswith("Basic ") else {})


def refuse_login(key: str, url: str, instead: str) -> None:
    """Raises `ConfigError`, without the address, for one with a login before its host; `instead`: where that belongs.
    Without a host, or with a port that is none, an `@` anywhere counts: a login may have been mistyped.

    A user name alone is no login, but before a web server's host, where many a token is given as one."""
    if USER.fullmatch(url):
        return
    found = BEGINNING.match(url)
    host = None if found is None else found[1]
    if "@" in (host or "") or ("@" in url and (host is None or HOST.fullmatch(host) is None)):
        raise ConfigError(
            f"{key} has a login (user:password@ or token@), which config.yaml, the dashboard and trackers would show. "
            f"Leave it out, {instead}"
        )


def tls_context(ca_file: str | Path | None) -> ssl.SSLContext:
    """httpx's `verify`: the authorities that httpx trusts, or only those of `ca_file`. Raises `ConfigError`."""
    if ca_file is None:
        return _usual_authorities()
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificates {ca_file} cannot be read: {error}") from None


@functools.cache  # to read them takes 40 ms, for each client anew
def _usual_authorities() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)
