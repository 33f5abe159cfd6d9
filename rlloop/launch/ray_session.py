"""Ray: importing it, starting or joining a cluster, and handles of its actors. No other module imports Ray."""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from rlloop.errors import ConfigError
from rlloop.launch.ranks import GRACE, RankFailed, RankStalled, error_of
from rlloop.launch.ray_pool import EngineDied
from rlloop.parallel.progress import Watch


def import_ray(address: str | None) -> Any:
    if address is None and "ray" not in sys.modules:
        # A Ray of our own asks for a token, and listens on loopback alone, since its metrics endpoint asks for none:
        # where clusters are disabled Ray binds no other address, on any system. It reads these while it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # Actors have processes of their own: a spare one for each core would only start and wait.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util
    except ImportError:
        raise ConfigError("launch=ray needs Ray: pip install 'rlloop[ray]', or use launch=local") from None
    return ray


@contextmanager
def ray_session(ray: Any, address: str | None, cpus: float, timeout: float = 60.0, advice: str = "") -> Iterator[None]:
    """A Ray of our own, shut down at the end; or the cluster at `address`, which runs on. `timeout`: seconds in which
    our own must start, at least 30. `advice`: what to do if it does not, said after the reason."""
    if ray.is_initialized():  # a caller's: it is theirs to shut down
        yield
        return
    try:
        _require_listener(address or "")
        with _own_sigterm(), nullcontext() if address else _waiting_for_node(ray, timeout):
            ray.init(
                address=address or "local",  # never an unrelated Ray on this machine
                num_cpus=None if address else max(int(cpus), os.cpu_count() or 1),
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at ray.address={address}: {error}. One that asks for a token needs "
            "RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN in the environment"
        ) from None
    except Exception as error:
        if address or type(error) is not Exception:  # which Ray raises where its processes are too slow to start
            raise
        raise ConfigError(
            f"Ray did not start on this machine, which may be overloaded: {error} {advice}".rstrip()
        ) from None
    # A thread of Ray's prints what became of each worker, in paragraphs and whenever it hears of it: also below the
    # error that ends the run, which says the same. This switch has no public name.
    ray._private.worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray.shutdown()
        ray._private.worker._worker_logs_enabled = True


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps this process's handler of SIGTERM, such as a run's, which saves a checkpoint: Ray's own, which takes its
    place, would abort the process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _waiting_for_node(ray: Any, seconds: float) -> Iterator[None]:
    """Ray asks for its node for 30 seconds, which no setting changes. Here a question is repeated for `seconds`."""
    services = ray._private.services
    ask, until = services.get_node, time.monotonic() + seconds

    def get_node(*args: Any) -> Any:
        while True:
            try:
                return ask(*args)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = ask


def _require_listener(address: str) -> None:
    """Raises `ConnectionError` if nothing listens at HOST:PORT, since Ray itself would retry for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            raise ConnectionError(error) from None


class RayHandle:
    """A worker in Ray actors, one for each of its ranks: the `Handle` of `rlloop.launch.ray_pool`.

    A call runs on all ranks, and rank 0 has the result. A failure of one rank ends the call on all: others may wait for
    it in a collective, so they are killed.
    """

    def __init__(
        self, ray: Any, name: str, start: Callable[[], tuple[Sequence[Any], Watch | None]], timeout: float
    ) -> None:
        """`start` starts the actors, in order of rank, and a watch over them where they are several. `timeout`: seconds
        without progress of a rank."""
        self.name, self._ray, self._start, self._timeout = name, ray, start, timeout
        self._actors, self._watch = start()
        self._failure: Exception | None = None  # that ended the ranks
        self._beginning = threading.Lock()  # calls of several threads come to all ranks in one order

    def reference(self, method: str, *args: Any) -> Any:
        """Starts the call; the result stays in the node's shared memory, to be passed on by reference."""
        return self._begin(method, args)[0]

    def call(self, method: str, *args: Any) -> Callable[[], Any]:
        calls = self._begin(method, args)
        return partial(self._result, calls[0]) if len(calls) == 1 else partial(self._result_of_all, calls)

    def revive(self) -> None:
        self.kill()
        self._actors, self._watch = self._start()
        self._failure = None

    def kill(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def _begin(self, method: str, args: Sequence[Any]) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        if len(self._actors) > 1:  # they share one copy on each node
            args = [arg if isinstance(arg, self._ray.ObjectRef) else self._ray.put(arg) for arg in args]
        with self._beginning:
            return [actor.call.remote(method, *args) for actor in self._actors]

    def _result(self, call: Any) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:  # the worker's own error, as if raised here
            if isinstance(error.cause, EngineDied) and len(self._actors) == 1:
                self._failure = error.cause
                self.kill()  # it could not start: its process would keep what it has loaded
            raise error.cause from None
        except self._ray.exceptions.OutOfMemoryError as error:  # Ray ends processes before the system would
            raise EngineDied(str(error).splitlines()[0]) from None
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
            lines = str(error).strip().splitlines()
            if getattr(error, "actor_init_failed", False):  # Ray could not call the constructor; the reason is last
                raise EngineDied(f"{self.name} could not start: {lines[-1].strip()}", died=False) from error
            detail = lines[-1].partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
            raise EngineDied(f"{lines[0]} {detail}".strip(" .")) from None

    def _result_of_all(self, calls: list[Any]) -> Any:
        waiting, failures, until = calls, dict[int, Exception](), math.inf
        if self._watch is not None:
            self._watch.reset()
        while waiting and time.monotonic() < until:
            ended, waiting = self._ray.wait(waiting, num_returns=1, timeout=0.5)
            for call in ended:
                try:
                    self._result(call)
                except Exception as error:
                    failures[calls.index(call)] = error
                    until = min(until, time.monotonic() + GRACE)
            if not failures and not ended and (stalled := self._stalled()) is not None:
                rank, known = stalled
                failures[rank], until = RankStalled(known, died=False), 0.0
        if not failures:
            return self._ray.get(calls[0])
        error = error_of(failures, len(calls))
        if isinstance(error, RankFailed):
            self.kill()
            self._failure = error
        raise error

    def _stalled(self) -> tuple[int, str] | None:
        if self._watch is None:
            return None
        self._watch.look()
        return self._watch.stalled(self._timeout)
