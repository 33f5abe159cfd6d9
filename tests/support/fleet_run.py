"""A fleet of real processes for fault tests: engines, relays and the trainer's, on ports that the system chooses."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from rlloop.sync.manifest import new_key
from tests.support.command import Command, free_port
from tests.support.tiny_run import HELD, history, make_model

TOKEN = "a token for the tests of a fleet"


class Server:
    """`rlloop serve ...`; its address is known once `url` has returned."""

    def __init__(self, place: Path, *arguments: str) -> None:
        environment = {**os.environ, "RLLOOP_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        self.process = Command("serve", *arguments, cwd=place, env=environment)
        self._url: str | None = None

    @property
    def url(self) -> str:
        if self._url is None:
            line = self.process.stdout.readline()
            assert "http" in line, line + self.process.stdout.read()
            self._url = line.rpartition(" ")[2].strip()
        return self._url

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.communicate()


class Fleet:
    """One trainer's address, relays and engines around it, in a folder."""

    def __init__(self, place: Path) -> None:
        self.place, self.port = place, free_port()
        self.origin = f"http://127.0.0.1:{self.port}"
        self.servers: list[Server] = []
        make_model(place)
        (place / "learnable.py").write_text(HELD)
        new_key(place / "key")

    def relay(self, region: str) -> Server:
        return self._start("relay", "--upstream", self.origin, "--cache", f"cache_{region}")

    def engine(self, region: str, relay: Server | None, *more: str) -> Server:
        through = [] if relay is None else ["--relay", relay.url]
        return self._start(
            "engine", "--model", "model", "--store", self.origin, *through, "--public-key", "key.pub",
            "--join", self.origin, "--region", region, "--threads", "1", "--interval", "0.5", *more,
        )  # fmt: skip

    def settings(self) -> list[str]:
        """Overrides of `rlloop train` for this fleet."""
        return [
            "fleet=regions", f"fleet.port={self.port}", "fleet.signing_key=key", "fleet.heartbeat=0.2",
            "fleet.timeout=2.0", "fleet.settle=30", "fleet.anchor_every=4",
        ]  # fmt: skip

    def close(self) -> None:
        for server in self.servers:
            server.kill()

    def _start(self, *arguments: str) -> Server:
        self.servers.append(Server(self.place, *arguments))
        return self.servers[-1]


def events(folder: Path, event: str) -> list[dict]:
    return [each for each in read_records(folder / "fleet.jsonl") if each["event"] == event]


def outcome(folder: Path) -> str:
    """A run's records without clocks, transport and engines' origins: equal wherever the engines are."""
    metrics, certificate, _ = history(folder)
    kept = [{name: value for name, value in record.items() if not name.startswith("sync/")} for record in metrics]  # pyright: ignore
    rollouts = [
        [{key: value for key, value in row.items() if key != "origin"} for row in read_rollouts(file)]
        for file in rollout_files(folder)
    ]
    return json.dumps([kept, certificate, rollouts])
