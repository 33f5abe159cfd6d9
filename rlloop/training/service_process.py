"""A training service in a separate process on this machine.

Computing and answering requests then share no interpreter lock, so a server's event loop neither waits for the work nor
slows it down. Calls and results are pickled over a socket pair.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rlloop.errors import RlloopError, RunError
from rlloop.rollout.fleet.text import tokenizer_of
from rlloop.training.futures import promised
from rlloop.training.remote_service import RemoteTrainingService
from rlloop.training.service import TrainingService

END = "end"  # a call that ends the process
GRACE = 10.0  # seconds for that
SWITCH = 5e-4  # seconds between two threads of the process: 5 ms at each hand-over would be too long


class ProcessTrainingService(RemoteTrainingService):
    """A `TrainingService` whose model and engine live in a separate process; same methods, same bits."""

    def __init__(
        self,
        folder: str | Path,
        *,
        threads: int | None = None,
        died: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> None:
        """`threads`: of torch; None: as here. `died`: called with the reason when the process has died, and futures
        stay pending; None: futures fail with `RunError`. `settings`: of `TrainingService`.

        Raises what that would raise, and `RlloopError` where the process ends before it has started.
        """
        super().__init__()
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a terminal's Ctrl-C is for the caller
        )
        theirs.close()
        self._socket = Connection(ours.detach())
        self._died, self._lock, self._numbers = died, threading.Lock(), itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._ended: str | None = None  # why
        self._socket.send((str(folder), threads or torch.get_num_threads(), settings))
        try:
            _, good, facts = self._socket.recv()
        except (EOFError, OSError):
            raise RlloopError(f"the training service's process ended with code {self._process.wait()}") from None
        if not good:
            self._process.wait()
            raise facts
        self._base_model, self.pid = facts
        self._tokenizer = tokenizer_of(Path(folder))
        self._thread = threading.Thread(target=self._receive, daemon=True, name="training service")
        self._thread.start()

    def close(self) -> None:
        self._died = None
        try:
            self._call(END, (), {})
            self._process.wait(GRACE)
        except (RunError, subprocess.TimeoutExpired):
            self._process.kill()
        self._process.wait()
        self._thread.join()

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        result = promised()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = result
            if self._ended is not None:
                result.set_exception(RunError(self._ended))
            with suppress(OSError):  # the thread that receives sees the end, too
                self._socket.send((number, name, args, kwargs))
        return result

    def _receive(self) -> None:
        unreadable = ""
        while True:
            try:
                number, good, value = self._socket.recv()
            except (EOFError, OSError):
                break
            except Exception as error:  # of which call, nobody knows: all that wait fail
                unreadable = f", since a reply could not be read: {type(error).__name__}: {error}"
                self._process.kill()
                break
            result = self._waiting.pop(number)
            if good:
                result.set_result(value)
            else:
                result.set_exception(value)
        reason = f"the process of the training service ended with code {self._process.wait()}{unreadable}"
        if (died := self._died) is not None:
            died(reason)
            return
        with self._lock:
            waiting, self._ended = list(self._waiting.values()), reason
        for result in waiting:
            result.set_exception(RunError(reason))


class _Host:
    """The process's side."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def run(self) -> None:
        folder, threads, settings = self._connection.recv()
        torch.set_num_threads(threads)
        sys.setswitchinterval(SWITCH)
        try:
            service = TrainingService(folder, **settings)
        except Exception as error:
            self._send(None, False, error)
            return
        self._send(None, True, (service.base_model, os.getpid()))
        while True:
            try:
                number, name, args, kwargs = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # the caller is gone and may be restarted, so nothing more may be written
            if name == END:
                service.close()
                return
            try:
                result = getattr(service, name)(*args, **kwargs)
            except Exception as error:
                self._send(number, False, error)
                continue
            if isinstance(result, Future):
                result.add_done_callback(partial(self._done, number))
            else:
                self._send(number, True, result)

    def _done(self, number: int, future: Future[Any]) -> None:
        error = future.exception()
        self._send(number, error is None, future.result() if error is None else error)

    def _send(self, number: int | None, good: bool, value: Any) -> None:
        try:
            content = pickle.dumps((number, good, value), pickle.HIGHEST_PROTOCOL)
            if not good:
                pickle.loads(content)  # a library's error with an `__init__` of its own may fail here
        except Exception as problem:  # of a result, or an error that cannot be pickled
            text = f"a result cannot be sent: {problem}" if good else f"{type(value).__name__}: {value}"
            content = pickle.dumps((number, False, RlloopError(text)))
        with self._lock:
            self._connection.send_bytes(content)


if __name__ == "__main__":
    _Host(Connection(int(sys.argv[1]))).run()
