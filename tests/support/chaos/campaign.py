"""Runs seeds, shrinks the schedules that fail, and keeps the results: a campaign goes on where it was stopped."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from rlloop.runs.folder import write_whole
from tests.support.chaos.checker import check
from tests.support.chaos.fleet import API_KEY, STEPS, World, train_alone
from tests.support.chaos.schedule import KINDS, Fault, draw, shrink
from tests.support.command import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
TABLE = ROOT / "docs" / "chaos.md"
BEGIN, END = "<!-- results: written by make chaos -->", "<!-- end of results -->"
SECONDS = 600.0  # that a run may take; on a quiet machine it takes ten


@dataclass(frozen=True)
class Outcome:
    """Of one schedule."""

    problems: list[str]
    seconds: float
    cpu: float  # seconds, of all processes
    events: Counter[str]  # how often processes ended by themselves, faults began, messages were hit
    place: Path  # the world's folder, which the caller may delete


class Campaign:
    """Runs in a folder, all compared with one undisturbed run."""

    def __init__(self, place: Path, seconds: float = SECONDS) -> None:
        self.place, self.seconds, self.alone = place, seconds, place / "alone"
        self._count = 0
        if not (self.alone / "run" / "summary.json").exists():
            shutil.rmtree(self.alone, ignore_errors=True)
            train_alone(self.alone)
            self._session_alone()

    def _session_alone(self) -> None:
        from tests.support.api_client import trained_session
        from tests.support.api_process import ApiProcess
        from tests.support.command import free_port

        server = ApiProcess(self.alone / "model", self.alone / "api", free_port(), "--state-every", "2").start()
        try:
            lines = [json.dumps(result) for result in trained_session(server.url, API_KEY)]
        finally:
            server.kill()
        (self.alone / "api.jsonl").write_text("\n".join(lines) + "\n")

    def run(self, faults: Sequence[Fault]) -> Outcome:
        self._count += 1
        began, used = time.monotonic(), _cpu()
        place = self.place / f"run_{self._count}"
        shutil.rmtree(place, ignore_errors=True)
        world = World(place)
        try:
            stuck = world.drive(faults, self.seconds)
        finally:
            world.close()
        problems = check(place, self.alone) if stuck is None else [stuck]
        return Outcome(problems, time.monotonic() - began, world.cpu + _cpu() - used, _events(place), place)

    def smallest(self, faults: Sequence[Fault], tries: int = 2) -> list[Fault]:
        """The smallest part of a schedule that fails in one of `tries` runs."""

        def fails(part: list[Fault]) -> bool:
            outcome = self.run(part)
            shutil.rmtree(outcome.place)
            return bool(outcome.problems)

        return shrink(faults, lambda part: any(fails(part) for _ in range(tries)))


def _cpu() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def _events(place: Path) -> Counter[str]:
    found = Counter[str]()
    for line in (place / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "hits":
            found["messages hit"] += sum(value for value in event.values() if isinstance(value, int))
        elif event["event"] == "begun":
            found["faults"] += 1
        elif event["event"] == "ended":
            found["processes ended"] += event["code"] != 0
        else:
            found[event["event"]] += 1
    del found["over"]
    return found


def parse(text: str) -> list[Fault]:
    """A schedule as it is printed."""
    return msgspec.json.decode(text, type=list[Fault])


def as_text(faults: Sequence[Fault]) -> str:
    return msgspec.json.encode(faults).decode()


# ------------------------------------------------------------------------------------------------ results


def read_results(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text()) if file.exists() else []


def note(file: Path, record: Mapping[str, Any]) -> None:
    """Put a seed's result into the file, in place of an earlier one of it. Campaigns side by side may share a file."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        others = [each for each in read_results(file) if each["seed"] != record["seed"]]
        lines = [json.dumps(each) for each in sorted([*others, record], key=lambda each: each["seed"])]
        write_whole(file, ("[\n" + ",\n".join(lines) + "\n]\n").encode())
    finally:
        os.close(folder)


def commit() -> str:
    """Of this code; with a + where it was changed since."""
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    same = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "rlloop", "tests"], cwd=ROOT, check=False)
    return told.stdout.strip() + ("" if same.returncode == 0 else "+")


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: how often each kind of fault began, then every seed."""
    kinds, failed = Counter[str](), Counter[str]()
    for each in results:
        for kind in {fault["kind"] for fault in each["schedule"]}:
            kinds[kind] += 1
            failed[kind] += bool(each["problems"])
    passed = sum(not each["problems"] for each in results)
    cpu = sum(each["cpu_seconds"] for each in results) / max(1, len(results))
    lines = [f"{len(results)} seeds have been run: {passed} passed, {len(results) - passed} failed; "
             f"{cpu:.1f} s of processor time each.", "",
             "| fault | seeds with it | of which failed |", "|---|---|---|"]  # fmt: skip
    lines += [f"| {kind} | {kinds[kind]} | {failed[kind]} |" for kind in KINDS]
    lines += ["", "| seed | commit | faults | ended | messages hit | result |", "|---|---|---|---|---|---|"]
    for each in results:
        faults = "; ".join(f"{fault['kind']} {fault['where']}" for fault in each["schedule"])
        result = "passed" if not each["problems"] else f"**failed**: {each['problems'][0]}".replace("|", "/")
        events = each["events"]
        lines.append(
            f"| {each['seed']} | {each['commit']} | {faults} | {events.get('processes ended', 0)} | "
            f"{events.get('messages hit', 0)} | {result:.160} |"
        )
    return "\n".join(lines)


def write_table(file: Path, results: Sequence[Mapping[str, Any]]) -> None:
    before, _, rest = file.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    file.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=200, help="how many, from --first on; those with a result are not run again"
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="run seeds that have a result, too")
    parser.add_argument(
        "--replay", metavar="SCHEDULE", help="run this schedule alone, as results have it, and keep its folder"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--place", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a run may take")
    parser.add_argument("--table", action="store_true", help="then write the results into docs/chaos.md")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # its processes end with it
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        campaign = Campaign(given.place or Path(temporary), given.seconds)
        if given.replay is not None:
            outcome = campaign.run(parse(given.replay))
            print(*(outcome.problems or ["passed"]), dict(outcome.events), sep="\n")
            return 1 if outcome.problems else 0
        code = _all(campaign, given)
    if given.table:
        write_table(TABLE, read_results(given.results))
    return code


def _all(campaign: Campaign, given: argparse.Namespace) -> int:
    known = set[int]() if given.again else {each["seed"] for each in read_results(given.results)}
    failed, of = [], commit()  # what the processes have read, whatever is committed later
    for seed in range(given.first, given.first + given.seeds):
        if seed in known:
            continue
        faults = draw(seed, STEPS)
        print(f"seed {seed}: {'; '.join(map(str, faults))}", flush=True)
        outcome = campaign.run(faults)
        record = {
            "seed": seed, "commit": of, "date": datetime.now(UTC).date().isoformat(),
            "seconds": round(outcome.seconds, 1), "cpu_seconds": round(outcome.cpu, 1), "cores": os.cpu_count(),
            "schedule": msgspec.to_builtins(faults), "events": dict(outcome.events), "problems": outcome.problems,
        }  # fmt: skip
        if outcome.problems:
            failed.append(seed)
            print(f"  failed, see {outcome.place}:", *outcome.problems, sep="\n    ", flush=True)
            smallest = campaign.smallest(faults)
            record["smallest"] = msgspec.to_builtins(smallest)
            print(f"  the smallest schedule that fails: {as_text(smallest)}", flush=True)
        else:
            shutil.rmtree(outcome.place)
        note(given.results, record)
        how = f"in {outcome.seconds:.1f} s, {outcome.cpu:.1f} s of processor time"
        print(f"  {'failed' if outcome.problems else 'passed'} {how}: {dict(outcome.events)}", flush=True)
    print(f"failed: {failed}" if failed else "no seed failed", flush=True)
    return 1 if failed else 0
