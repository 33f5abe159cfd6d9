"""Reads the records of runs, which may be growing, rewound or damaged."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np
import yaml

from rlloop.config.resume import flatten, without_logins
from rlloop.config.tasks import offline_kind
from rlloop.dashboard.notes import NOTES, read_notes
from rlloop.errors import RunError
from rlloop.metrics import number_of, outcome_names, pass_or_fail
from rlloop.parity.certificate import find_breaks
from rlloop.runs.find import find_runs
from rlloop.runs.folder import is_own_loop
from rlloop.runs.journal import open_journal

WRITTEN = ("metrics.jsonl", "parity.jsonl", "summary.json", "rollouts", "run.log", NOTES)  # files that change
STOPPED = re.compile(r"^[-\d]+ [:\d]+ stopped: (.*(?:\n(?!\d{4}-\d\d-\d\d ).*)*)", re.MULTILINE)  # in run.log
ENDED_BADLY = ("failed", "parity broken")
QUIET = 120.0  # a run counts as live until so many seconds, or five steps' time, after its last record
TOTALLED = (
    "parity/tokens", "parity/tokens_different", "parity/k3", "eval/solved", "eval/reward", "reward/mean",
    "reward/solved", "time/step", "loss/tokens_discarded", "loss/entropy", "rollout/length_mean", "ledger/trained",
    "ledger/sampled", "loss/total",
)  # fmt: skip
CERTIFIED = ("step", "version", "tokens", "tokens_different", "engine", "trainer", "previous", "hash")


class Tail:
    """Reads the objects of a growing JSONL file, each once. A damaged line is noted in `problems` and left out."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.generation = 0  # number of times that the file was cut or replaced, as by a resumed run
        self._reset()

    def _reset(self) -> None:
        self.problems: list[str] = []
        self._at = self._line = 0
        self._last = b""  # the last bytes read; if they are not there any more, the file was cut or replaced

    def rewound(self) -> bool:
        """True if the file was cut or replaced since the last read; then reading starts over."""
        if self._at == 0:
            return False
        try:
            with open_journal(self.file) as handle:
                handle.seek(self._at - len(self._last))
                same = handle.read(len(self._last)) == self._last
        except FileNotFoundError:
            same = False
        if not same:
            self.generation += 1
            self._reset()
        return not same

    def new(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(line, byte offset, object) of every complete line since the last call. A torn last line is read later."""
        try:
            journal = open_journal(self.file)
        except FileNotFoundError:
            return
        with journal as handle:
            handle.seek(self._at)
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                offset, self._at, self._last = self._at, self._at + len(line), line[-200:]
                self._line += 1
                try:
                    record = msgspec.json.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    self.complain(f"is damaged and left out: {error}")
                    continue
                if _has_step(record):
                    yield self._line, offset, record
                else:
                    self.complain("is left out: it has no step")

    def complain(self, what: str) -> None:
        self.problems.append(f"{self.file.name}, line {self._line}, {what}")


class Metrics:
    """`metrics.jsonl` as float64 columns, a row for each record. NaN: absent; infinity: recorded as not finite."""

    def __init__(self, file: Path) -> None:
        self.tail = Tail(file)
        self._clear()

    def _clear(self) -> None:
        self.columns: dict[str, array[float]] = {"step": array("d")}
        self.histograms: set[str] = set()
        self._offsets = array("Q")

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def names(self) -> set[str]:
        return self.columns.keys() - {"step"} | self.histograms

    def refresh(self) -> None:
        if self.tail.rewound():
            self._clear()
        steps = self.columns["step"]
        for _, offset, record in self.tail.new():
            if steps and record["step"] <= steps[-1]:
                self.tail.complain(f"is left out: step {record['step']} stands after step {steps[-1]:.0f}")
                continue
            rows = len(self._offsets)
            for name, value in record.items():
                if isinstance(value, dict):
                    self.histograms.add(name)
                elif (number := np.inf if value is None else number_of(value)) is not None:
                    column = self.columns.get(name)
                    if column is None:
                        column = self.columns[name] = array("d", b"")
                    if len(column) < rows:
                        column.extend([np.nan] * (rows - len(column)))
                    column.append(number)
            self._offsets.append(offset)

    def column(self, name: str, start: int = 0) -> np.ndarray:
        """[rows − start] float64, from row `start` on."""
        values = np.full(len(self) - start, np.nan)
        if name in self.columns:
            have = np.asarray(self.columns[name][start:])
            values[: len(have)] = have
        return values

    def record(self, step: int) -> dict[str, Any] | None:
        """The whole record of a step, read from the file."""
        steps = self.columns["step"]
        row = bisect_left(steps, step)
        if row == len(steps) or steps[row] != step:
            return None
        with open_journal(self.tail.file) as handle:
            handle.seek(self._offsets[row])
            return msgspec.json.decode(handle.readline())


class Run:
    """One run's records. Thread-safe."""

    def __init__(self, path: Path, id: str) -> None:
        self.path, self.id = path, id
        self._metrics = Metrics(path / "metrics.jsonl")
        self._parity = Tail(path / "parity.jsonl")
        self._certificate: list[dict[str, Any]] = []
        self._config: tuple[tuple[int, int] | None, dict[str, Any]] | None = None
        self._lock = threading.RLock()

    @contextmanager
    def metrics(self) -> Iterator[Metrics]:
        """The metrics, up to date, and locked against other threads within the context."""
        with self._lock:
            self._metrics.refresh()
            yield self._metrics

    def certificate(self) -> list[dict[str, Any]]:
        with self._lock:
            if self._parity.rewound():
                self._certificate = []
            for _, _, line in self._parity.new():
                counts = (number_of(line.get(key)) for key in ("tokens", "tokens_different"))
                if all(key in line for key in CERTIFIED) and None not in counts:
                    self._certificate.append(line)
                else:
                    self._parity.complain("is not a line of a certificate")
            return self._certificate

    def breaks(self) -> list[str]:
        """Problems of the certificate's chain."""
        return find_breaks(self.certificate(), gaps=is_own_loop(self.config()))

    @property
    def problems(self) -> list[str]:
        return self._metrics.tail.problems + self._parity.problems

    def config(self) -> dict[str, Any]:
        """The configuration, flat: dotted key -> value. Raises `yaml.YAMLError` or `OSError`."""
        stamp = _stamp(self.path / "config.yaml")
        if self._config is None or self._config[0] != stamp:
            loaded = yaml.safe_load((self.path / "config.yaml").read_text(errors="replace"))
            self._config = stamp, without_logins(flatten(loaded)) if isinstance(loaded, Mapping) else {}
        return self._config[1]

    def offline(self) -> str | None:
        """The kind of given completions, of a run that trains on such: its rewards in training are constants."""
        try:
            return offline_kind(self.config())
        except (OSError, yaml.YAMLError):
            return None

    def passes(self) -> bool:
        """True if pass@1 says something of the run."""
        with self.metrics() as metrics:
            columns = {name: metrics.column(name) for name in chain(*outcome_names())}
        return _passes(columns, self.offline())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the run's folder; None if there is none that can be read."""
        try:
            content = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def signature(self) -> tuple[Any, ...]:
        """A value that changes whenever the run writes something."""
        return tuple(_stamp(self.path / name) for name in WRITTEN)

    def overview(self) -> dict[str, Any]:
        """Status and progress, for a list of runs. Reads only the end of the metrics."""
        record, problem = self.last_record()
        step = int(record.get("step", 0))
        try:
            config = self.config()
        except (OSError, yaml.YAMLError) as error:
            config, problem = {}, f"config.yaml cannot be read: {' '.join(str(error).split())}"
        summary = self.read_json("summary.json")
        stamps = [_stamp(self.path / name) for name in WRITTEN if name != NOTES]
        changed = max((stamp[1] for stamp in stamps if stamp), default=0) / 1e9
        quiet_after = max(QUIET, 5 * (number_of(record.get("time/step")) or 0.0))
        ended = None if summary is None else number_of(summary.get("step"))
        if summary is not None and ended is not None and ended >= step:
            status = str(summary.get("status", "finished"))
        elif (self.path / "parity_report.json").exists() and not _stamp(self.path / "summary.json"):
            status = "parity broken"
        else:
            status = "live" if time.time() - changed < quiet_after else "stopped"
        return {
            "id": self.id,
            "status": status,
            "begun": bool(record),
            "reason": self.reason() if status in ENDED_BADLY else None,
            "quiet": round(quiet_after) if status == "stopped" else None,
            **read_notes(self.path),
            "step": step,
            "num_steps": config.get("trainer.num_steps"),
            "changed": changed,
            "mode": config.get("parity.mode"),
            "problems": list(dict.fromkeys([*([problem] if problem else []), *self.problems])),
        }

    @np.errstate(over="ignore", invalid="ignore")  # of odd values
    def totals(self) -> dict[str, Any]:
        """Sums, means and courses of metrics over all steps so far."""
        with self.metrics() as metrics:
            columns = {name: metrics.column(name) for name in (*TOTALLED, "step")}
        offline = self.offline()

        def series(name: str) -> np.ndarray:
            values = columns[name]
            return values[np.isfinite(values)]

        def course(name: str) -> dict[str, float] | None:
            values = series(name)
            return {"first": values[0], "last": values[-1], "best": values.max()} if len(values) else None

        tokens, share = columns["parity/tokens"], columns["parity/tokens_different"]
        both = np.isfinite(tokens) & np.isfinite(share)
        k3 = series("parity/k3")
        return {
            "tokens": _sum(tokens[both]),
            "different": _sum(tokens[both] * share[both]),
            "k3_max": float(np.abs(k3).max()) if len(k3) else None,
            "k3_mean": float(k3.mean()) if len(k3) else None,
            "pass": course("eval/solved"),
            "passes": _passes(columns, offline),
            "offline": offline,
            "held_out": course("eval/reward"),
            "reward": None if offline else course("reward/mean"),
            "loss": course("loss/total"),
            "length": course("rollout/length_mean"),
            "entropy": course("loss/entropy"),
            "discarded": _mean(series("loss/tokens_discarded")),
            "seconds": float(series("time/step").sum()),
            "steps": int(columns["step"][-1]) if len(columns["step"]) else 0,
            "trained": _sum(series("ledger/trained")),
            "sampled": _sum(series("ledger/sampled")),
        }

    def reason(self) -> str | None:
        """The run's last reason for stopping, from its log; None if the log has none."""
        reasons = re.findall(
            r"^[-\d]+ [:\d]+ stopped: (.*(?:\n(?!\d{4}-\d\d-\d\d ).*)*)", "\n".join(self.log()), re.MULTILINE
        )
        return reasons[-1].strip() if reasons else None

    def log(self, lines: int = 200) -> list[str]:
        file = self.path / "run.log"
        return file.read_text(errors="replace").splitlines()[-lines:] if file.exists() else []

    def last_record(self, span: int = 1 << 16) -> tuple[dict[str, Any], str | None]:
        """The newest complete record, and a problem of the file or near its end, if any."""
        problem = None
        try:
            with open_journal(self.path / "metrics.jsonl") as handle:
                size = handle.seek(0, os.SEEK_END)
                handle.seek(max(0, size - span))
                end = handle.read()
        except FileNotFoundError:
            return {}, None
        except (RunError, OSError) as error:
            return {}, f"metrics.jsonl cannot be read: {error}"
        lines = end.rpartition(b"\n")[0].split(b"\n")
        for index in range(len(lines) - 1, 0 if size > span else -1, -1):
            try:
                record = msgspec.json.decode(lines[index]) if lines[index] else None
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problem = f"metrics.jsonl has a damaged line near its end: {error}"
                continue
            if _has_step(record):
                return record, problem
        return {}, problem


def _passes(columns: Mapping[str, np.ndarray], offline: str | None) -> bool:
    """True if pass@1 says something. `columns`: those of `outcome_names` by name; `offline`: as of `Run.offline`."""
    pairs = (zip(*map(columns.__getitem__, names), strict=True) for names in outcome_names(offline))
    return pass_or_fail(chain(*pairs), offline)


def _has_step(record: Any) -> TypeGuard[dict[str, Any]]:
    """True for an object with a whole number of a step that a float can be, as columns have it."""
    step = record.get("step") if isinstance(record, dict) else None
    return isinstance(step, int) and number_of(step) is not None


def _sum(counts: np.ndarray) -> int:
    """The sum as a whole number; one too large for a float is the largest float."""
    return round(float(np.nan_to_num(counts.sum())))


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _stamp(file: Path) -> tuple[int, int] | None:
    """(size, time of change in ns); None if there is no such file."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns


class Runs:
    """All runs below a folder, as of the last `find`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, Run] = {}
        self._lock, self._finding = threading.Lock(), threading.Lock()

    def find(self) -> list[Run]:
        with self._finding:  # one after the other: an older listing must not replace a newer one
            ids = find_runs(self.root)
            with self._lock:
                self._runs = {id: self._runs.get(id) or Run(self.root / id, id) for id in ids}
                return list(self._runs.values())

    def known(self) -> list[Run]:
        with self._lock:
            return list(self._runs.values())

    def get(self, id: str) -> Run | None:
        """A run that `find` has found. An id is never used as a path."""
        with self._lock:
            return self._runs.get(id)
