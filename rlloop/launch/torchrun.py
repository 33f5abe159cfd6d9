"""torchrun: `torchrun --nproc-per-node 2 -m rlloop train ...` runs the loop on rank 0, which the other ranks follow.

Rank 0 sends each call to the others and does its own share in a thread, so that its main thread can look after the
ranks and obey Ctrl-C. The other ranks touch neither the run's folder nor the terminal. All meet at a store:

    machine/RANK       by a rank: its machine, before it loads anything
    job/N              by rank 0: what the ranks of the command's N-th run begin with; empty: there is no further run
    job-N/failed/RANK  by a rank: the error that ended it
    job-N/over         by rank 0: the run has failed, and every rank must end
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import pickle
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError

from rlloop.config.run import RunConfig
from rlloop.errors import RlloopError
from rlloop.launch.layouts import Machine, check_model
from rlloop.launch.prepare import Prepared, loss_of
from rlloop.launch.ranks import GRACE, RankStalled, error_of
from rlloop.launch.ray_pool import EngineDied, RemoteEngine, remote_parts
from rlloop.launch.workers import Colocated
from rlloop.loop.parts import Parts
from rlloop.models.config import read_config
from rlloop.parallel.progress import SILENT, Watch
from rlloop.parallel.start import NEVER, Place, Store, host_store, meet
from rlloop.runs.folder import RunFolder
from rlloop.sync.colocated import ColocatedSync
from rlloop.sync.publisher import Publisher

END = "end"  # a call that ends the ranks
STARTING = timedelta(seconds=60)  # that a rank may take to begin


@dataclass(frozen=True)
class Torchrun:
    """This process among those that torchrun has started."""

    rank: int
    size: int
    local: int  # index on this machine
    neighbours: int | None  # processes on this machine; None: a launcher that does not say it
    address: str

    @classmethod
    def here(cls) -> Torchrun | None:
        """None outside torchrun, or where it has started one process."""
        rank, size, host, port = (
            os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        )
        if not (rank and size and host and port) or int(size) == 1:
            return None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        local, here = int(os.environ.get("LOCAL_RANK", rank)), os.environ.get("LOCAL_WORLD_SIZE")
        address = f"tcp://{host}:{port}/attempt-{attempt}"
        return cls(int(rank), int(size), local, None if here is None else int(here), address)

    def place(self, job: int) -> Place:
        return Place(self.rank, self.size, f"{self.address}/job-{job}", self.local)

    def threads(self) -> int:
        """CPU threads of a rank: OMP_NUM_THREADS, which torchrun sets to 1 where it is not set; or its share of all."""
        shared = 1 if "OMP_NUM_THREADS" in os.environ else self.neighbours or self.size
        return max(1, torch.get_num_threads() // shared)

    def again(self, command: str) -> str:
        """Shell command that starts `command` again on as many processes."""
        if self.neighbours not in (None, self.size):
            return f"on each machine, by torchrun as before, -m {command}"
        return f"torchrun --nproc-per-node {self.size} -m {command}"

    def machine(self) -> Machine:
        return Machine(self.rank, socket.gethostname(), self.local, self.neighbours, torch.cuda.device_count())


# ------------------------------------------------------------------------------------------------ rank 0


class Leader:
    """Rank 0's end: begins runs, and ends the other ranks with the command."""

    def __init__(self, here: Torchrun) -> None:
        self.here, self._jobs, self._hosted = here, 0, None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # a launcher without a store of its own
            host, _, port = here.address.removeprefix("tcp://").partition("/")[0].rpartition(":")
            self._hosted = host_store(host, int(port))
        self._store = meet(here.address)

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _put(self._store, f"job/{self._jobs}", None)
        if isinstance(error, RlloopError):
            tell_torchrun(str(error))
        if self._hosted is not None and self._jobs == 0:  # until the others, who may still be starting, have read that
            with suppress(DistError):
                self._store.wait([f"left/{rank}" for rank in range(1, self.here.size)], STARTING)

    def machines(self) -> list[Machine]:
        """The machines of all ranks that start within `STARTING`; the watch names the others later."""
        names = [f"machine/{rank}" for rank in range(1, self.here.size)]
        with suppress(DistError):
            self._store.wait(names, STARTING)
        return [self.here.machine(), *(_get(self._store, name) for name in names if self._store.check([name]))]

    @contextmanager
    def parts(self, config: RunConfig, prepared: Prepared, folder: RunFolder) -> Iterator[Parts]:
        """Trainer and engines over all ranks."""
        with self.ranks(config, prepared) as ranks:
            engine = RemoteEngine(ranks)
            yield remote_parts(config, prepared, folder, ranks, engine, ColocatedSync(engine))

    @contextmanager
    def ranks(
        self, config: RunConfig, prepared: Prepared, opens: Callable[[], Publisher] | None = None
    ) -> Iterator[LeadingHandle]:
        """All ranks, as one worker. `opens`: see `Colocated`."""
        path = str(prepared.task.model_folder().absolute())
        check_model(config, read_config(path))
        place = self.here.place(self._jobs)
        start = (config, path, self.here.threads())
        _put(self._store, f"job/{self._jobs}", start)
        self._jobs += 1
        make = partial(Colocated, *start, place, opens)
        ranks = LeadingHandle(make, place, prepared.loss, config.ray.rank_timeout)
        try:
            yield ranks
        finally:
            ranks.close()


class LeadingHandle:
    """All ranks behind rank 0, a `Handle` of `rlloop.launch.ray_pool`. Its thread does rank 0's share of each call."""

    name = "trainer"

    def __init__(self, make: Callable[[], Colocated], place: Place, loss: Callable[..., Any], timeout: float) -> None:
        """`make` joins the other ranks. `timeout`: seconds without progress of a rank."""
        self._make, self._loss, self._timeout, self.size = make, loss, timeout, place.size
        self._store = meet(place.address)
        self._watch = Watch(self._store, place.size)
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...], Future[Any]]] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="rank 0", daemon=True)  # it may hang in a copy
        self._thread.start()

    def call(self, method: str, *args: Any) -> Callable[[], Any]:
        if self._failure is not None:
            raise self._failure
        result: Future[Any] = Future()
        self._calls.put((method, args, result))
        self._watch.reset()
        return partial(self._result, result)

    def revive(self) -> None:
        raise AssertionError("ranks of torchrun are started by torchrun")

    def close(self) -> None:
        """Ends all ranks, those that hang in a copy too."""
        if self._failure is None:
            self.call(END)
            self._thread.join(GRACE)
        if self._thread.is_alive() or self._failure is not None:
            _put(self._store, "over", True)
            self._thread.join(GRACE)

    def _work(self) -> None:
        failed, worker = None, None
        while True:
            method, args, result = self._calls.get()
            try:
                if failed is None:
                    worker = worker or self._make()
                    worker.world.broadcast_object(pack((method, args), self._loss))
                    result.set_result(None if method == END else worker.call(method, *args))
                    if method == END:
                        worker.close()
                        return
                else:
                    result.set_exception(failed)
            except BaseException as error:
                failed = error
                result.set_exception(error)
            if method == END:
                return

    def _result(self, result: Future[Any]) -> Any:
        failures: dict[int, Exception] = {}
        while not failures:
            if wait([result], timeout=0.5).done:
                if result.exception() is None:
                    return result.result()
                failures = self._own(result)
                break
            failures = self._failures(6 * SILENT)
            if not failures and (stalled := self._watch.stalled(self._timeout)) is not None:
                failures[stalled[0]] = RankStalled(stalled[1], died=False)
        until = time.monotonic() + max(GRACE, SILENT) + 1
        while len(failures) < self.size and time.monotonic() < until:  # the cause may be another's
            time.sleep(0.2)
            failures = self._failures(SILENT) | self._own(result) | failures
            if any(isinstance(error, EngineDied) for error in failures.values()):
                break
        else:
            gone = EngineDied("it has not reported: its process ended at once")
            failures |= {rank: gone for rank in self._watch.absent() if rank not in failures}
        self._failure = error_of(failures, self.size)
        raise self._failure

    def _own(self, result: Future[Any]) -> dict[int, Exception]:
        error = result.exception() if result.done() else None
        return {} if error is None else {0: error if isinstance(error, Exception) else RuntimeError(repr(error))}

    def _failures(self, silence: float) -> dict[int, Exception]:
        """Failures by rank: those reported by other ranks, and ranks silent for `silence` seconds."""
        self._watch.look()
        failures: dict[int, Exception] = {
            rank: EngineDied("it reports no more: its process is gone or stopped")
            for rank in self._watch.silent(silence)
        }
        for rank in range(1, self.size):
            if self._store.check([f"failed/{rank}"]):
                failures[rank] = _get(self._store, f"failed/{rank}")
        return failures


# ------------------------------------------------------------------------------------------------ the other ranks


def follow(here: Torchrun) -> int:
    """Do this rank's share of rank 0's runs until the last one. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; rank 0 decides
    store = meet(here.address)
    _put(store, f"machine/{here.rank}", here.machine())
    for job in itertools.count():
        try:
            store.wait([f"job/{job}"], NEVER)
            start = _get(store, f"job/{job}")
        except DistError:  # rank 0 has ended, with the store that it hosts
            return 0
        if start is None:
            _put(store, f"left/{here.rank}", True)
            return 0
        if not _obey(here.place(job), *start):
            return 1
    return 0


def _obey(place: Place, config: RunConfig, path: str, threads: int) -> bool:
    """Execute rank 0's calls; True if the run has ended in order."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that rank 0 can still see which rank is gone
    store, closing, done = meet(place.address), threading.Event(), threading.Event()
    threading.Thread(target=_end_with, args=(store, closing, done), name="over", daemon=True).start()
    try:
        worker, loss = Colocated(config, path, threads, place), loss_of(config)
        while True:
            method, args = unpack(worker.world.broadcast_object(None), loss)
            if method == END:
                closing.set()
                worker.close()
                done.set()
                signal.signal(signal.SIGTERM, before)
                return True
            worker.call(method, *args)
    except Exception as error:
        with suppress(DistError):
            _put(store, f"failed/{place.rank}", _travelling(error))
            rank_0 = Watch(store, 1)
            # It says when it has seen that. If it has died, torchrun kills the others after 30 s.
            while not rank_0.silent(3 * SILENT):
                time.sleep(0.5)
                rank_0.look()
        return False


def _end_with(store: Store, closing: threading.Event, done: threading.Event) -> None:
    """End this process with the run, even if it hangs. Exits with code 0, since torchrun ends all processes at the
    first other code, which rank 0 must give."""
    while not done.wait(0.5):
        try:
            if store.check(["over"]):
                os._exit(0)
        except RuntimeError:  # the store is gone, with torchrun or with rank 0, which may close first
            os._exit(0 if closing.is_set() else 1)


def _travelling(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RlloopError(f"{type(error).__name__}: {error}")


def tell_torchrun(error: str) -> None:
    """So that torchrun's summary of what failed, the end of its output, has the error's text."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": error, "extraInfo": {"timestamp": f"{time.time():.0f}"}}
        with suppress(OSError):  # the error has been printed
            Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def _put(store: Store, key: str, value: object) -> None:
    store.set(key, base64.b64encode(pickle.dumps(value)).decode())


def _get(store: Store, key: str) -> Any:
    return pickle.loads(base64.b64decode(store.get(key)))


# ------------------------------------------------------------------------------------------------ calls


def pack(call: Any, loss: Callable[..., Any]) -> bytes:
    """A pickled call without the loss, which each rank makes itself, since it may be a closure."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return "loss" if obj is loss else None

    data = io.BytesIO()
    Pickler(data, pickle.HIGHEST_PROTOCOL).dump(call)
    return data.getvalue()


def unpack(data: bytes, loss: Callable[..., Any]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return loss

    return Unpickler(io.BytesIO(data)).load()
