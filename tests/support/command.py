"""The `rlloop` command in a process of its own, forked from one that has imported what runs need.

A run over tiny models takes seconds, most of which a fresh interpreter would spend on importing torch. What is
forked has not run a kernel, nor parsed an option; `python -m rlloop` itself is started by tests/integration/cli.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRELOADED = "tests.support.preloaded"
PORTS = itertools.cycle(random.SystemRandom().sample(range(20_000, 32_000), 12_000))
PATH = list(sys.path)  # before any test: one that calls the command in its own process leaves its folder behind


def free_port() -> int:
    """A port for a server that is named before it starts, or comes back at the same address. It is below those that the
    system gives to others meanwhile, and none comes twice in a process before all have."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port := next(PORTS)))
            return port


@functools.cache
def forks() -> ForkServerContext:
    """Starts processes that have imported what runs need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    with contextlib.chdir(ROOT):  # where the server looks for modules
        ensure_running()
    return context


class Command:
    """The part of `subprocess.Popen(..., stdout=PIPE, stderr=STDOUT, text=True)` that tests use, in a fork."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        program: Callable[[], object] | None = None,
    ) -> None:
        """`rlloop` with `arguments`; or `program`, a module's function, which reads them from `sys.argv`."""
        read, write = forks().Pipe(duplex=False)
        environment = dict(os.environ if env is None else env)
        given = (["rlloop", *map(str, arguments)], str(cwd), PATH, environment, write, program)
        self._process = forks().Process(target=_run, args=given)
        self._process.start()
        write.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.stdout = os.fdopen(os.dup(read.fileno()), encoding="utf-8")
        read.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("rlloop", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Asked again, it gives the same output."""
        if not self.stdout.closed:
            self._output = self.stdout.read()  # a test that hangs here ends by pytest's own timeout
            self.stdout.close()
        self.wait(timeout)
        return self._output, None


def _run(
    argv: list[str],
    cwd: str,
    path: list[str],
    environment: dict[str, str],
    output: Connection,
    program: Callable[[], object] | None,
) -> None:
    assert PRELOADED in sys.modules, "the fork server could not import it"
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv[:] = argv
    if "OMP_NUM_THREADS" in environment:  # which torch has read already
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if program is None:
        from rlloop.cli.main import main as program
    try:
        code = program()
    finally:
        atexit._run_exitfuncs()  # as at an interpreter's end, which a forked process does not come to
    sys.exit(code if isinstance(code, int) else 0)
