"""State that the processes of `tests.support.command` share: modules of torch and of runs, and the kernels that earlier
runs have compiled. Nothing is started, and no kernel runs."""

import gc
from typing import Any

import hydra  # noqa: F401
import matplotlib.figure  # noqa: F401
import pytest  # noqa: F401 (modules of tests do)
import torch._dynamo  # recomputing layers imports it
import torch.fx.experimental.symbolic_shapes  # noqa: F401 (a backward does)
import transformers.models.auto.tokenization_auto  # noqa: F401
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

import rlloop.api.server
import rlloop.cli.main
import rlloop.cli.serve_api
import rlloop.launch.compose
import rlloop.launch.regions
import rlloop.launch.run
import rlloop.numerics.kernels.cpu.backend
import rlloop.recipes.countdown.task
import rlloop.rollout.fleet.engine_server
import rlloop.rollout.fleet.trainer_server
import rlloop.rollout.fleet.weight_follower
import rlloop.runs.plots
import rlloop.sync.http
import rlloop.sync.steps_fast  # noqa: F401
import tests.support.checkpoints  # noqa: F401
from tests.support.forked_service import fork_services


def load_kernels() -> None:
    """Load what the cache has: a process spends half a second on numba's own library, and 10 ms on each kernel."""
    target: Any = cpu_target  # pyright takes its properties for their descriptors
    target.target_context.refresh()
    target.typing_context.refresh()
    machine = target.target_context.codegen().magic_tuple()
    for kernel in [each for each in gc.get_objects() if issubclass(type(each), Dispatcher)]:
        cached = getattr(kernel._cache, "_cache_file", None)
        for signature, compiled_for, _ in cached._load_index() if cached else ():
            if compiled_for == machine:
                kernel.compile(signature)


load_kernels()
fork_services()
gc.freeze()  # memory that is shared stays so
