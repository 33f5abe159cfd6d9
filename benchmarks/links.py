"""Regions on one machine: network namespaces behind shaped links, and proxies that delay.

A veth pair a region, a token bucket at both of its ends. A kernel need not have netem, so the delay is a user-space
proxy's. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Link:
    region: str
    gbit: float
    round_trip: float  # seconds
    number: int

    @property
    def near(self) -> str:
        """The trainer's end of the link."""
        return f"10.77.{self.number}.1"

    @property
    def far(self) -> str:
        return f"10.77.{self.number}.2"

    @property
    def namespace(self) -> str:
        return f"rlloop-{self.region}"

    @property
    def device(self) -> str:
        return f"rlv{self.number}"


LINKS = (Link("eu", 1.0, 0.040, 1), Link("us", 10.0, 0.080, 2), Link("ap", 0.2, 0.145, 3))


def sh(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


class Namespaces:
    """One namespace a link, shaped in both directions."""

    def __enter__(self) -> Namespaces:
        self.__exit__()  # what an earlier run may have left
        for link in LINKS:
            inside, peer = ("ip", "netns", "exec", link.namespace), f"{link.device}p"
            sh("ip", "netns", "add", link.namespace)
            sh("ip", "link", "add", link.device, "type", "veth", "peer", "name", peer, "netns", link.namespace)
            sh("ip", "addr", "add", f"{link.near}/24", "dev", link.device)
            sh("ip", "link", "set", link.device, "up")
            sh(*inside, "ip", "addr", "add", f"{link.far}/24", "dev", peer)
            sh(*inside, "ip", "link", "set", peer, "up")
            sh(*inside, "ip", "link", "set", "lo", "up")
            burst = max(64_000, int(link.gbit * 1e9 / 8 / 250))
            for where, device in (((), link.device), (inside, peer)):
                rate = f"{link.gbit * 1000:.0f}mbit"
                sh(*where, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", burst,
                   "latency", "100ms")  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        for link in LINKS:
            for gone in (["ip", "link", "del", link.device], ["ip", "netns", "del", link.namespace]):
                subprocess.run(gone, check=False, stderr=subprocess.DEVNULL)


def sent_bytes(link: Link) -> int:
    """Bytes sent from the trainer's side into the region since the link was made."""
    return int(Path(f"/sys/class/net/{link.device}/statistics/tx_bytes").read_text())


class Delays:
    """TCP proxies that hand on every byte half a round trip later, each way."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __enter__(self) -> Delays:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            self._loop.call_soon_threadsafe(server.close)

    def add(self, at: tuple[str, int], to: tuple[str, int], delay: float) -> None:
        async def serve() -> None:
            joined = await asyncio.start_server(lambda reader, writer: self._join(reader, writer, to, delay), *at)
            self._servers.append(joined)

        asyncio.run_coroutine_threadsafe(serve(), self._loop).result()

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: tuple[str, int], delay: float
    ) -> None:
        try:
            await asyncio.sleep(delay)
            far_reader, far_writer = await asyncio.open_connection(*to)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pipe(reader, far_writer, delay), self._pipe(far_reader, writer, delay))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

        async def hand_on() -> None:
            while True:
                due, part = await queue.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                if not part:
                    return
                writer.write(part)
                await writer.drain()

        handing = asyncio.create_task(hand_on())
        try:
            while not handing.done():
                part = await reader.read(1 << 16)
                await queue.put((self._loop.time() + delay, part))
                if not part:
                    break
            await handing
        except OSError:
            handing.cancel()
        finally:
            writer.close()
