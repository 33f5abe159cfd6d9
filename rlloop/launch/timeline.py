"""`profile=true`: the phases, operations and GPU kernels of three steps, as a Chrome trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, record_function

FILE = "timeline.json.gz"
STEPS = 3  # that are recorded, after the first, in which kernels are compiled and caches filled


class Timeline:
    """Writes `timeline.json.gz` in `folder` once the steps are over; `close` writes what there is until then.

    An observer of the loop: the profiler starts when the run's first step is recorded. It sees this process alone, all
    of its threads and its GPU's kernels; of several ranks it is the first's.
    """

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        """`note`: told of a trace without kernels, where the run uses a GPU."""
        self.file, self._note = folder / FILE, note
        self._first: int | None = None  # step after which it started
        self._profiler: Any = None
        self._gpu = self._traced = False  # this process uses one; a whole step was traced

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Mark what runs within, as `rlloop: NAME`."""
        return record_function(f"rlloop: {name}")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._traced = self._first is not None and step > self._first
        if step > 0 and self._first is None:
            # The profiler reads it once, as it starts. 6 hides its lines of starts and stops (5), and also errors (4).
            level = os.environ.get("KINETO_LOG_LEVEL")
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            self._gpu = torch.cuda.is_initialized()
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
            every = _ExperimentalConfig(profile_all_threads=True)  # rank 0 of several works in a thread of its own
            self._first = step
            self._profiler = torch.profiler.profile(activities=activities, experimental_config=every)
            self._profiler.start()
            if level is None:
                del os.environ["KINETO_LOG_LEVEL"]  # which every later child would inherit
        elif self._first is not None and step == self._first + STEPS:
            self.close()

    def close(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            profiler.export_chrome_trace(str(self.file))
            events = profiler.profiler.kineto_results.events()
            if self._gpu and self._traced and all(event.device_type().name != "CUDA" for event in events):
                self._note(f"{FILE} has no kernel of the GPU: another profiler may be at work in this process")
