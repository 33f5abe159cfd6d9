"""The countdown recipe across three regions: network namespaces with shaped, delayed links, and seeded faults.

    sudo .venv/bin/python benchmarks/regions.py --seeds 3 5 6 --steps 30     # faults; the checker's history
    sudo .venv/bin/python benchmarks/regions.py --seeds -1 --steps 60        # none; figures, too

Each region is a namespace with a relay and an engine. Its link is a veth pair under a token bucket; a kernel need not
have netem, so delay comes from a proxy of our own, in front of the trainer and of each engine. Needs root, `ip` and
`tc`. Faults are drawn from the seed: kill -9 and SIGSTOP of engine, relay and trainer, bit flips in a relay's cache, a
partition; each at a moment of its own within a step. The checker then reads the history: `rlloop verify`, and the same
run without a fleet, bit for bit. It writes histories/regions.json, a record a seed: what was done, and what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.links import LINKS, Delays, Link, Namespaces, sent_bytes, sh  # noqa: E402
from benchmarks.results_schema import Figure, device_name, report, versions  # noqa: E402
from rlloop.audit import Extent, verify  # noqa: E402
from rlloop.metrics import is_timing  # noqa: E402
from rlloop.parity.certificate import comparison_of  # noqa: E402
from rlloop.runs.folder import read_records, read_rollouts, rollout_files  # noqa: E402
from rlloop.sync.manifest import Head, new_key  # noqa: E402

TRAINER, RELAY, ENGINE = 7000, 7001, 7002  # ports
HISTORY = Path(__file__).parent / "histories" / "regions.json"
DTYPE = "bfloat16"  # of engines, whose masters are float32
HELD = 8.0  # seconds that something stays stopped, cut off or dead


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
                command = [*inside, "--port", ENGINE, "--model", self.model, "--dtype", DTYPE, "--threads", 1,
                           "--store", origin, "--relay", f"http://{link.far}:{RELAY}", "--public-key", "key.pub",
                           "--join", origin, "--region", region,
                           "--advertise", f"http://{link.near}:{ENGINE}"]  # fmt: skip
        output = (self.place / f"{name.replace('/', '_')}.log").open("ab")
        environment = {**os.environ, "RLLOOP_TOKEN": self.token, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.processes[name] = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, cwd=self.place, env=environment
        )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def fetched(self, link: Link) -> int:
        """Bytes of weights that the region's relay brought over its link."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.get(f"http://{link.far}:{RELAY}/health", headers=headers).json()["fetched_bytes"]

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
        for file in (world.place / f"cache_{region}").glob("blobs/??/" + "?" * 64):  # whole ones
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


Fault = tuple[int, float, str, Callable[[World], None]]  # after which step, seconds later, what, how


def draw_faults(seed: int, steps: int) -> list[Fault]:
    """For a seed; the second half has none, so that processes started anew can come back before the run ends."""
    dice = random.Random(seed)
    kinds: list[tuple[str, Callable[[World], None]]] = [
        ("kill -9 trainer", _killed("trainer")),
        ("SIGSTOP trainer", _stopped("trainer")),
    ]
    for link in LINKS:
        for part in ("engine", "relay"):
            name = f"{part}/{link.region}"
            kinds += [(f"kill -9 {name}", _killed(name)), (f"SIGSTOP {name}", _stopped(name))]
        kinds += [(f"bit flips relay/{link.region}", _flipped(link.region)), (f"partition {link.region}", _cut(link))]
    return [
        (step, round(dice.uniform(0, 2), 2), *dice.choice(kinds))
        for step in range(1, steps // 2)
        if dice.random() < 0.75
    ]


# ------------------------------------------------------------------------------------------------ one run


def drive(world: World, faults: list[Fault], steps: int) -> list[str]:
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
            step, later, name, fault = faults.pop(0)
            time.sleep(later)
            fault(world)
            done.append(f"{later} s after step {step}: {name}")
        time.sleep(0.05)
    assert world.processes["trainer"].returncode == 0, (world.place / "trainer.log").read_text()[-3000:]
    assert world.steps() == steps
    return done


def check(run: Path, local: Path, steps: int) -> list[str]:
    """Problems found in the run's history; empty if there are none."""
    problems = [f"{found.name}: {each}" for found in verify(run, Extent(rescored=64)) for each in found.problems]
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
    return [metrics, rollouts, [comparison_of(line) for line in read_records(run / "parity.jsonl")]]


PARTS = ("fetch", "stage", "verify", "drain", "pause")


def figures(run: Path, fetched: dict[str, int], entered: dict[str, int]) -> list[Figure]:
    """Of a run without faults: what a version weighs and how long it takes, from the trainer's memory to every replica.

    A step's record holds the publication before it. The first is of version 0, which engines have from their disks.
    """
    records = [record for record in read_records(run / "metrics.jsonl") if record["step"] > 0]
    newest = Head.decode((run / "weights" / "latest").read_bytes()).newest
    published = sum(record["sync/wire_bytes"] for record in records[1:]) + newest.wire_bytes
    tokens = sum(record.get(f"fleet/{link.region}/tokens", 0) for record in records for link in LINKS)
    made = [
        Figure(name=f"weights over the wide network by regions x deltas, {len(records)} versions",
               unit="x", value=sum(fetched.values()) / (len(LINKS) * published)),
        Figure(name="all bytes into the regions (weights, prompts, headers) by regions x deltas", unit="x",
               value=sum(entered.values()) / (len(LINKS) * published)),
        Figure(name="full weights by a version's bytes, manifest included", unit="x",
               value=float(np.mean([record["sync/ratio"] for record in records]))),
        Figure(name=f"KL by region, largest k3 of any step ({tokens:,} tokens)", unit="nats", value=max(
               abs(record.get(f"fleet/{link.region}/k3", 0.0)) for record in records for link in LINKS)),
    ]  # fmt: skip
    steady = records[1:]
    taken: dict[str, list[float]] = {
        "publish to all replicas live": [
            record["sync/publish_seconds"] + record["sync/live_seconds"] for record in steady
        ]
    }
    for part in ("diff", "encode", "upload"):
        taken[part] = [record[f"sync/{part}_seconds"] for record in steady]
    for link in LINKS:
        for part in ("", *PARTS):
            name = f"fleet/{link.region}/sync_{part}{'_' if part else ''}seconds"
            where = f"{link.region} ({link.gbit:g} Gbit/s, {1000 * link.round_trip:.0f} ms)"
            said = {"": "live", "fetch": "wide-area"}.get(part, part)
            taken[f"{where}: {said}"] = [record[name] for record in steady if name in record]
    share = max(record.get(f"fleet/{link.region}/sync_pause_seconds", 0.0) / record["time/step"]
                for record in steady for link in LINKS)  # fmt: skip
    made.append(Figure(name="longest pause of an engine by the step's time", unit="%", value=100 * share))
    for what, seconds in taken.items():
        for which, at in (("p50", 0.5), ("p99", 0.99)):
            value = 1000 * float(np.quantile(seconds, at))
            made.append(Figure(name=f"{what}, {which}", unit="ms", value=value, lower_is_better=True))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the faults; -1: a run without any")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--place", type=Path, default=Path("/tmp/rlloop-regions"), help="folder for the runs")
    parser.add_argument("overrides", nargs="*", help="of the recipe")
    given = parser.parse_args()
    shutil.rmtree(given.place, ignore_errors=True)
    given.place.mkdir(parents=True)
    settings = [
        "train", "--config-name", "countdown", f"model.dtype={DTYPE}", f"trainer.num_steps={given.steps}",
        "rollout.num_prompts=16", "rollout.group_size=8", "eval.num_draws=200", "eval.every=0", "checkpoint.every=3",
        *given.overrides,
    ]  # fmt: skip
    rlloop = [sys.executable, "-m", "rlloop"]
    local = given.place / "local"
    subprocess.run([*rlloop, *settings, f"run.dir={local}"], check=True, cwd=given.place, env={
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})  # fmt: skip
    found: dict[int, dict[str, Any]] = {}
    for seed in given.seeds:
        place = given.place / f"seed_{seed}"
        place.mkdir()
        new_key(place / "key")
        world = World(place, model_folder(settings), settings)
        with Namespaces(), Delays() as delays:
            for link in LINKS:
                delays.add((link.near, TRAINER), ("127.0.0.1", TRAINER), link.round_trip / 2)
                delays.add((link.near, ENGINE), (link.far, ENGINE), link.round_trip / 2)
            began = {link.region: sent_bytes(link) for link in LINKS}
            try:
                faults = [] if seed < 0 else draw_faults(seed, given.steps)
                done = drive(world, faults, given.steps)
                measured = [] if seed >= 0 else LINKS  # a relay that was killed may not be back yet
                fetched = {link.region: world.fetched(link) for link in measured}
                entered = {link.region: sent_bytes(link) - began[link.region] for link in LINKS}
            finally:
                world.close()
        problems = check(world.run, local, given.steps)
        if seed < 0 and (fallen := events(world.run).keys() & {"lost", "quarantined", "reissued"}):
            problems.append(f"without a fault: {', '.join(sorted(fallen))}")
        found[seed] = {"seed": seed, "steps": given.steps, "faults": done, "fleet": events(world.run),
                       "problems": problems}  # fmt: skip
        print(json.dumps(found[seed], indent=1), flush=True)
        record(found)
        if seed < 0 and not problems:
            report("regions", figures(world.run, fetched, entered))
    failed = [seed for seed, each in found.items() if each["problems"]]
    print(f"failed: {failed}" if failed else f"{len(found)} runs passed, seeds {given.seeds}")
    return 1 if failed else 0


def events(run: Path) -> dict[str, int]:
    """Counts of fleet events: engines that joined, served or dropped out, and completions sampled again."""
    counts: Counter[str] = Counter()
    for event in read_records(run / "fleet.jsonl"):
        counts[event["event"]] += event.get("completions", 1)
    return dict(counts)


def record(found: dict[int, dict[str, Any]]) -> None:
    """Into the history, in the place of what these seeds had before."""
    known = json.loads(HISTORY.read_text())["runs"] if HISTORY.exists() else []
    runs = {each["seed"]: each for each in known} | found
    HISTORY.parent.mkdir(exist_ok=True)
    content = {"device": device_name(), "versions": versions(), "runs": [runs[seed] for seed in sorted(runs)]}
    HISTORY.write_text(json.dumps(content, indent=2) + "\n")


def model_folder(settings: list[str]) -> Path:
    """Folder of the recipe's own model, from which engines start too."""
    from rlloop.launch.compose import build, compose_recipe
    from rlloop.launch.prepare import prepare

    prepared = prepare(build(compose_recipe("countdown", settings[3:])))
    prepared.scorer.close()
    return prepared.task.model_folder()


if __name__ == "__main__":
    sys.exit(main())
