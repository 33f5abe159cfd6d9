"""Use of the machine by step: CPU, memory, disk and GPUs, as metrics `system/*`.

A thread reads them every second from /proc and NVIDIA's management library, so that no step waits for them: taking the
newest ones costs microseconds. What a machine does not tell is absent.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

EVERY = 1.0  # seconds between samples
PROC = Path("/proc")


class MachineUse:
    """Samples from its start until `close`. `folder`: its disk's free space is read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._gpus = folder, _Gpus.found()
        self._cpu = _cpu_ticks()
        self._newest = self._sample()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine use", daemon=True)
        self._thread.start()

    def latest(self) -> dict[str, float]:
        return self._newest

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            self._newest = self._sample()

    def _sample(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        before, self._cpu = self._cpu, _cpu_ticks()
        if before is not None and self._cpu is not None and self._cpu[1] > before[1]:
            metrics["system/cpu"] = (self._cpu[0] - before[0]) / (self._cpu[1] - before[1])
        with suppress(OSError, KeyError, ValueError):
            memory = dict(
                line.split()[:2] for line in (PROC / "meminfo").read_text().splitlines() if len(line.split()) > 1
            )
            metrics["system/memory"] = 1 - int(memory["MemAvailable:"]) / int(memory["MemTotal:"])
            pages = int((PROC / "self" / "statm").read_text().split()[1])
            metrics["system/process_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
        with suppress(OSError):
            metrics["system/disk_free_bytes"] = shutil.disk_usage(self._folder).free
        if self._gpus is not None:
            metrics |= self._gpus.sample()
        return metrics


def _cpu_ticks() -> tuple[int, int] | None:
    """(ticks in which the cores were busy, all ticks) since the machine started; None where /proc does not tell."""
    try:
        with (PROC / "stat").open() as file:
            ticks = [int(text) for text in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = ticks[3] + ticks[4]  # waiting for a disk is idle, too
    return sum(ticks) - idle, sum(ticks)


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Gpus:
    """GPUs by NVML, which the driver brings."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        self._handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                self._handles.append((index, handle))

    @classmethod
    def found(cls) -> _Gpus | None:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            return cls(library) if library.nvmlInit_v2() == 0 else None
        except (OSError, AttributeError):
            return None

    def sample(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for index, handle in self._handles:
            use, memory = _Utilization(), _Memory()
            if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0:
                metrics[f"system/gpu{index}_busy"] = use.gpu / 100
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 and memory.total:
                metrics[f"system/gpu{index}_memory"] = memory.used / memory.total
        return metrics
