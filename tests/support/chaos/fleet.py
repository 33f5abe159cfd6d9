"""The processes of a run: trainer, relays, engines, training API; what hurts them, and what starts them again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rlloop.sync.manifest import new_key
from tests.support.api_client import trained_session
from tests.support.api_process import children, processor_seconds
from tests.support.chaos import child
from tests.support.chaos.liars import lie
from tests.support.chaos.proxy import Network
from tests.support.chaos.schedule import LINKS, PROCESSES, Fault
from tests.support.command import Command, free_port
from tests.support.tiny_run import make_model

STEPS = 6
LONGER = 3.0  # seconds that a link's fault lasts beyond its time, if it has hit nothing by then
TOKEN = "campaign-secret-of-the-fleet-0123456789"
API_KEY = "tml-campaign-secret-of-the-client"
# Beside a run's own: every step's weights are kept, so that each token can be drawn again.
RUN = (
    "train", "--config-name", "countdown", "run.dir=run", "model.path=model", f"trainer.num_steps={STEPS}",
    "model.dtype=bfloat16", "checkpoint.every=2", "checkpoint.keep=10", "eval.num_draws=4", "eval.every=0",
    "rollout.num_prompts=4", "rollout.group_size=4", "trainer.lr=1e-2", "trainer.num_minibatches=2",
    "reward._target_=learnable.reward", "scoring.timeout=240",
)  # fmt: skip


def prepare(place: Path) -> None:
    """Model, reward and keys."""
    place.mkdir(parents=True)
    make_model(place)
    new_key(place / "key")
    new_key(place / "other_key")


def train_alone(place: Path, timeout: float = 300.0) -> None:
    """The undisturbed run: one process, no network. Its weights are kept after every step."""
    prepare(place)
    process = Command(*RUN, "checkpoint.every=1", cwd=place, env={**os.environ, "OMP_NUM_THREADS": "1"})
    output, _ = process.communicate(timeout)
    assert process.returncode == 0, output


class World:
    """A fleet in a folder. Everything that happens to it is in `events.jsonl`."""

    def __init__(self, place: Path) -> None:
        self.place, self.run = place, place / "run"
        prepare(place)
        for folder in ("logs", "control"):
            (place / folder).mkdir()
        self.network = Network()
        self._ports = {name: free_port() for name in (*PROCESSES, *LINKS)}
        for link in LINKS:
            self.network.add(link, self._ports[link], self._ports[link.partition(">")[2]])
        self._controls = {name: child.Control(self._control(name)) for name in PROCESSES}
        self._running: dict[str, Command] = {}
        self._down = Counter[str]()  # process -> faults that keep it from running
        self._full: dict[str, int] = {}  # process -> bytes that a file may have
        self._wrong: dict[str, str] = {}  # engine -> what it was given wrong
        self._lies: dict[str, Callable[[], object]] = {}  # link -> what ends the lie
        self._used: dict[int, float] = {}  # process id -> seconds of processor time

    def close(self) -> None:
        for name in list(self._running):
            self._kill(name)
        self.network.close()

    def note(self, what: str, **facts: object) -> None:
        with (self.place / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "event": what, **facts}) + "\n")

    def records(self) -> int:
        """Of steps, step 0 among them."""
        metrics = self.run / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    # ------------------------------------------------------------------------------------------------ processes

    def _control(self, name: str) -> Path:
        return self.place / "control" / name.replace("/", "_")

    def _address(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    def _command(self, name: str) -> Sequence[str]:
        kind, _, region = name.partition("/")
        port = ("--port", str(self._ports[name]))
        if kind == "trainer":
            us = self._address("trainer>engine/us")
            return (
                *RUN, "fleet=regions", f"fleet.port={port[1]}", "fleet.signing_key=key", "fleet.heartbeat=0.1",
                "fleet.timeout=0.5", "fleet.settle=2", "fleet.patience=30", "fleet.anchor_every=3",
                f'+fleet.engines.us=["{us}"]',
            )  # fmt: skip
        if kind == "relay":
            upstream = self._address(f"{name}>trainer")
            return ("serve", "relay", *port, "--upstream", upstream, "--cache", f"cache_{region}")
        if kind == "api":
            return ("serve", "api", *port, "--model", "model", "--folder", "api", "--threads", "1",
                    "--leaf-tokens", "64", "--state-every", "2")  # fmt: skip
        origin, key = self._address(f"{name}>trainer"), "other_key" if self._wrong.get(name) == "key" else "key"
        joins = ("--join", origin, "--advertise", self._address(f"trainer>{name}")) if region == "eu" else ()
        return (
            "serve", "engine", *port, "--model", "model", "--dtype", "bfloat16", "--threads", "1", "--interval", "0.2",
            "--store", origin, "--relay", self._address(f"{name}>relay/{region}"), "--public-key", f"{key}.pub",
            "--region", region, *joins,
        )  # fmt: skip

    def start(self, name: str) -> None:
        wrong = self._wrong.get(name) == "token"
        environment = {
            **os.environ, "RLLOOP_TOKEN": "another-" + TOKEN if wrong else TOKEN, "OMP_NUM_THREADS": "1",
            child.VARIABLE: str(self._control(name)),
        }  # fmt: skip
        if name == "api":
            del environment["RLLOOP_TOKEN"]  # on loopback it takes any key
        self._running[name] = Command(*self._command(name), cwd=self.place, env=environment, program=child.main)
        if name in self._full:
            self._limit(name, self._full[name])

    def _reap(self, name: str) -> int:
        process = self._running.pop(name)
        code = process.wait(240)
        descriptor = process.stdout.fileno()
        os.set_blocking(descriptor, False)
        with (self.place / "logs" / f"{name.replace('/', '_')}.log").open("ab") as log, contextlib.suppress(OSError):
            while part := os.read(descriptor, 1 << 16):
                log.write(part)
        process.stdout.close()
        self.note("ended", process=name, code=code)
        return code

    def _kill(self, name: str) -> None:
        if name in self._running:
            self._running[name].signal(signal.SIGKILL)
            self._reap(name)

    def _count_cpu(self) -> None:
        for process in self._running.values():
            for pid in (process.pid, *_children(process.pid)):
                with contextlib.suppress(OSError):
                    self._used[pid] = processor_seconds(pid)

    @property
    def cpu(self) -> float:
        """Seconds of processor time that the processes took, as far as was seen."""
        return sum(self._used.values())

    def _limit(self, name: str, most: int) -> None:
        if name in self._running:
            pid = self._running[name].pid
            for each in (lambda: [pid], lambda: _children(pid)):  # one that is started meanwhile has its parent's limit
                for found in each():
                    with contextlib.suppress(ProcessLookupError):
                        resource.prlimit(found, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    def _hold(self, name: str) -> Callable[[], None]:
        """Keeps a process from being started until the returned function is called."""
        self._down[name] += 1
        return lambda: self._down.subtract([name])

    # ------------------------------------------------------------------------------------------------ faults

    def begin(self, fault: Fault) -> Callable[[], object]:
        """Returns what ends it."""
        name, number, control = fault.where, fault.number, self._controls.get(fault.where)
        if control is None:
            told = lie(fault.kind, number)
            end = self.network.begin(name, fault.kind, number, told)
            if told is None:
                return end
            self._lies[name] = end = once(end)
            return end
        if fault.kind == "kill":
            self._kill(name)
            return self._hold(name)
        if fault.kind == "pause":
            process = self._running.get(name)
            return (lambda: None) if process is None else self._paused(process)
        if fault.kind == "disk full":
            self._full[name] = number % (1 << 14)
            self._limit(name, self._full[name])
            free = self._hold(name)  # if it ends for want of room, it is started once there is

            def room() -> None:
                self._full.pop(name, None)
                self._limit(name, resource.RLIM_INFINITY)
                free()

            return room
        if fault.kind in ("wrong key", "wrong token"):
            return self._misled(name, fault.kind.removeprefix("wrong "))
        if fault.kind == "cache damaged":
            for file in (self.place / f"cache_{name.partition('/')[2]}").glob("blobs/??/" + "?" * 64):
                with contextlib.suppress(OSError):
                    content = bytearray(file.read_bytes())
                    content[number % len(content)] ^= 1
                    file.write_bytes(content)
            return lambda: None
        field, value = {
            "kill in a write": ("writes", 1 + number % 8),
            "kill in a commit": ("tensors", 1 + number % 8),
            "disk slow": ("slow", 0.05),
            "clock jump": ("clock", (-1) ** number * random.Random(number).choice((60, 3600, 86400, 3e8))),
        }[fault.kind]
        control[field] = value

        def over() -> None:
            control[field] = 0

        return over

    def _hit(self, fault: Fault) -> Callable[[], bool]:
        """True once a link's fault has disturbed a message; other faults count at once."""
        link = self.network.links.get(fault.where)
        if link is None:
            return lambda: True
        before = link.hits
        return lambda: link.hits > before

    def _paused(self, process: Command) -> Callable[[], None]:
        process.signal(signal.SIGSTOP)
        return lambda: process.signal(signal.SIGCONT)

    def _misled(self, name: str, what: str) -> Callable[[], None]:
        def start(wrong: str | None) -> None:
            self._wrong.pop(name, None)
            if wrong is not None:
                self._wrong[name] = wrong
            self._kill(name)

        start(what)
        return lambda: start(None)

    def _dismiss_liars(self) -> None:
        """The operator's part where engine and trainer disagreed: the engines that the report names are replaced."""
        report = json.loads((self.run / "parity_report.json").read_text())
        for region in {engine.partition("/")[0] for engine in report["engines"].values()}:
            self.note("dismissed", engine=region, uids=sorted(report["engines"]))
            self._lies.pop(f"trainer>engine/{region}", lambda: None)()

    # ------------------------------------------------------------------------------------------------ the run

    def drive(self, faults: Sequence[Fault], seconds: float) -> str | None:
        """Start everything, hurt it as scheduled, until the run ends. Returns what kept it from ending."""
        for name in PROCESSES:
            self.start(name)
        client = Client(self._address("client>api"), self.place / "api.jsonl")
        waiting, going = sorted(faults), list[tuple[float, Fault, Callable[[], object], Callable[[], bool]]]()
        due: dict[int, float] = {}
        deadline, finished, again = time.monotonic() + seconds, False, dict[str, float]()
        while not (finished and client.done and not going):
            now = time.monotonic()
            if now > deadline:
                return f"not over after {seconds:g} s: the run has {self.records()} records, {client.state}"
            if client.problem is not None:
                return f"{client.state}, and gave up: {client.problem}"
            for step in range(self.records() + 1):
                due.setdefault(step, now)
            while waiting and waiting[0].step in due and now >= due[waiting[0].step] + waiting[0].later:
                fault = waiting.pop(0)
                if not finished or fault.where in ("api", "client>api"):
                    self.note("begun", fault=str(fault))
                    hit = self._hit(fault)
                    going.append((now + fault.seconds, fault, self.begin(fault), hit))
            for each in [each for each in going if now >= each[0] and (each[3]() or now >= each[0] + LONGER)]:
                going.remove(each)
                each[2]()
                self.note("over", fault=str(each[1]))
            for name in [name for name, process in self._running.items() if process.poll() is not None]:
                code = self._reap(name)
                again[name] = now + 0.2
                if name == "trainer":
                    finished = code == 0
                    if code == 3:
                        self._dismiss_liars()
            for name in PROCESSES:
                due_again = now >= again.get(name, 0.0) and not (name == "trainer" and finished)
                if due_again and name not in self._running and not self._down[name]:
                    self.start(name)
            self._count_cpu()
            time.sleep(0.05)
        self.note("hits", **{name: link.hits for name, link in self.network.links.items() if link.hits})
        return None


class Client:
    """A client of the training API: a small session of sampling and training, each result recorded."""

    def __init__(self, url: str, record: Path) -> None:
        self.state = "the client has not begun"
        self.problem: str | None = None
        self.done = False
        self._thread = threading.Thread(target=self._work, args=(url, record), daemon=True)
        self._thread.start()

    def _work(self, url: str, record: Path) -> None:
        try:
            with record.open("w") as file:
                for number, result in enumerate(trained_session(url, API_KEY)):
                    file.write(json.dumps(result) + "\n")
                    file.flush()
                    self.state = f"the client has {number + 1} results"
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        else:
            self.done = True


def _children(pid: int) -> list[int]:
    """Of a process that may have ended."""
    try:
        return children(pid)
    except OSError:
        return []


def once(work: Callable[[], object]) -> Callable[[], object]:
    """Does nothing when it is called again."""
    left = [work]
    return lambda: left.pop()() if left else None
