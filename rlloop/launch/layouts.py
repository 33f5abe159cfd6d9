"""Refusal of layouts that a model cannot be split over, or that the machine has no GPUs or room for, before anything
loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from rlloop.config.layout import World
from rlloop.config.rollout import EngineKind
from rlloop.config.run import Launch, RunConfig
from rlloop.errors import ConfigError
from rlloop.launch.objectives import check_objective
from rlloop.launch.room import check_room
from rlloop.models.architecture import ModelConfig
from rlloop.models.config import parse_config, read_config
from rlloop.models.placement import check_placement
from rlloop.models.weights import usable_device
from rlloop.parallel.layout import Layout
from rlloop.protocols import MakesModel, Task
from rlloop.rollout.vllm.stock_models import check_stock_model
from rlloop.sync.bits import processors


class Machine(NamedTuple):
    """Host, local index and GPUs of a rank that torchrun started."""

    rank: int
    host: str
    local: int  # index of its GPU
    processes: int | None  # that torchrun has started there; None: a launcher that does not say it
    gpus: int


def check_launch(config: RunConfig, processes: int, machines: Callable[[], Sequence[Machine]] = tuple) -> None:
    """Raises `ConfigError` where the layouts do not fit what was started: `processes` by torchrun on `machines`, 1
    without it."""
    size = config.world.size
    if config.launch is Launch.ray:
        if processes > 1:
            raise ConfigError(f"launch=ray starts its own processes, and torchrun has started {processes}; use one")
        _check_ray(config)
        return
    if size == processes:
        if config.device == "cuda":
            _check_gpus(machines())
        return
    layouts = f"trainer.layout and rollout.layout have {size} rank{'s' if size > 1 else ''}"
    if processes == 1:
        raise ConfigError(
            f"{layouts}, and launch=local is one process. Add launch=ray to the command, or start it as\n"
            f"  torchrun --nproc-per-node {size} -m rlloop train ..."
        )
    raise ConfigError(
        f"{layouts}, and torchrun has started {processes} processes. Start it with --nproc-per-node {size}"
        f"{_by_dp_shard(*config.layouts, processes)}"
    )


def crowd(config: RunConfig, neighbours: int = 1) -> str:
    """A note of more ranks than CPUs on this machine; empty where there is none.

    `neighbours`: processes that torchrun has started here.
    """
    if config.device != "cpu":
        return ""
    ray = config.launch is Launch.ray
    if ray and config.ray.address is None:
        neighbours = config.world.size + config.replicas * config.world.engine.world_size
    cpus = processors()
    if neighbours <= cpus:
        return ""
    settings = "trainer.layout, rollout.layout or ray.replicas" if ray else "trainer.layout or rollout.layout"
    return (
        f"{neighbours} processes share {cpus} CPU{'s' * (cpus != 1)} and the memory of this machine: fewer, by "
        f"{settings}, start sooner"
    )


def _check_gpus(machines: Sequence[Machine]) -> None:
    """Raises `ConfigError` for a rank without a GPU of its own. A rank 0 without any is refused by `usable_device`."""
    for rank, host, local, processes, have in machines:
        if max(local + 1, processes or 0) <= have or (rank == 0 and have == 0):
            continue
        if have == 0:
            raise ConfigError(
                f"device=cuda, and {host}, where rank {rank} runs, has no GPU; leave it out, or set device=cpu"
            )
        raise ConfigError(
            f"torchrun has started {processes or 'more'} processes on {host} (rank {rank} has index {local}), which "
            f"has {have} GPU{'s' * (have != 1)}, and each takes one. Start it with --nproc-per-node {max(1, have)} "
            "there, on more machines or for smaller layouts"
        )


def _by_dp_shard(trainer: Layout, rollout: Layout, processes: int) -> str:
    """The `trainer.layout.dp_shard` that makes a world of so many processes, as a clause; empty if none does."""
    degree = processes * trainer.dp_shard // trainer.world_size
    try:
        world = World.of(replace(trainer, dp_shard=degree), rollout)
    except ConfigError:
        return ""
    return f", or set trainer.layout.dp_shard={degree}" if world.size == processes else ""


def _check_ray(config: RunConfig) -> None:
    if config.rollout.drift.declared or vars(config.rollout.profile.over(config.model.profile)) != vars(
        config.model.profile
    ):
        raise ConfigError(
            "rollout.drift and rollout.profile compare numerics in one process; use launch=local for them"
        )
    world, address = config.world, config.ray.address
    if world.size == world.engine.world_size == 1:
        return
    if (address or "").startswith("ray://"):
        raise ConfigError(
            f"ray.address={address} is a client's, and ranks meet in the process that starts them; run on a machine of "
            "the cluster, with ray.address=HOST:PORT or auto"
        )
    needed, have = world.size + config.replicas * world.engine.world_size, torch.cuda.device_count()
    if config.device == "cuda" and address is None and needed > have > 0:
        raise ConfigError(
            f"trainer.layout and rollout.layout, with ray.replicas={config.replicas}, need {needed} GPUs, and this "
            f"machine has {have}. Set trainer.layout.dp_shard={max(1, have)} with the other degrees at 1, or attach to "
            "a larger cluster by ray.address"
        )


def check_task(config: RunConfig, task: Task) -> None:
    """`check_objective`; `check_model` of the model that `task` gives, and on a GPU of this machine `check_room`, where
    its configuration is known before it is made."""
    check_objective(config, task)
    divided = config.world.size > 1 or config.rollout.engine is EngineKind.vllm_stock
    here = torch.device(config.device).type == "cuda" and (config.launch is not Launch.ray or not config.ray.address)
    if not (divided or here):
        return
    path = config.model.path
    if path is not None:
        model = read_config(path)
    elif isinstance(task, MakesModel):
        model = parse_config(task.model_config())
    else:
        return
    if divided:
        check_model(config, model)
    if here:
        check_room(config, model, path, usable_device(config.device))


def check_model(config: RunConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` where the model cannot be laid over the ranks, or vLLM's own code does not run it."""
    check_placement(model, config.world.layouts)
    if config.rollout.engine is EngineKind.vllm_stock:
        check_stock_model(model, config.device, config.world.engine.tp)
