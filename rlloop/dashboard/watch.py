"""Alerts of all runs below a folder, sent by the dashboard's server: also of a run that hangs or was killed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence

from rlloop.dashboard.runs import Run, Runs, Tail
from rlloop.errors import RlloopError
from rlloop.runs.alerts import Alarm, Condition, post

EVERY = 5.0  # seconds between looks


class Watch:
    """Looks at the runs from a thread of its own. Only what happens from now on is alerted, of runs that are live."""

    def __init__(self, runs: Runs, webhook: str, conditions: Sequence[Condition]) -> None:
        self._runs, self._webhook, self._conditions = runs, webhook, conditions
        self._watched: dict[str, tuple[Tail, Alarm]] = {}
        self._unreadable = set[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="alerts", daemon=True)

    def start(self) -> None:
        self._tell()
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(EVERY):
            self._tell()

    def _tell(self) -> None:
        for text in self.look():
            post(self._webhook, text, lambda problem: print(problem, file=sys.stderr))

    def look(self, now: float | None = None) -> list[str]:
        """The alerts since the last look. A run that cannot be read is one, the first time."""
        texts = []
        for run in self._runs.find():
            found, problem = list[str](), None
            try:
                found.extend(self._of(run, time.time() if now is None else now))
            except (RlloopError, OSError) as error:
                problem = f"{run.id}: cannot be read: {error}"
            if not run.path.exists():  # it was deleted or moved at this moment
                continue
            texts += found
            if problem is None:
                self._unreadable.discard(run.id)
            elif run.id not in self._unreadable:
                self._unreadable.add(run.id)
                texts.append(problem)
        return texts

    def _of(self, run: Run, now: float) -> Iterator[str]:
        overview = run.overview()
        if run.id not in self._watched:
            if overview["status"] == "live":
                tail = Tail(run.path / "metrics.jsonl")
                list(tail.new())  # what was there before
                self._watched[run.id] = tail, Alarm(run.id, self._conditions)
            return
        tail, alarm = self._watched[run.id]
        tail.rewound()
        for _, _, record in tail.new():
            yield from alarm.record(record["step"], record)
        if overview["status"] in ("live", "stopped"):
            yield from alarm.quiet((now - overview["changed"]) / 60)
        yield from alarm.ended(overview["status"], overview["reason"])
