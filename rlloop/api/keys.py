"""Keys of the API's clients, and each client's limits.

Each key is a client, which sees only its own sessions, models, samplers and checkpoints. Tinker's client sends the key
in `X-API-Key` and requires the prefix `tml-`; Prometheus and browsers send it as a bearer token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlloop.errors import ConfigError

PREFIX = "tml-"
SHORTEST = 16  # characters of a key in a file


@dataclass(frozen=True)
class Client:
    """The owner of sessions. /status and /metrics show its `name` to itself and to operators."""

    name: str
    operator: bool = False  # sees the sessions of all clients in /status


class Keys:
    """Looks up keys. `read_keys` reads those of a file; with `Keys({}, open=True)` any `tml-` key is a client."""

    def __init__(self, clients: Mapping[str, Client], *, open: bool = False) -> None:
        self._clients, self._open = clients, open

    def client_of(self, headers: Mapping[str, str]) -> Client | None:
        """The client that sends these headers; None without a valid key."""
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        sender = None
        for known, client in self._clients.items():  # compares every key, for constant time
            if hmac.compare_digest(known.encode(), key.encode(errors="replace")):
                sender = client
        if sender is None and self._open and key.startswith(PREFIX):
            return Client(hashlib.blake2b(key.encode(), digest_size=6).hexdigest(), operator=True)
        return sender


def read_keys(file: Path | None) -> Keys:
    """The keys of a file: a line is `KEY`, `KEY NAME` or `KEY NAME operator`; `#` begins a comment. Without a name,
    a client is called by its line's number. Raises `ConfigError`, which never contains a key."""
    if file is None:
        return Keys({}, open=True)
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}") from None
    clients: dict[str, Client] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"line {number} of the token file {file}"
        key, name, role = (*words, "", "")[:3]
        if len(words) > 3 or role not in ("", "operator"):
            raise ConfigError(f"{where} has {len(words)} words; a line is KEY, KEY NAME or KEY NAME operator")
        if not key.startswith(PREFIX) or len(key) < SHORTEST or not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"{where} has a key of {len(key)} characters; a key has at least {SHORTEST}, in ASCII, and begins with "
                f"{PREFIX!r}, which Tinker's client wants"
            )
        client = Client(name or f"client-{number}", role == "operator")
        if key in clients or client.name in {other.name for other in clients.values()}:
            raise ConfigError(f"{where} repeats a key or a name; each stands once")
        clients[key] = client
    if not clients:
        raise ConfigError(f"the token file {file} has no key; a line is KEY, KEY NAME or KEY NAME operator")
    return Keys(clients)


@dataclass(frozen=True)
class Quota:
    """Limits of one client. Beyond `models` a new model is refused; beyond the others a request gets 429, and the
    client retries it later."""

    models: int = 16
    futures: int = 10_000  # submitted and not yet done
    bytes: int = 1 << 30  # of those futures' requests
    sessions: int = 64
