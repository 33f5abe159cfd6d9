"""Where the time of sampling goes: the device's kernels and the host's operations, by a step that makes a token."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

KERNELS, HOST = 16, 6  # lines of each


def profiled(work: Callable[[], object], steps: int, name: str) -> float:
    """Runs `work`, which takes so many steps, twice; prints the second one's profile to stderr. Returns the seconds of
    the first, which nothing slows."""
    begin = time.perf_counter()
    work()
    took = time.perf_counter() - begin
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]) as found:
        work()
    every = found.key_averages()
    device = sorted(
        ((e.self_device_time_total, e.count, e.key) for e in every if e.self_device_time_total), reverse=True
    )
    host = sorted(((e.self_cpu_time_total, e.count, e.key) for e in every), reverse=True)
    busy, launched = (sum(each[at] for each in device) / steps for at in (0, 1))
    lines = [f"{name}: {1e6 * took / steps:,.0f} us a step; the device works {busy:,.0f} us, in {launched:.0f} kernels"]
    for where, rows in (("device", device[:KERNELS]), ("host", host[:HOST])):
        lines += [f"  {where} {us / steps:9.1f} us {count / steps:8.1f} x  {key[:90]}" for us, count, key in rows]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return took
