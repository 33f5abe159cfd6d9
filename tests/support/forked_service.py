"""The process of a training service as a fork, where the caller's process is one: what a fresh interpreter would import
and load again is there. tests/integration/api starts it as it is."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace

from rlloop.training import service_process


class Forked:
    """The part of `subprocess.Popen` that `ProcessTrainingService` uses."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], start_new_session: bool
    ) -> None:
        assert start_new_session
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=tuple(pass_fds))
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("training service", timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _serve(descriptor: int) -> None:
    os.setsid()
    os.closerange(3, descriptor)  # of the caller's: their other ends are to see its death
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    service_process._Host(Connection(descriptor)).run()


def fork_services() -> None:
    """From now on, in this process and its forks."""
    forking = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
    service_process.subprocess = forking  # pyright: ignore
