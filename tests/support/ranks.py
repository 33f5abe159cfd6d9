"""Runs a function in several processes, one a rank, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.command import forks


def run_ranks(size: int, function: Callable[..., Any], *args: Any, kind: str = "cpu") -> list[Any]:
    """`function(*args)` in `size` processes of one process group; their results, in order of rank.

    `kind` cuda: each has a GPU of its own, the current one, and NCCL.

    `function` must be importable: a module's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = partial(_rank, kind, f"file://{Path(folder) / 'meeting'}", size, function, args)
        context = forks() if kind == "cpu" else multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(size, context) as pool:
            ranks = [pool.submit(work, rank) for rank in range(size)]
            errors = [error for rank in ranks if (error := rank.exception()) is not None]
    for error in sorted(errors, key=lambda each: "gloo" in str(each)):  # others only lost their peer
        raise error
    return [rank.result() for rank in ranks]


def _rank(kind: str, address: str, size: int, function: Callable[..., Any], args: tuple[Any, ...], rank: int) -> Any:
    from rlloop.parallel.start import Place, process_group

    torch.set_num_threads(1)
    with process_group(Place(rank, size, address, rank).device(kind), address, rank, size):
        try:
            return function(*args)
        except Exception:
            if kind == "cuda":  # NCCL would wait for the other ranks, and they for this one: nothing would be said
                traceback.print_exc()
                os._exit(1)
            raise
