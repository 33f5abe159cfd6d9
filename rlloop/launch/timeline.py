"""`profile=true`: the phases, operations and GPU kernels of three steps, as a Chrome trace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

FILE = "timeline.json.gz"
STEPS = 3  # that are recorded, after the first, in which kernels are compiled and caches filled


class Timeline:
    """Writes `timeline.json.gz` in `folder` once the steps are over; `close` writes what there is until then.

    An observer of the loop: the profiler starts when the run's first step is recorded. It sees this process alone, all
    of its GPU's kernels included.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self._first: int | None = None  # step after which it started
        self._profiler: Any = None

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Mark what runs within, as `rlloop: NAME`."""
        return record_function(f"rlloop: {name}")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step > 0 and self._first is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints its own starts and stops below it
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._first, self._profiler = step, torch.profiler.profile(activities=activities)
            self._profiler.start()
        elif self._first is not None and step == self._first + STEPS:
            self.close()

    def close(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            profiler.export_chrome_trace(str(self.file))
