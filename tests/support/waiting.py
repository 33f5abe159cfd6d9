"""Waiting for a state that stays once it has come. One that may be over between two looks needs a gate instead."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from tests.support.command import Command


def until(condition: Callable[[], Any], process: Command | None = None, seconds: float = 240.0) -> Any:
    """The condition's first true value. Fails after so many seconds, and where `process` has ended before."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come"
        assert process is None or process.poll() is None or condition(), process.communicate()[0]
        time.sleep(0.005)
    return value


@contextmanager
def left_by_its_client(url: str, path: str, body: bytes, *headers: str) -> Iterator[None]:
    """Within, a request is asked at `url`, whose client leaves at the end."""
    parts = urlsplit(url)
    head = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}", *headers, "", ""]
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as line:
        line.sendall("\r\n".join(head).encode() + body)
        yield
