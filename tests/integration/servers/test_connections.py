"""Silent clients: each loses its connection soon, and none can stall the server."""

from __future__ import annotations

import gc
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import httpx
import pytest

from rlloop.web import connections
from rlloop.web import server as web
from rlloop.web.server import BackgroundServer, Listen
from tests.support.small_app import APP, LARGE
from tests.support.waiting import until

HEAD = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@contextmanager
def serving(**options) -> Iterator[str]:
    server = BackgroundServer(APP, Listen(**options))
    try:
        yield server.url
    finally:
        server.close()


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=120)


def seconds_until_closed(line: socket.socket, drip: bytes = b"") -> float:
    """Says a byte of `drip` ten times a second, until the server closes the connection or answers."""
    began = time.monotonic()
    line.settimeout(0.1)
    for at in range(200):
        try:
            if drip:
                line.sendall(drip[at : at + 1])
            line.recv(4096)
            break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    else:
        raise AssertionError("it stays open")
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("said", "drip"),
    [(b"", b""), (HEAD, b""), (HEAD, b"x-header: " + b"a" * 1000), (b"", HEAD + b"x: " + b"a" * 1000)],
)
def test_a_head_that_does_not_come_ends_its_connection(monkeypatch, said, drip):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with serving() as url, connect(url) as line:
        line.sendall(said)
        assert seconds_until_closed(line, drip) < 9


def test_a_handshake_that_does_not_come_ends_its_connection(monkeypatch, tmp_path):
    from tests.support.certificates import certificate

    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    cert, key = certificate(tmp_path)
    with serving(certificate=cert, key=key) as url, connect(url) as line:
        line.sendall(b"\x16\x03\x01")
        assert seconds_until_closed(line) < 9


def test_a_body_that_stalls_is_refused(monkeypatch):
    monkeypatch.setattr(web, "STALL_SECONDS", 0.3)
    with serving() as url, connect(url) as line:
        line.sendall(HEAD + b"Content-Length: 100\r\n\r\nabc")
        assert line.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_breaks_off_is_no_error_of_the_server(caplog):
    with serving() as url:
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)
        with connect(url) as line:
            line.sendall(HEAD + b"Content-Length: 100\r\n\r\nabc")
            assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert not caplog.records


def test_what_follows_an_answer_that_left_its_body_unread_ends_too(monkeypatch):
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.5)
    with serving(token="a token of some length") as url, connect(url) as line:
        line.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 401 ")
        assert seconds_until_closed(line, b"a" * 1000) < 19


def test_a_client_that_takes_nothing_of_its_answer_is_dropped(monkeypatch):
    dropped, drop = [], connections.Listener.drop
    monkeypatch.setattr(connections.Listener, "drop", lambda *given: dropped.append(drop(*given)))
    monkeypatch.setattr(web, "STALL_SECONDS", 0.3)
    with serving() as url, connect(url) as line:
        line.sendall(b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: dropped)  # nothing is read meanwhile
        taken = 0
        with suppress(ConnectionError):  # what was in the kernels' buffers, and then the end
            while part := line.recv(1 << 20):
                taken += len(part)
        assert taken < len(LARGE) // 2
        monkeypatch.setattr(web, "STALL_SECONDS", 60.0)
        reply = httpx.get(f"{url}/large", trust_env=False, timeout=60)  # who takes it gets all of it
        assert reply.content == LARGE


def test_a_server_that_ends_closes_the_connection_of_a_client_that_takes_nothing():
    server = BackgroundServer(APP, Listen())
    with connect(server.url) as line:
        line.sendall(b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        taken = len(line.recv(1))
        gc.disable()  # which would close it, at last
        try:
            server.close()
            line.settimeout(20)
            with suppress(ConnectionError):
                while part := line.recv(1 << 20):
                    taken += len(part)
        finally:
            gc.enable()
    assert taken < len(LARGE)


def test_where_there_is_no_room_who_waits_without_a_request_makes_it(monkeypatch, caplog):
    monkeypatch.setattr(connections, "MOST", 8)
    with serving() as url, ExitStack() as stack:
        busy = stack.enter_context(connect(url))
        busy.sendall(HEAD + b"Content-Length: 4\r\n\r\nab")
        open_ = [stack.enter_context(connect(url)) for _ in range(40)]
        time.sleep(2 * connections.GRACE_SECONDS)
        for _ in range(20):
            assert httpx.get(f"{url}/health", trust_env=False, timeout=60).status_code == 200
        assert sum(is_open(line) for line in open_) < 8
        busy.sendall(b"cd")  # nobody whose request is under way was shut
        assert busy.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert len(caplog.records) == 1  # for all of them
    assert "connections were refused" in caplog.text


def is_open(line: socket.socket) -> bool:
    line.settimeout(0.01)
    try:
        return line.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from rlloop.web import connections, server as web
connections.HEAD_SECONDS, connections.LOG_SECONDS = 600.0, 3600.0
if sys.argv[1] == "unbounded":
    connections.HEAD_SECONDS = 3.0
    connections.Listener.__init__.__defaults__ = (10**6,)
from tests.support.small_app import APP
web.serve(APP, web.Listen(), lambda url: print(url, flush=True))
"""


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=60).status_code == 200
    except httpx.TransportError:  # turned away
        return False


@pytest.mark.parametrize("bound", ["bounded", "unbounded"])
def test_half_open_connections_beyond_the_descriptors_neither_stop_the_server_nor_fill_its_log(bound):
    """Unbounded: the descriptors themselves run out, as they do where the process needs them for other things. They
    come back as connections' time is over; bounded, long before."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, bound], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(connect(url)).sendall(HEAD)
            until(lambda: answers(f"{url}/health"))
    finally:
        process.terminate()
        _, log = process.communicate(timeout=240)
    assert log.count(b"\n") == 1
    assert b"connections were refused" in log


def test_an_answer_is_sent_without_waiting_for_the_client_to_have_read_its_head():
    """Head and body are two writes: without TCP_NODELAY the second waits for a delayed acknowledgement, 40 ms."""
    with connections.Listener(socket.AF_INET) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.proto == socket.IPPROTO_TCP  # asyncio sets TCP_NODELAY of such sockets only
