"""Runs a function in several processes, one a rank: over gloo, or on GPUs over NCCL."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.command import forks

RANKS_PER_GPU = int(os.environ.get("RANKS_PER_GPU", "1"))  # above 1 with NCCL 2.31 or newer


def run_ranks(size: int, function: Callable[..., Any], *args: Any, kind: str = "cpu") -> list[Any]:
    """`function(*args)` in `size` processes of one process group; their results, in order of rank.

    `kind` cuda: each has a GPU of its own, the current one, and NCCL; where there are fewer GPUs they share them, and
    more than `RANKS_PER_GPU` times as many must not be asked for. These processes and their process group stay for the
    next call.

    `function` must be importable: a module's own.
    """
    if kind == "cuda":
        if size not in _standing:
            _standing[size] = GpuRanks(size)
        try:
            return _standing[size].run(function, args)
        except BaseException:
            del _standing[size]
            raise
    with tempfile.TemporaryDirectory() as folder:
        work = partial(_rank, f"file://{Path(folder) / 'meeting'}", size, function, args)
        with ProcessPoolExecutor(size, forks()) as pool:
            ranks = [pool.submit(work, rank) for rank in range(size)]
            errors = [error for rank in ranks if (error := rank.exception()) is not None]
    for error in sorted(errors, key=lambda each: "gloo" in str(each)):  # others only lost their peer
        raise error
    return [rank.result() for rank in ranks]


def _rank(address: str, size: int, function: Callable[..., Any], args: tuple[Any, ...], rank: int) -> Any:
    from rlloop.parallel.start import Place, process_group

    torch.set_num_threads(1)
    with process_group(Place(rank, size, address, rank).device("cpu"), address, rank, size):
        return function(*args)


class GpuRanks:
    """Processes with a GPU each: to start them takes longer than most tests, and what they have compiled serves the
    next one. Where one fails all end, since NCCL would wait for it; the next test starts others."""

    def __init__(self, size: int, kind: str = "cuda") -> None:
        self._folder, self._size = tempfile.TemporaryDirectory(), size
        context, self._ends, self._processes = multiprocessing.get_context("spawn"), list[Connection](), []
        for rank in range(size):
            end, theirs = context.Pipe()
            given = (theirs, kind, f"file://{Path(self._folder.name) / 'meeting'}", rank, size)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(end)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        found: dict[int, Any] = {}
        try:
            for end in self._ends:
                end.send((function, args))
            while left := [end for rank, end in enumerate(self._ends) if rank not in found]:
                for end in wait(left):
                    assert isinstance(end, Connection)
                    rank = self._ends.index(end)
                    try:
                        found[rank], failure = end.recv()
                    except EOFError:
                        failure = "its process ended"
                    if failure:
                        raise RuntimeError(f"rank {rank} of {self._size}: {failure}")
        except BaseException:
            self._tell_stacks()
            self.end()
            raise
        return [found[rank] for rank in range(self._size)]

    def _tell_stacks(self) -> None:
        """Where each rank is, to stderr: what a test that took too long was waiting for."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        for rank in range(self._size):
            if (path := _stacks(self._folder.name, rank)).exists():
                print(f"rank {rank} of {self._size}:\n{path.read_text()}", file=sys.stderr)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


_standing: dict[int, GpuRanks] = {}  # by number


def _stacks(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks.{rank}"


def _serve(end: Connection, kind: str, address: str, rank: int, size: int) -> None:
    """Does what it is told, until this process is killed."""
    from rlloop.parallel.start import process_group

    stacks = _stacks(str(Path(address.removeprefix("file://")).parent), rank).open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    torch.set_num_threads(1)
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", str(int(RANKS_PER_GPU > 1)))
    device = torch.device(kind)
    if kind == "cuda":  # one rank alone, too
        device = torch.device(kind, rank % torch.cuda.device_count())
    group = process_group(device, address, rank, size)
    group.__enter__()  # never left: NCCL would wait for whatever still refers to it
    while True:
        function, args = end.recv()
        result, failure = None, ""
        try:
            result = function(*args)
        except Exception:
            failure = traceback.format_exc()
        end.send((result, failure))
        gc.collect()
        if kind == "cuda":
            torch.cuda.empty_cache()


def in_shares(cases: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Results of cases, on every rank, of which each makes a share alone: so they compile other kernels at the same
    time, which all find on the disk later. Collective; the cases are not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {name: cases[name]() for name in list(cases)[rank::size]})
    found = {name: result for share in every for name, result in share.items()}
    return {name: found[name] for name in cases}
