"""Processes of their own for what a benchmark compares.

One that measures by itself, and tells figures one by one until its time is over:

for made in told([sys.executable, __file__, "--child", "peer"], seconds=120):
    print(made)  # {"length": 32768, "seconds": 1.5}: what the child said by `tell(length=32768, seconds=1.5)`

One that stands still until it is asked, and answers each line by a value (in the child: `answer(function of a line)`):

child = Child("peer", [sys.executable, __file__, "--child", "peer"])
child.wait()  # until it is ready
child.ask("crowd 1")
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

MARK = "#made "


def tell(**values: Any) -> None:
    """Hand values to the process that reads `told`, at once."""
    print(f"\n{MARK}{json.dumps(values)}", flush=True)


def told(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """What the command tells. It and its processes are killed when the seconds are over, or nobody reads on.

    Raises `subprocess.CalledProcessError` if it fails by itself.
    """
    child = _started(command, environment)
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill(child)

    timer = threading.Timer(seconds, end)
    timer.start()
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
        code = child.wait()
    finally:
        timer.cancel()
        _kill(child)
        child.wait()
        child.stdout.close()
    if late.is_set():
        print(f"stopped after {seconds:.0f} s: {' '.join(command)}", file=sys.stderr, flush=True)
    elif code:
        raise subprocess.CalledProcessError(code, command)


def answer(value_of: Callable[[str], Any]) -> None:
    """In a `Child`'s process: say that it is ready, then the value of each line that it is asked, until the last."""
    tell(value=None)
    for line in sys.stdin:
        tell(value=value_of(line.strip()))


class Child:
    """A process that runs `answer`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._process = _started(command, environment, subprocess.PIPE)

    def wait(self) -> Any:
        """The next value that it tells. Raises `SystemExit` if it ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))["value"]
        raise SystemExit(f"{self.name} ended with code {self._process.wait()}; see above")

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def ask(self, line: str) -> Any:
        self.send(line)
        return self.wait()

    def close(self) -> None:
        _kill(self._process)
        self._process.communicate()


def in_turns(children: Sequence[Child], works: Iterable[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Work -> child -> its answers to `WORK ROUND`, once all children are ready. They take turns; round 0 warms up and
    does not count. Closes them."""
    found: dict[str, dict[str, list[float]]] = {}
    try:
        for child in children:
            child.wait()
        for work in works:
            answers = [[child.ask(f"{work} {index}") for child in children] for index in range(rounds + 1)]
            found[work] = {child.name: [each[at] for each in answers[1:]] for at, child in enumerate(children)}
    finally:
        for child in children:
            child.close()
    return found


def rehearsed(child: Child, works: Iterable[str]) -> None:
    """Let a child run each work once, and then as `WORK ROUND profile`. Closes it."""
    try:
        child.wait()
        for work in works:
            child.ask(f"{work} 0")
            child.ask(f"{work} 1 profile")
    finally:
        child.close()


def _started(
    command: Sequence[str], environment: Mapping[str, str] | None, stdin: int | None = None
) -> subprocess.Popen[str]:
    environment = {**os.environ, **(environment or {})}
    return subprocess.Popen(
        command, env=environment, stdin=stdin, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.killpg(child.pid, signal.SIGKILL)  # engines have processes of their own
