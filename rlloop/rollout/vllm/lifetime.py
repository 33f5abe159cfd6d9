"""Engines of this process that hold vLLM, and what vLLM changes in a process."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Life:
    """Marks a live engine of this process. Held by the engine, so it is freed with an engine that could not start."""

    def __init__(self, sleeps: bool, guest: bool) -> None:
        """`sleeps`: by vLLM's sleep mode, which is the process's. `guest`: the process group is of a run's ranks."""
        self.sleeps, self.asleep, self.guest = sleeps, False, guest


LIVE: weakref.WeakSet[Life] = weakref.WeakSet()


def shut_down(core: Any, live: Life) -> None:
    """vLLM's process groups are the process's, so the last engine takes them down, though not a run's own."""
    from vllm.distributed import cleanup_dist_env_and_memory, destroy_model_parallel, parallel_state

    if live.sleeps and live.asleep:
        core.collective_rpc("restore_caches")  # sleeping memory cannot be freed
    LIVE.discard(live)
    core.collective_rpc("drop_graphs")
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    if not LIVE and live.guest:
        destroy_model_parallel()
        if parallel_state._WORLD is not None:  # another run of this process has another
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
    elif not LIVE:
        cleanup_dist_env_and_memory()


@contextmanager
def process_state_kept() -> Iterator[None]:
    """vLLM seeds Python, numpy and torch, and sets the number of threads, as if the process were its own."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads(threads)
