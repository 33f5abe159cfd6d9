"""The network between the processes: a proxy for each link, which hands on whole HTTP messages, or not.

Its faults are those of networks (delay, loss, reordering, duplication, partitions, bytes cut off or flipped) and of
peers that lie, whose answers it rewrites. They need no privilege.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
NO_BODY = (b" 204 ", b" 304 ")
LIMIT = 1 << 20  # bytes of a message's head


@dataclass(frozen=True)
class Message:
    head: bytes  # with the empty line
    body: bytes

    @property
    def path(self) -> str:
        """Of a request."""
        return self.head.split(b" ", 2)[1].decode("latin-1")

    @property
    def is_ok(self) -> bool:
        """Of an answer."""
        return self.head.split(b" ", 2)[1] == b"200"

    def with_body(self, body: bytes) -> Message:
        return Message(LENGTH.sub(b"\r\ncontent-length: %d" % len(body), self.head), body)

    def with_header(self, name: str, value: str | None) -> Message:
        """None removes it."""
        lines = [line for line in self.head[:-4].split(b"\r\n") if not line.lower().startswith(f"{name}:".encode())]
        added = [] if value is None else [f"{name}: {value}".encode()]
        return Message(b"\r\n".join([*lines, *added]) + b"\r\n\r\n", self.body)

    @property
    def raw(self) -> bytes:
        return self.head + self.body


Lie = Callable[[Message, Message], Message]  # request, answer -> the answer that is given


@dataclass
class Disturbance:
    """Current fault of a link."""

    kind: str
    dice: random.Random
    over: asyncio.Event
    lie: Lie | None = None

    def hits(self, share: float = 0.5) -> bool:
        return self.dice.random() < share


class Reset(Exception):
    """The connection breaks."""


class Link:
    """Connections to `port` go to `upstream`, both on loopback."""

    def __init__(self, port: int, upstream: int) -> None:
        self.port, self.upstream = port, upstream
        self.hits = 0  # messages that were disturbed
        self._now: list[Disturbance] = []
        self._tasks = set[asyncio.Task[None]]()  # a loop keeps no reference to its own

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._connected, "127.0.0.1", self.port, limit=LIMIT)

    def begin(self, kind: str, number: int, lie: Lie | None = None) -> Disturbance:
        disturbance = Disturbance(kind, random.Random(number), asyncio.Event(), lie)
        self._now.append(disturbance)
        return disturbance

    def end(self, disturbance: Disturbance) -> None:
        self._now.remove(disturbance)
        disturbance.over.set()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        try:
            upstream, far = await asyncio.open_connection("127.0.0.1", self.upstream, limit=LIMIT)
            while (request := await _read(reader)) is not None:
                await self._request(request, writer, far)
                answer = await _read(upstream, to=request)
                if answer is None:
                    break
                answer = await self._answer(request, answer, writer)
                writer.write(answer.raw)
                await writer.drain()
        except (OSError, EOFError, ValueError, Reset, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # a task of a closed network may end without being awaited
        finally:
            for each in (writer, far):
                if each is not None:
                    each.transport.abort()

    async def _request(self, request: Message, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        raw = request.raw
        for now in list(self._now):
            if now.kind in ("partition", "requests lost"):
                self.hits += 1
                await now.over.wait()  # then it goes through: late, or when its sender has given up
            elif now.kind in ("delay", "reorder") and (now.kind == "delay" or now.hits()):
                self.hits += 1
                await asyncio.sleep(now.dice.uniform(0, 0.3))
            elif now.kind == "loss" and now.hits(0.3):
                self.hits += 1
                raise Reset
            elif now.kind == "duplicate" and now.hits():
                self.hits += 1
                await self._twice(raw)
            elif now.kind == "truncate" and now.hits(0.3):
                self.hits += 1
                far.write(raw[: now.dice.randrange(len(raw))])
                await far.drain()
                raise Reset
            elif now.kind == "flip" and now.hits(0.3):
                self.hits += 1
                raw = flipped(raw, now.dice)
        far.write(raw)
        await far.drain()

    async def _answer(self, request: Message, answer: Message, near: asyncio.StreamWriter) -> Message:
        for now in list(self._now):
            if now.kind in ("partition", "answers lost"):
                self.hits += 1
                await now.over.wait()
            elif now.kind == "loss" and now.hits(0.3):
                self.hits += 1
                raise Reset
            elif now.kind == "truncate" and now.hits(0.3):
                self.hits += 1
                near.write(answer.raw[: now.dice.randrange(len(answer.raw))])
                await near.drain()
                raise Reset
            elif now.kind == "flip" and now.hits(0.3):
                self.hits += 1
                near.write(flipped(answer.raw, now.dice))
                await near.drain()
                raise Reset  # a length may have been hit
            elif now.lie is not None and answer.is_ok:
                told = now.lie(request, answer)
                self.hits += told is not answer
                answer = told
        return answer

    async def _twice(self, raw: bytes) -> None:
        """The request once more, on a connection of its own; nobody reads the answer."""
        upstream, far = await asyncio.open_connection("127.0.0.1", self.upstream)
        far.write(raw)
        await far.drain()
        asyncio.get_running_loop().call_later(1.0, far.transport.abort)
        del upstream


def flipped(raw: bytes, dice: random.Random) -> bytes:
    """With one bit changed: of the body, or where there is none, of the head."""
    body = raw.find(b"\r\n\r\n") + 4
    at = dice.randrange(body, len(raw)) if body < len(raw) else dice.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << dice.randrange(8)]) + raw[at + 1 :]


async def _read(reader: asyncio.StreamReader, to: Message | None = None) -> Message | None:
    """A request, or the answer `to` one; None at the connection's end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    length = LENGTH.search(head)
    bare = to is not None and (to.head.startswith(b"HEAD ") or any(code in head[:20] for code in NO_BODY))
    if length is None or bare:
        assert bare or to is None or b"chunked" not in head.lower(), head
        return Message(head, b"")
    return Message(head, await reader.readexactly(int(length[1])))


class Network:
    """Links by name, in a thread of their own."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="network")
        self._thread.start()

    def add(self, name: str, port: int, upstream: int) -> None:
        self.links[name] = link = Link(port, upstream)
        self._servers.append(asyncio.run_coroutine_threadsafe(link.serve(), self._loop).result())

    def begin(self, name: str, kind: str, number: int, lie: Lie | None = None) -> Callable[[], None]:
        """Returns what ends it."""
        link, done = self.links[name], threading.Event()
        begun: list[Disturbance] = []

        def start() -> None:
            begun.append(link.begin(kind, number, lie))
            done.set()

        self._loop.call_soon_threadsafe(start)
        done.wait()
        return lambda: self._loop.call_soon_threadsafe(link.end, begun[0]) and None

    def close(self) -> None:
        async def stop() -> None:
            for server in self._servers:
                server.close()
            await asyncio.sleep(0.05)  # connections that were just accepted become tasks
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
