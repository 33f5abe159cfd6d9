"""The countdown recipe across three regions: network namespaces with shaped, delayed links, and seeded faults.

    sudo .venv/bin/python benchmarks/regions.py --seeds 0 1 2 --steps 12

Each region is a namespace with a relay and an engine. Its link is a veth pair under a token bucket; a kernel need not
have netem, so delay comes from a proxy of our own, in front of the trainer and of each engine. Needs root, `ip` and
`tc`. Faults are drawn from the seed: kill -9 and SIGSTOP of engine, relay and trainer, bit flips in a relay's cache, a
partition. The checker then reads the history: `rlloop verify`, and the same run without a fleet, bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.results_schema import RESULTS, device_name, versions  # noqa: E402
from rlloop.metrics import is_timing  # noqa: E402
from rlloop.records import read_records, read_rollouts, rollout_files  # noqa: E402
from rlloop.sync.manifest import new_key  # noqa: E402
from rlloop.verify import verify  # noqa: E402

TRAINER, RELAY, ENGINE = 7000, 7001, 7002  # ports
HELD = 4.0  # seconds that something stays stopped, cut off or dead


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
            subprocess.run(["ip", "netns", "del", link.namespace], check=False)


def sent_bytes(link: Link) -> int:
    """From the trainer's side into the region, since the link was made."""
    return int(Path(f"/sys/class/net/{link.device}/statistics/tx_bytes").read_text())


class Delays:
    """TCP proxies that hand on every byte half a round trip later, each way."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def add(self, at: tuple[str, int], to: tuple[str, int], delay: float) -> None:
        async def serve() -> None:
            await asyncio.start_server(lambda reader, writer: self._join(reader, writer, to, delay), *at)

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


@dataclass
class World:
    """The processes of one run."""

    place: Path
    model: Path
    settings: list[str]
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.place / "run"

    def start(self, name: str) -> None:
        kind, _, region = name.partition("/")
        links = {link.region: link for link in LINKS}
        rlloop = [sys.executable, "-m", "rlloop"]
        if kind == "trainer":
            command = [*rlloop, *self.settings, f"run.dir={self.run}", "fleet=regions", f"fleet.port={TRAINER}",
                       "fleet.signing_key=key", "fleet.heartbeat=0.5", "fleet.timeout=3", "fleet.settle=20",
                       "fleet.anchor_every=5"]  # fmt: skip
        else:
            link = links[region]
            origin = f"http://{link.near}:{TRAINER}"
            inside = ["ip", "netns", "exec", link.namespace, *rlloop, "serve", kind, "--host", link.far]
            if kind == "relay":
                command = [*inside, "--port", RELAY, "--upstream", origin, "--cache", f"cache_{region}"]
            else:
                command = [*inside, "--port", ENGINE, "--model", self.model, "--threads", 1, "--store", origin,
                           "--relay", f"http://{link.far}:{RELAY}", "--public-key", "key.pub", "--join", origin,
                           "--region", region, "--advertise", f"http://{link.near}:{ENGINE}"]  # fmt: skip
        output = (self.place / f"{name.replace('/', '_')}.log").open("ab")
        environment = {**os.environ, "RLLOOP_TOKEN": self.token, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.processes[name] = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, cwd=self.place, env=environment
        )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def steps(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") - 1 if metrics.exists() else -1

    def close(self) -> None:
        for name in self.processes:
            self.kill(name)


# ------------------------------------------------------------------------------------------------ faults


def _killed(name: str) -> Callable[[World], None]:
    def fault(world: World) -> None:
        world.kill(name)
        time.sleep(HELD if name != "trainer" else 0)
        world.start(name)

    return fault


def _stopped(name: str) -> Callable[[World], None]:
    def fault(world: World) -> None:
        world.processes[name].send_signal(signal.SIGSTOP)
        time.sleep(HELD)
        world.processes[name].send_signal(signal.SIGCONT)

    return fault


def _flipped(region: str) -> Callable[[World], None]:
    def fault(world: World) -> None:
        for file in (world.place / f"cache_{region}").glob("blobs/??/*"):
            content = bytearray(file.read_bytes())
            content[len(content) // 3] ^= 1
            file.write_bytes(content)

    return fault


def _cut(link: Link) -> Callable[[World], None]:
    def fault(world: World) -> None:
        sh("ip", "link", "set", link.device, "down")
        time.sleep(HELD)
        sh("ip", "link", "set", link.device, "up")

    return fault


def draw_faults(seed: int, steps: int) -> list[tuple[int, str, Callable[[World], None]]]:
    """(after which step, what, how), for a seed; the last steps have none, so that all can come together again."""
    dice = random.Random(seed)
    kinds: list[tuple[str, Callable[[World], None]]] = [("kill -9 trainer", _killed("trainer"))]
    for link in LINKS:
        for part in ("engine", "relay"):
            name = f"{part}/{link.region}"
            kinds += [(f"kill -9 {name}", _killed(name)), (f"SIGSTOP {name}", _stopped(name))]
        kinds += [(f"bit flips relay/{link.region}", _flipped(link.region)), (f"partition {link.region}", _cut(link))]
    return [(step, *dice.choice(kinds)) for step in range(1, steps - 2) if dice.random() < 0.75]


# ------------------------------------------------------------------------------------------------ one run


def drive(world: World, faults: list[tuple[int, str, Callable[[World], None]]], steps: int) -> list[str]:
    """Start everything, hurt it as drawn, wait for the end. Returns what was done."""
    for link in LINKS:
        world.start(f"relay/{link.region}")
        world.start(f"engine/{link.region}")
    world.start("trainer")
    done: list[str] = []
    deadline = time.monotonic() + 3600
    while world.processes["trainer"].poll() is None:
        assert time.monotonic() < deadline, "the run does not end"
        if faults and world.steps() >= faults[0][0]:
            step, name, fault = faults.pop(0)
            fault(world)
            done.append(f"after step {step}: {name}")
        time.sleep(0.05)
    assert world.processes["trainer"].returncode == 0, (world.place / "trainer.log").read_text()[-3000:]
    assert world.steps() == steps
    return done


def check(run: Path, local: Path, steps: int) -> list[str]:
    """What the history says against the run; empty where nothing does."""
    problems = [f"{found.name}: {each}" for found in verify(run, rescored=64) for each in found.problems]
    if outcome(run) != outcome(local):
        problems.append("the run is not the one without a fleet, bit for bit")
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (folder / f"checkpoints/step_{steps}" / name for folder in (run, local))
        if ours.read_bytes() != theirs.read_bytes():
            problems.append(f"{name} differs from the run without a fleet")
    last = {event["engine"].partition("/")[0] for event in read_records(run / "fleet.jsonl")
            if event["event"] == "serving" and event["version"] == steps}  # fmt: skip
    problems += [f"region {link.region} never came to the last version" for link in LINKS if link.region not in last]
    return problems


def outcome(run: Path) -> list[Any]:
    """All of a run but clocks, transport and places."""
    metrics = [
        {name: value for name, value in record.items() if not is_timing(name) and not name.startswith("sync/")}
        for record in read_records(run / "metrics.jsonl")
    ]
    rollouts = [
        [{key: value for key, value in row.items() if key != "origin"} for row in read_rollouts(file)]
        for file in rollout_files(run)
    ]
    return [metrics, rollouts, list(read_records(run / "parity.jsonl"))]


def measured(run: Path, sent: dict[str, int]) -> dict[str, Any]:
    """Figures of one run, by region where they are a region's."""
    records = [record for record in read_records(run / "metrics.jsonl") if record["step"] > 0]
    delta = sum(record.get("sync/wire_bytes", 0) for record in records)
    regions = {}
    for link in LINKS:
        live = [record[key] for record in records if (key := f"fleet/{link.region}/sync_seconds") in record]
        pause = [record[key] for record in records if (key := f"fleet/{link.region}/sync_pause_seconds") in record]
        tokens = sum(record.get(f"fleet/{link.region}/tokens", 0) for record in records)
        regions[link.region] = {
            "gbit": link.gbit, "round_trip": link.round_trip, "bytes_into_region": sent[link.region],
            "sync_seconds_p50": float(np.quantile(live, 0.5)), "sync_seconds_p99": float(np.quantile(live, 0.99)),
            "pause_seconds_max": max(pause), "tokens": tokens,
            "k3_max": max(abs(record.get(f"fleet/{link.region}/k3", 0.0)) for record in records),
        }  # fmt: skip
    return {"published_bytes": delta, "regions": regions}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the faults; -1: a run without any")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--place", type=Path, default=Path("/tmp/rlloop-regions"), help="folder for the runs")
    parser.add_argument("overrides", nargs="*", help="of the recipe")
    given = parser.parse_args()
    shutil.rmtree(given.place, ignore_errors=True)
    given.place.mkdir(parents=True)
    settings = [
        "train", "--config-name", "countdown", f"trainer.num_steps={given.steps}", "rollout.num_prompts=16",
        "rollout.group_size=8", "eval.num_draws=200", "eval.every=0", "checkpoint.every=3", *given.overrides,
    ]  # fmt: skip
    rlloop = [sys.executable, "-m", "rlloop"]
    local = given.place / "local"
    subprocess.run([*rlloop, *settings, f"run.dir={local}"], check=True, cwd=given.place, env={
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})  # fmt: skip
    results, failed = [], False
    for seed in given.seeds:
        place = given.place / f"seed_{seed}"
        place.mkdir()
        new_key(place / "key")
        world = World(place, model_folder(settings), settings)
        delays = Delays()
        with Namespaces():
            for link in LINKS:
                delays.add((link.near, TRAINER), ("127.0.0.1", TRAINER), link.round_trip / 2)
                delays.add((link.near, ENGINE), (link.far, ENGINE), link.round_trip / 2)
            began = {link.region: sent_bytes(link) for link in LINKS}
            try:
                faults = [] if seed < 0 else draw_faults(seed, given.steps)
                done = drive(world, faults, given.steps)
                sent = {link.region: sent_bytes(link) - began[link.region] for link in LINKS}
            finally:
                world.close()
        problems = check(world.run, local, given.steps)
        results.append({"seed": seed, "faults": done, "problems": problems, **measured(world.run, sent)})
        print(json.dumps(results[-1], indent=1), flush=True)
        failed = failed or bool(problems)
    about = {"device": device_name(), "versions": versions(),
             "steps": given.steps}  # fmt: skip
    (RESULTS / "regions-history.json").write_text(json.dumps({**about, "runs": results}, indent=2) + "\n")
    print("failed" if failed else f"{len(results)} runs passed, seeds {given.seeds}")
    return 1 if failed else 0


def model_folder(settings: list[str]) -> Path:
    """Where the recipe's own model lies: engines start from the same folder."""
    from rlloop.compose import build, compose_recipe
    from rlloop.launch import prepare

    prepared = prepare(build(compose_recipe("countdown", settings[3:])))
    prepared.scorer.close()
    return prepared.task.model_folder()


if __name__ == "__main__":
    sys.exit(main())
