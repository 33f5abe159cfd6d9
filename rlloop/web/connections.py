"""A listening socket that bounds its connections, for asyncio's servers: how many, and how long each may keep silent.

uvicorn has neither a time-out for a request's head nor a bound below which it leaves descriptors alone, and asyncio
writes a traceback for each connection that it cannot accept.
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

HEAD_SECONDS = 10.0  # until a connection's request has its whole head, from the connection on
GRACE_SECONDS = 0.1  # for a head, where there is no room
STALL_SECONDS = 30.0  # without a byte of a request's body, or of an answer taken; and between requests
MOST = 4096  # connections, where the descriptors last
LOG_SECONDS = 60.0  # between two lines about connections that were turned away

log = logging.getLogger(__name__)

Key = tuple[str, int, str, int]  # the client's address and ours


class _Connection:
    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.deadline: float | None = time.monotonic() + HEAD_SECONDS  # None: a request is being answered

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() != -1


class Listener(socket.socket):
    """For one thread. Where there is no room, the connection that is nearest to its deadline makes it."""

    def __init__(self, family: int, most: int | None = None) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._most = most or min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: dict[Key, _Connection] = {}
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._is_resting = False
        self._turned_away, self._logged = 0, -LOG_SECONDS

    def accept(self) -> tuple[socket.socket, Any]:
        """As asyncio asks for it: again and again, until it raises `BlockingIOError`."""
        if self._is_resting:  # so that asyncio closes what made room
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
        """A request came in over the connection of this ASGI scope: no deadline until `release`."""
        if connection := self._of(scope):
            connection.deadline = None

    def release(self, scope: Any) -> None:
        if connection := self._of(scope):
            connection.deadline = time.monotonic() + STALL_SECONDS

    def drop(self, scope: Any) -> None:
        """Its client does not take its answer."""
        if connection := self._of(scope):
            _shut(connection)

    def sweep(self) -> None:
        """Shut what is past its deadline; forget what is closed. To be called once a second or so."""
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
        """Whether there was one that waits, and had the time to say what for."""
        said = time.monotonic() + HEAD_SECONDS - GRACE_SECONDS
        waiting = [(each.deadline, key) for key, each in self._open.items() if each.deadline is not None]
        if not waiting or min(waiting)[0] > said:
            return False
        _shut(self._open.pop(min(waiting)[1]))
        self._is_resting = True
        self._note(f"{self._most} are open")
        return True

    def _turn_away(self, error: OSError) -> None:
        """Take one connection with the spare descriptor, only to close it: else it would be asked about forever."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        with suppress(OSError):
            super().accept()[0].close()
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            time.sleep(0.05)  # another thread has it now: nothing can be done but to ask less often
        self._note(str(error))

    def _note(self, why: str) -> None:
        self._turned_away += 1
        if time.monotonic() - self._logged > LOG_SECONDS:
            log.warning("%d connections were turned away: %s", self._turned_away, why)
            self._turned_away, self._logged = 0, time.monotonic()


def _key(client: Any, server: Any) -> Key:
    return client[0], client[1], server[0], server[1]


def _shut(connection: _Connection) -> None:
    """The server sees its end, and closes it."""
    with suppress(OSError):  # its client may have left
        connection.socket.shutdown(socket.SHUT_RDWR)
