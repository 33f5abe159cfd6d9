"""Many clients on one training API: errors, memory over time, fairness, latencies.

    python benchmarks/api_load.py            # 64 sessions of LoRA models for 10 minutes
    python benchmarks/api_load.py --quick    # 8 sessions for 20 seconds, nothing recorded

Each client samples from its own weights, trains on its samples and updates, again and again. The server is a process of
its own. Fairness is the number of updates of the client that has the fewest, over that of the one that has the most.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from api_overhead import SMALL
from results_schema import ROOT, Figure, report, table

sys.path.insert(0, str(ROOT))

from rlloop.models import new_model, save_model
from tests.support.api_client import Api, output, sampled
from tests.support.api_process import ApiProcess, free_port


class Client(threading.Thread):
    """One session. `latencies`: seconds of each round; `errors`: what went wrong, in words."""

    def __init__(self, url: str, number: int, until: float) -> None:
        super().__init__(daemon=True)
        self.api, self.number, self.until = Api(url, f"tml-client-{number}"), number, until
        self.latencies: list[float] = []
        self.errors: list[str] = []

    def run(self) -> None:
        try:
            self.api.start("model", rank=8)
            while time.monotonic() < self.until:
                began = time.monotonic()
                self._round(len(self.latencies))
                self.latencies.append(time.monotonic() - began)
        except Exception as error:
            self.errors.append(f"client {self.number}: {type(error).__name__}: {error}")

    def _round(self, step: int) -> None:
        prompt = [5 + self.number, 9, 14, step % 100]
        sampler = self.api.sampler(step)
        asked = self.api.sample_(sampler, 0, prompt, n=2, max_tokens=8)
        completions = sampled(self.api.result(asked["request_id"]))
        gradient = self.api.forward_backward_([prompt + tokens for tokens in completions]).json()["request_id"]
        update = self.api.command_("optim_step", adam_params={"learning_rate": 1e-3})
        for done in (output(self.api.result(gradient)), self.api.result(update)):
            if isinstance(done, dict) and "error" in done:
                self.errors.append(f"client {self.number}: {done['error']}")


def resident(pid: int) -> float:
    """Memory of a process in MiB."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that records nothing")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    count, seconds = (8, 20.0) if given.quick else (given.clients, given.seconds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(new_model(SMALL, seed=0), folder / "model")
        server = ApiProcess(folder / "model", folder / "api", free_port()).start()
        clients = [Client(server.url, number, time.monotonic() + seconds) for number in range(count)]
        for client in clients:
            client.start()
        memory = list[float]()
        while any(client.is_alive() for client in clients):
            time.sleep(seconds / 20)
            memory.append(resident(server.pid))
            done = sum(len(client.latencies) for client in clients)
            print(f"{done} updates, {memory[-1]:.0f} MiB", file=sys.stderr, flush=True)
        used = processor_seconds(server.pid)
        server.kill()
    errors = [error for client in clients for error in client.errors]
    print("\n".join(errors[:20]), file=sys.stderr)
    rounds, latencies = [len(each.latencies) for each in clients], np.concatenate([c.latencies for c in clients])
    half = len(memory) // 2
    work = f"api load, {count} sessions, {seconds:g} s"
    figures = [
        Figure(name=f"{work}: errors", unit="errors", value=len(errors), lower_is_better=True),
        Figure(name=f"{work}: fairness, fewest over most updates", unit="", value=min(rounds) / max(max(rounds), 1)),
        Figure(name=f"{work}: memory, end over middle", unit="", value=memory[-1] / memory[half], lower_is_better=True),
        Figure(name=f"{work}: updates", unit="updates/s", value=sum(rounds) / seconds),
        Figure(name=f"{work}: server's processor time", unit="ms/update", value=1e3 * used / max(sum(rounds), 1),
               lower_is_better=True),
        Figure(name=f"{work}: round, median", unit="ms", value=1e3 * float(np.median(latencies)), lower_is_better=True),
        Figure(name=f"{work}: round, 99 of 100", unit="ms", value=1e3 * float(np.quantile(latencies, 0.99)),
               lower_is_better=True),
    ]  # fmt: skip
    if given.quick:
        print(table(figures))
    else:
        report("api-load", figures)


if __name__ == "__main__":
    main()
