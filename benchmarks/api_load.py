"""Many clients on one training API: errors, memory over time, fairness, latencies.

    python benchmarks/api_load.py               # 64 sessions of LoRA models for 10 minutes
    python benchmarks/api_load.py --tenants     # 63 sessions of 3 steps each: the time of a step among 62 others
    python benchmarks/api_load.py --quick       # 8 sessions for 20 seconds, nothing recorded

Each client samples from its own weights, trains on its samples and updates, again and again. The server is a process of
its own; clients are threads of a few more. A client's rate is that of its whole rounds, from the moment when all have
their models and have made a first one; fairness is the lowest rate over the highest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from api_overhead import SMALL
from results_schema import ROOT, Figure, report

sys.path.insert(0, str(ROOT))

from rlloop.models import new_model, save_model
from tests.support.api_client import Api, output, sampled
from tests.support.api_process import ApiProcess, children, processor_seconds
from tests.support.command import free_port

PATIENCE = 600.0  # seconds for one result
PARTS = ("publish", "sample", "train")


class Client(threading.Thread):
    """One session. `rounds`: begin and end of each, and seconds of its parts; `errors`: what went wrong, in words."""

    def __init__(self, url: str, number: int, start: threading.Barrier) -> None:
        super().__init__(daemon=True)
        self.api, self.number, self.start_ = Api(url, f"tml-client-{number}"), number, start
        self.until = self.steps = float("inf")
        self.rounds: list[list[float]] = []
        self.errors: list[str] = []

    def run(self) -> None:
        try:
            self.api.start("model", rank=8)
            self._round(0)
            self.start_.wait()
            self.start_.wait()  # now `until` and `steps` are set
            while time.monotonic() < self.until and len(self.rounds) < self.steps:
                self.rounds.append(self._round(1 + len(self.rounds)))
        except Exception as error:
            self.start_.abort()
            self.errors.append(f"client {self.number}: {type(error).__name__}: {error}")

    def _round(self, step: int) -> list[float]:
        prompt, times = [5 + self.number, 9, 14, step % 100], [time.monotonic()]
        saved = self.api.command_("save_weights_for_sampler", sampling_session_seq_id=step)
        sampler = self.api.result(saved, PATIENCE)["sampling_session_id"]
        times.append(time.monotonic())
        asked = self.api.sample_(sampler, 0, prompt, n=2, max_tokens=8)
        completions = sampled(self.api.result(asked["request_id"], PATIENCE))
        times.append(time.monotonic())
        gradient = self.api.forward_backward_([prompt + tokens for tokens in completions]).json()["request_id"]
        update = self.api.command_("optim_step", adam_params={"learning_rate": 1e-3})
        for done in (output(self.api.result(gradient, PATIENCE)), self.api.result(update, PATIENCE)):
            if isinstance(done, dict) and "error" in done:
                self.errors.append(f"client {self.number}: {done['error']}")
        end = time.monotonic()
        return [times[0], end, *np.diff([*times, end]).tolist()]


def clients(url: str, numbers: range) -> None:
    """Sessions of these numbers, in this process: says when all have made a round, then reads how long and how many."""
    start = threading.Barrier(len(numbers) + 1)
    all_ = [Client(url, number, start) for number in numbers]
    for client in all_:
        client.start()
    try:
        start.wait(PATIENCE)
        print("ready", flush=True)
        until, steps = map(float, sys.stdin.readline().split())
        for client in all_:
            client.until, client.steps = until, steps
        start.wait()
    except threading.BrokenBarrierError:
        print("failed", flush=True)
    for client in all_:
        client.join()
    print(json.dumps([[client.rounds, client.errors] for client in all_]), flush=True)


class Clients:
    """Sessions in a few processes."""

    def __init__(self, url: str, count: int, processes: int) -> None:
        bounds = np.linspace(0, count, processes + 1).astype(int).tolist()
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--url", url, "--numbers", str(begin), str(end)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for begin, end in pairwise(bounds)
        ]  # fmt: skip

    def begin(self, seconds: float, steps: float) -> None:
        """Once all have made their first rounds."""
        lines = [self._read(each) for each in self._processes]
        assert lines == ["ready\n"] * len(lines), "a client failed in its first round; see above"
        self.began = time.monotonic()
        for each in self._processes:
            assert each.stdin is not None
            print(self.began + seconds, steps, file=each.stdin, flush=True)

    def results(self) -> list[tuple[np.ndarray, list[str]]]:
        """Of each client its rounds, [n, 5], and its errors, when all are done."""
        found: list[Any] = [one for each in self._processes for one in json.loads(self._read(each))]
        for each in self._processes:
            each.wait()
        return [(np.array(rounds).reshape(-1, 5), errors) for rounds, errors in found]

    @staticmethod
    def _read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()


def resident(pid: int) -> float:
    """Memory of a process, in MiB."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that records nothing")
    parser.add_argument("--tenants", action="store_true", help="63 sessions of 3 steps each")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--processes", type=int, default=2, help="that the clients are in")
    parser.add_argument("--url", help=argparse.SUPPRESS)  # of the server, in the clients' processes
    parser.add_argument("--numbers", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.url is not None:
        clients(given.url, range(*given.numbers))
        return
    count, seconds, steps = given.clients, given.seconds, float("inf")
    if given.quick:
        count, seconds = 8, 20.0
    if given.tenants:
        count, seconds, steps = 63, 1e6, 3.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(new_model(SMALL, seed=0), folder / "model")
        server = ApiProcess(folder / "model", folder / "api", free_port(), "--idle", "7200").start()
        load = Clients(server.url, count, given.processes)
        load.begin(seconds, steps)
        pids = [server.pid, *children(server.pid)]  # it answers, and its service computes
        memory, over = [sum(map(resident, pids))], threading.Event()

        def watch() -> None:
            while not over.wait(min(seconds, 600.0) / 20):
                memory.append(sum(map(resident, pids)))
                print(f"{time.monotonic() - load.began:.0f} s, {memory[-1]:.0f} MiB", file=sys.stderr, flush=True)

        before = sum(map(processor_seconds, pids))
        watcher = threading.Thread(target=watch)
        watcher.start()
        found = load.results()
        used = sum(map(processor_seconds, pids)) - before
        over.set()
        watcher.join()
        memory.append(sum(map(resident, pids)))
        server.kill()
    errors = [error for _, errors in found for error in errors]
    print("\n".join(errors[:20]), file=sys.stderr)
    done = [rounds for rounds, _ in found if len(rounds)]
    rounds = np.concatenate(done)
    took = rounds[:, 1] - rounds[:, 0]
    rates = [len(each) / (each[-1, 1] - each[0, 0]) for each in done] + [0.0] * (len(found) - len(done))
    work = f"api load, {count} sessions, " + (f"{seconds:g} s" if steps == float("inf") else f"{steps:g} steps each")

    def milliseconds(what: str, value: float) -> Figure:
        return Figure(name=f"{work}: {what}", unit="ms", value=value, lower_is_better=True)

    figures = [
        Figure(name=f"{work}: errors", unit="errors", value=len(errors), lower_is_better=True),
        Figure(name=f"{work}: fairness, lowest over highest rate", unit="", value=min(rates) / max(rates)),
        Figure(name=f"{work}: all steps", unit="s", value=float(rounds[:, 1].max() - rounds[:, 0].min()),
               lower_is_better=True),
        milliseconds("server's processor time of a step", 1e3 * used / len(rounds)),
        milliseconds("step, median", 1e3 * float(np.median(took))),
        milliseconds("step, 99 of 100", 1e3 * float(np.quantile(took, 0.99))),
        *(milliseconds(f"step's {part}, median", 1e3 * float(np.median(rounds[:, 2 + at])))
          for at, part in enumerate(PARTS)),
    ]  # fmt: skip
    if steps == float("inf"):
        half = memory[len(memory) // 2]
        figures.append(Figure(name=f"{work}: memory, end over middle", unit="", value=memory[-1] / half,
                              lower_is_better=True))  # fmt: skip
    report("api-tenants" if given.tenants else "api-load", figures, write=not given.quick)


if __name__ == "__main__":
    main()
