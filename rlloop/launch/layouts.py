"""Refusal of layouts that a model cannot be split over, or that the machine has no GPUs for, before anything loads."""

from __future__ import annotations

import torch

from rlloop.config.run import Launch, RunConfig
from rlloop.errors import ConfigError
from rlloop.models.architecture import ModelConfig
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
        f"{layouts}, and torchrun has started {processes} processes. Start it with --nproc-per-node {size}, or set "
        f"trainer.layout.dp_shard={processes}"
    )


def _check_gpus(needed: int, what: str) -> None:
    have = torch.cuda.device_count()
    if needed > have:
        raise ConfigError(
            f"{what} need {needed} GPUs, and this machine has {have}. Set trainer.layout.dp_shard={max(1, have)} with "
            "the other degrees at 1, or attach to a larger cluster by ray.address"
        )


def check_model(config: RunConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` where a layout has more ranks on an axis than the model has to give to them."""
    for section, layout in (("trainer", config.world.trainer), ("rollout", config.world.engine)):
        for axis, degree, count, things in _limits(layout, model):
            if degree > count:
                raise ConfigError(
                    f"{section}.layout.{axis} is {degree}, and {model.architecture} has {count or 'no'} {things}; "
                    f"{'leave it at 1' if count < 2 else f'set it to {count} or less'}, and "
                    f"{section}.layout.dp_shard to {config.world.size // min(degree, config.world.size)} or more"
                )


def _limits(layout: Layout, model: ModelConfig) -> list[tuple[str, int, int, str]]:
    """(axis, degree, the largest that gives every rank something, of what)"""
    experts = 0 if model.mixture is None else model.mixture.num_experts
    return [
        ("tp", layout.tp, model.num_heads, "heads"),
        ("cp", layout.cp * layout.tp, model.num_heads, "heads for cp x tp ranks"),
        ("pp", layout.pp, model.num_layers, "layers"),
        ("ep", layout.ep if layout.ep > 1 else 0, experts, "experts"),
    ]
