"""Triton kernels compiled on all CPUs before they are called, with every setting that an autotuner will try.

    compile_ahead("flash-linear-attention", [lambda: chunk_gated_delta_rule(...)])

An autotuner compiles its settings one after another, seconds each, minutes in all. Here the calls run once without a
launch, which says what they would compile; processes forked from this one compile that into Triton's cache on disk, and
the autotuner, which then finds it there, still times its whole list.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

LIMIT = 100  # seconds for all; what is not compiled by then is when it is called
Compile = Callable[[], object]


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compile_ahead(what: str, calls: Iterable[Callable[[], object]]) -> int:
    """The number of kernels that were compiled. A call that raises is left where it raised, and that is printed."""
    began = time.monotonic()
    try:
        with _collected() as kernels:
            for call in calls:
                try:
                    call()
                except Exception as error:  # calling it will say more
                    progress(f"{what}: not compiled ahead from here: {type(error).__name__}: {error}")
    except ImportError as error:
        progress(f"{what}: kernels are compiled one by one: {error}")
        return 0
    if not kernels:
        return 0
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    count = min(len(os.sched_getaffinity(0)), len(kernels))
    progress(f"{what}: compiling {len(kernels)} kernels in {count} processes")
    # Forked, since a compilation cannot be pickled; threads would share one lock for its part in Python.
    context, rest = multiprocessing.get_context("fork"), [*kernels.values()]
    processes = [context.Process(target=_compile, args=(rest[at::count], target), daemon=True) for at in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    late = sum(process.exitcode != 0 for process in processes)
    progress(f"{what}: compiled in {time.monotonic() - began:.0f} s" + (f", {late} processes cut off" if late else ""))
    return len(kernels)


def _compile(kernels: list[Compile], target: object) -> None:
    from triton.runtime.driver import driver

    driver.active.get_current_target = lambda: target  # a forked process may not ask the GPU
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT)  # ends this process, also where its parent has ended
    for kernel in kernels:
        with suppress(Exception):  # a setting that the GPU lacks resources for, which the autotuner leaves out
            kernel()


class _Kernels(dict[str, Compile]):
    """Compilations by key, as Triton's mode for compiling in the background collects them; none begins."""

    def submit(self, key: str, compile_kernel: Compile, _: object) -> None:
        self[key] = compile_kernel


@contextmanager
def _collected() -> Iterator[_Kernels]:
    """Kernels called within are collected, with each setting of their autotuners, instead of compiled and launched."""
    from triton.runtime._async_compile import active_mode
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    kernels, plain, tuned = _Kernels(), JITFunction.run, Autotuner.run

    def collect(self: Any, *args: Any, **named: Any) -> object:
        token = active_mode.set(kernels)  # here, since a backward calls its kernels in another thread
        try:
            return plain(self, *args, **named | {"warmup": True})
        finally:
            active_mode.reset(token)

    def collect_all(self: Any, *args: Any, **named: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for setting in self.prune_configs(named):
            self.best_config = setting  # which some callers read
            self.fn.run(*args, **named, **setting.all_kwargs())

    JITFunction.run, Autotuner.run = collect, collect_all
    try:
        yield kernels
    finally:
        JITFunction.run, Autotuner.run = plain, tuned
