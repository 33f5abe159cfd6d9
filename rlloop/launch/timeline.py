"""`profile=true`: the phases, operations and GPU kernels of three steps, as a Chrome trace."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, record_function

from rlloop.runs.folder import write_whole

FILE = "timeline.json.gz"
STEPS = 3  # that are recorded, after the first, in which kernels are compiled and caches filled

Phase = tuple[str, int, int]  # name, begin and end in ns since 1970


class Tracer:
    """Traces this process alone: all of its threads and its GPU's kernels."""

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name)

    def start(self) -> None:
        # The profiler reads it once, as it starts. 6 hides its lines of starts and stops (5), and also errors (4).
        level = os.environ.get("KINETO_LOG_LEVEL")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._gpu = torch.cuda.is_initialized()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
        every = _ExperimentalConfig(profile_all_threads=True)  # rank 0 of several works in a thread of its own
        self._profiler: Any = torch.profiler.profile(activities=activities, experimental_config=every)
        self._profiler.start()
        if level is None:
            del os.environ["KINETO_LOG_LEVEL"]  # which every later child would inherit

    def stop(self, file: Path, phases: Sequence[Phase] = ()) -> bool:
        """Writes the trace, with `phases` of another process. False: it has no kernel of the GPU that this one uses."""
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        with TemporaryDirectory() as folder:
            plain = Path(folder, "timeline.json")
            profiler.export_chrome_trace(str(plain))
            _compress(plain, file, phases)
        events = profiler.profiler.kineto_results.events()
        return not self._gpu or any(event.device_type().name == "CUDA" for event in events)


class RemoteTracer:
    """Traces rank 0 in its own process. The loop's phases are of this one, and are added to that trace."""

    def __init__(self, call: Callable[..., Callable[[], Any]]) -> None:
        """`call`: of the ranks' handle."""
        self._call = call
        self._phases: list[Phase] | None = None  # since the start, until the stop

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.time_ns()
        yield
        if self._phases is not None:
            self._phases.append((name, began, time.time_ns()))

    def start(self) -> None:
        self._call("trace")()
        self._phases = []

    def stop(self, file: Path) -> bool:
        phases, self._phases = self._phases, None
        trace, whole = self._call("traced", phases)()
        write_whole(file, trace, durable=False)
        return whole


class Timeline:
    """Writes `timeline.json.gz` in `folder` once the steps are over; `close` writes what there is until then.

    An observer of the loop: the tracer starts when the run's first step is recorded. It sees one process; of several
    ranks it is the first's.
    """

    def __init__(self, folder: Path, note: Callable[[str], None], ranks: Callable[..., Any] | None = None) -> None:
        """`note`: told of a trace without kernels, where the run uses a GPU. `ranks`: see `Parts`."""
        self.file, self._note = folder / FILE, note
        self._tracer = Tracer() if ranks is None else RemoteTracer(ranks)
        self._first: int | None = None  # step after which it started
        self._tracing = self._traced = False  # at present; a whole step

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Mark what runs within, as `rlloop: NAME`."""
        return self._tracer.phase(f"rlloop: {name}")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._traced = self._first is not None and step > self._first
        if step > 0 and self._first is None:
            self._first = step
            self._tracer.start()
            self._tracing = True
        elif self._first is not None and step == self._first + STEPS:
            self.close()

    def close(self) -> None:
        if self._tracing:
            self._tracing = False
            if not self._tracer.stop(self.file) and self._traced:
                self._note(f"{FILE} has no kernel of the GPU: another profiler may be at work in this process")

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None or isinstance(self._tracer, Tracer):  # ranks may hang, or be gone, or have a call to end first
            self.close()


def _compress(plain: Path, file: Path, phases: Sequence[Phase]) -> None:
    """A trace may have gigabytes, so it is never whole in memory; phases come before its first event."""
    with plain.open("rb") as lines, gzip.open(file, "wb") as packed:
        head = next(lines)
        while b'"traceEvents": [' not in head:
            head += next(lines)
        base = re.search(rb'"baseTimeNanoseconds": (\d+)', head)  # from which its times count, in us
        packed.write(head)
        for event in _events(phases, int(base[1]) if base else 0):
            packed.write(json.dumps(event).encode() + b",\n")
        packed.writelines(lines)


def _events(phases: Sequence[Phase], base: int) -> Iterator[dict[str, Any]]:
    row = {"pid": "loop", "tid": "phases"}
    for name, began, ended in phases:
        span = {"ts": (began - base) / 1000, "dur": (ended - began) / 1000}
        yield {"ph": "X", "cat": "user_annotation", "name": name, **row, **span}
