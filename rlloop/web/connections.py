"""A listening socket for asyncio's servers that limits the number of connections and how long each may be silent.

uvicorn has no time-out for a request's head and no limit on connections that would leave descriptors for the rest of
the process, and asyncio logs a traceback for each connection that it cannot accept.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import time
from contextlib import suppress
from typing import Any

HEAD_SECONDS = 10.0  # from the connection until its request's head is complete
GRACE_SECONDS = 0.1  # for a head, when all connections are in use
STALL_SECONDS = 30.0  # without a byte of a request's body sent or of an answer read; and between requests
MOST = 4096  # connections, if there are twice as many descriptors
LOG_SECONDS = 60.0  # between two log lines about refused connections

log = logging.getLogger(__name__)

Key = tuple[str, int, str, int]  # the client's address and ours


class _Connection:
    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.deadline: float | None = time.monotonic() + HEAD_SECONDS  # None while a request is answered

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() != -1


class Listener(socket.socket):
    """Accepts connections, in one thread. When all are in use, a new one replaces the one nearest to its deadline."""

    def __init__(self, family: int, most: int | None = None) -> None:
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # by which asyncio knows to set TCP_NODELAY
        self._most = most or min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: dict[Key, _Connection] = {}
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._is_resting = False
        self._turned_away, self._logged = 0, -LOG_SECONDS

    def accept(self) -> tuple[socket.socket, Any]:
        """Called by asyncio again and again until it raises `BlockingIOError`."""
        if self._is_resting:  # lets asyncio close the connection that made room
            self._is_resting = False
            raise BlockingIOError
        try:
            accepted, address = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            self._turn_away(error)
            raise BlockingIOError from None
        if len(self._open) >= self._most:
            self.sweep()
            if len(self._open) >= self._most and not self._make_room():
                accepted.close()
                self._note(f"{self._most} are open")
                raise BlockingIOError
        self._open[_key(address, accepted.getsockname())] = _Connection(accepted)
        return accepted, address

    def hold(self, scope: Any) -> None:
        """Suspend the deadline of this ASGI scope's connection, whose request is being answered, until `release`."""
        if connection := self._of(scope):
            connection.deadline = None

    def release(self, scope: Any) -> None:
        if connection := self._of(scope):
            connection.deadline = time.monotonic() + STALL_SECONDS

    def drop(self, scope: Any) -> None:
        """Close the connection, whose client does not read its answer."""
        if connection := self._of(scope):
            _shut(connection)

    def sweep(self) -> None:
        """Close connections past their deadline and forget closed ones. To be called about once a second."""
        now = time.monotonic()
        self._open = {key: connection for key, connection in self._open.items() if connection.is_open}
        for connection in self._open.values():
            if connection.deadline is not None and now > connection.deadline:
                _shut(connection)

    def close(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        super().close()

    def _of(self, scope: Any) -> _Connection | None:
        client, server = scope.get("client"), scope.get("server")
        return self._open.get(_key(client, server)) if client and server else None

    def _make_room(self) -> bool:
        """Close the idle connection nearest to its deadline. False if none is idle, or all are within their grace."""
        latest = time.monotonic() + HEAD_SECONDS - GRACE_SECONDS
        waiting = [(each.deadline, key) for key, each in self._open.items() if each.deadline is not None]
        if not waiting or min(waiting)[0] > latest:
            return False
        _shut(self._open.pop(min(waiting)[1]))
        self._is_resting = True
        self._note(f"{self._most} are open")
        return True

    def _turn_away(self, error: OSError) -> None:
        """Accept one connection with the spare descriptor and close it, or the socket would stay readable forever."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        with suppress(OSError):
            super().accept()[0].close()
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            time.sleep(0.05)  # another thread has taken the descriptor: retry less often
        self._note(str(error))

    def _note(self, why: str) -> None:
        self._turned_away += 1
        if time.monotonic() - self._logged > LOG_SECONDS:
            log.warning("%d connections were refused: %s", self._turned_away, why)
            self._turned_away, self._logged = 0, time.monotonic()


def _key(client: Any, server: Any) -> Key:
    return client[0], client[1], server[0], server[1]


def _shut(connection: _Connection) -> None:
    """Shut the socket down, so that the server sees its end and closes it."""
    with suppress(OSError):  # the client may have left
        connection.socket.shutdown(socket.SHUT_RDWR)
