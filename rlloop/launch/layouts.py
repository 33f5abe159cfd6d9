"""Refusal of layouts that a model cannot be split over, or that the machine has no GPUs for, before anything loads."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlloop.config.layout import World
from rlloop.config.run import Launch, RunConfig
from rlloop.errors import ConfigError
from rlloop.models.architecture import ModelConfig
from rlloop.models.placement import check_placement
from rlloop.parallel.layout import Layout


def check_launch(config: RunConfig, processes: int) -> None:
    """Raises `ConfigError` where the layouts do not fit what was started: `processes` by torchrun, 1 without it."""
    size = config.world.size
    if config.launch is Launch.ray:
        if processes > 1:
            raise ConfigError(f"launch=ray starts its own processes, and torchrun has started {processes}; use one")
        needed = size + config.replicas * config.world.engine.world_size
        if config.device == "cuda" and config.ray.address is None and size > 1:
            _check_gpus(needed, f"trainer.layout and rollout.layout, with ray.replicas={config.replicas},")
        return
    if size == processes:
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


def _by_dp_shard(trainer: Layout, rollout: Layout, processes: int) -> str:
    """The `trainer.layout.dp_shard` that makes a world of so many processes, as a clause; empty if none does."""
    degree = processes * trainer.dp_shard // trainer.world_size
    try:
        world = World.of(replace(trainer, dp_shard=degree), rollout)
    except ConfigError:
        return ""
    return f", or set trainer.layout.dp_shard={degree}" if world.size == processes else ""


def _check_gpus(needed: int, what: str) -> None:
    have = torch.cuda.device_count()
    if needed > have:
        raise ConfigError(
            f"{what} need {needed} GPUs, and this machine has {have}. Set trainer.layout.dp_shard={max(1, have)} with "
            "the other degrees at 1, or attach to a larger cluster by ray.address"
        )


def check_model(config: RunConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` where the model cannot be laid over the ranks."""
    check_placement(model, config.world.trainer, "trainer.layout", trains=True)
    check_placement(model, config.world.engine, "rollout.layout", trains=False)
