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

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MARK, PREPARED = "#made ", "prepared"
LEAST = 2  # rounds of which a figure is worth recording
LINES, WIDTH = 300, 1000  # of a child's last ones, kept to say why it ended; an engine may log all its prompts in one


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


class Ended(SystemExit):
    """A `Child` ended before it answered. Its text has the last lines that it and its own processes wrote.

    `errors`: those of them that name an error, the last few."""

    def __init__(self, name: str, code: int, said: Sequence[str]) -> None:
        ended = f"{name} ended with code {code}"
        super().__init__("".join([f"{ended}; its last lines:\n", *(f"    {line}\n" for line in said), ended]))
        self.errors = [line for line in dict.fromkeys(said) if "Error" in line or "rror: " in line][-8:]


class Child:
    """A process that runs `answer`. What it writes to stderr is passed on, and into the file `log` with all else."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        self.name = name
        self._log = None if log is None else Path(log)
        self._process = _started(command, environment, subprocess.PIPE, subprocess.PIPE)
        self._said: collections.deque[str] = collections.deque(maxlen=LINES)
        self._passing = threading.Thread(target=self._pass_on, daemon=True)
        self._passing.start()

    def wait(self) -> Any:
        """The next value that it tells. Raises `Ended` if it ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))["value"]
            self._keep(line)
        code = self._process.wait()
        self._passing.join(5)
        raise Ended(self.name, code, list(self._said))

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `wait` finds
            print(line, file=self._process.stdin, flush=True)

    def ask(self, line: str) -> Any:
        self.send(line)
        return self.wait()

    def close(self) -> None:
        _kill(self._process)
        self._process.wait()
        self._passing.join(5)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None and not (pipe is self._process.stderr and self._passing.is_alive()):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._keep(line)
            print(line.rstrip()[:WIDTH], file=sys.stderr, flush=True)

    def _keep(self, line: str) -> None:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(line)
        if line.strip():
            self._said.append(line.rstrip()[:WIDTH])


Rounds = dict[str, list[Any]]  # by child


def in_turns(
    children: Sequence[Child],
    works: Iterable[str],
    rounds: int,
    known: Callable[[str, Rounds], None] | None = None,
    ended: Callable[[Child, Ended], None] | None = None,
    *,
    ahead: bool = False,
) -> dict[str, Rounds]:
    """Work -> child -> its answers to `WORK ROUND`, once all children are ready. They take turns; round 0 warms up and
    does not count. Closes them.

    `known` gets what one work made as soon as it is done, also if an interrupt (or SIGTERM) ends it after `LEAST`
    rounds or more. `ended` gets a child that ends, and the others go on; without it that raises `Ended`.
    `ahead`: each child warms up, in all works, as soon as it is ready, while others still start; else the next work is
    asked for when the one before it is done, so that a limit of time can end them (`cells.within`)."""
    found: dict[str, Rounds] = {}
    left = list(children)
    if ahead:
        works = list(works)
    warm = works if ahead else []

    def value(child: Child, of: Callable[[], Any]) -> Any:
        try:
            return of()
        except Ended as error:
            if ended is None:
                raise
            left.remove(child)
            ended(child, error)

    def made(answers: Rounds) -> Rounds:
        count = min((len(answers[child.name]) for child in left), default=0)
        return {child.name: answers[child.name][0 if ahead else 1 : count] for child in left}

    def tell_known(work: str, answers: Rounds) -> None:
        found[work] = made(answers)
        if known is not None:
            known(work, found[work])

    try:
        with interrupted_by_terms():
            for child in children:
                for work in warm:
                    child.send(f"{work} 0")
            for child in children:
                value(child, lambda: [child.wait() for _ in (None, *warm)])  # noqa: B023
            for work in works:
                answers: Rounds = {child.name: [] for child in left}
                try:
                    for index in range(1 if ahead else 0, rounds + 1):
                        for child in list(left):
                            answers[child.name].append(value(child, lambda: child.ask(f"{work} {index}")))  # noqa: B023
                except KeyboardInterrupt:
                    if left and min(map(len, made(answers).values())) >= LEAST:
                        tell_known(work, answers)
                    raise
                tell_known(work, answers)
    finally:
        for child in children:
            child.close()
    return found


@contextlib.contextmanager
def interrupted_by_terms() -> Iterator[None]:
    """SIGTERM, as `timeout` sends it, raises `KeyboardInterrupt` meanwhile."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def prepare(children: Iterable[Child], folder: Path, work: Callable[[], object]) -> None:
    """Do work for children that import meanwhile, until they need the folder (`when_prepared`). Closes them where it
    fails."""
    try:
        work()
    except BaseException:
        for child in children:
            child.close()
        raise
    (folder / PREPARED).touch()


def when_prepared(folder: Path) -> None:
    """In a child, or a process of its own: wait for `prepare`."""
    parent = os.getppid()
    while not (folder / PREPARED).exists():
        if os.getppid() != parent:
            raise SystemExit("the process that prepares the folder has ended")
        time.sleep(0.05)


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
    command: Sequence[str], environment: Mapping[str, str] | None, stdin: int | None = None, stderr: int | None = None
) -> subprocess.Popen[str]:
    """`PYTHONFAULTHANDLER`: a crash in native code, of its own processes too, says where."""
    environment = {"PYTHONFAULTHANDLER": "1", **os.environ, **(environment or {})}
    return subprocess.Popen(
        command, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.killpg(child.pid, signal.SIGKILL)  # engines have processes of their own
