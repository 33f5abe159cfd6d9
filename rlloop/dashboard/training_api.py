"""A training API's state, for the dashboard's page: sessions, queues, futures in flight, parity of each adapter.

The page asks this server, and this server the API (`rlloop serve api`, its route /status), so that the API's key stays
out of the browser.
"""

from __future__ import annotations

from typing import Any

import httpx

from rlloop.errors import ConfigError
from rlloop.web.clients import client

PATIENCE = 5.0  # seconds
MOST = 1 << 24  # bytes of an answer
OPEN_KEY = "tml-dashboard"  # on loopback, an API without keys takes any key that begins so


class TrainingApi:
    """`url`: of the API, such as http://127.0.0.1:8700. `key`: an operator's sees the sessions of all clients."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """Raises `ConfigError` unless `url` is an http(s) address."""
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL:
            address = httpx.URL("")
        if address.scheme not in ("http", "https") or not address.host:
            raise ConfigError(
                f"--api is {url!r}; it must be the address of `rlloop serve api`, as http://127.0.0.1:8700"
            )
        self.url = url.rstrip("/")
        self._client = client(most=MOST, timeout=PATIENCE, headers={"x-api-key": key or OPEN_KEY})

    def status(self) -> dict[str, Any]:
        """The server's `/status` with `url` added; or `url` and `problem`, the reason why there is no status."""
        try:
            answer = self._client.get(f"{self.url}/status")
            content = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError) as error:
            return {"url": self.url, "problem": f"{self.url} does not answer: {error or type(error).__name__}"}
        if answer.status_code in (401, 403):
            problem = f"{self.url} refuses the key; give an operator's by --api-key-file or RLLOOP_API_KEY"
        elif not isinstance(content, dict):
            problem = f"{self.url}/status answered {answer.status_code}; is it `rlloop serve api`?"
        else:
            return {**content, "url": self.url}
        return {"url": self.url, "problem": problem}

    def close(self) -> None:
        self._client.close()
