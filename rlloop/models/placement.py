"""Checks that a model can be divided over a layout, before anything loads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rlloop.models.architecture import ModelConfig
from rlloop.parallel.layout import Layout, Misfit, misfit, refuse_misfit, with_experts


def check_placement(config: ModelConfig, layout: Layout, key: str, *, trains: bool) -> None:
    """Raises `ConfigError` for a layout that the model does not support, naming the nearest one that it does.

    `key`: the layout's in the configuration, `trainer.layout` or `rollout.layout`. `trains`: it is a trainer's, whose
    cp ranks split sequences; an engine's has cp 1.
    """
    refuse_misfit(layout, key, partial(_fault, config, trains=trains), config.architecture)


def _fault(config: ModelConfig, layout: Layout, *, trains: bool) -> Misfit | None:
    """The first rule that a layout violates, and a layout of smaller degrees to try instead."""
    if layout.pp > config.num_layers:
        fault = f"pp is {layout.pp}, and there are {config.num_layers} layers"
        return fault, replace(layout, pp=config.num_layers)
    deep = 0 if config.vision is None else len(config.vision.deepstack)
    if layout.pp > 1 and config.num_layers // layout.pp < deep:
        fault = f"pp is {layout.pp}, and a picture's features enter the first {deep} layers, all of the first stage"
        return fault, replace(layout, pp=max(1, config.num_layers // deep))
    experts = 0 if config.mixture is None or not config.mixture.layers else config.mixture.num_experts
    for axis in ("cp", "tp"):
        if (degree := getattr(layout, axis)) > (heads := _heads(config)):
            fault = f"{axis} is {degree}, and ranks split layers of {heads} heads"
            return fault, with_experts(replace(layout, **{axis: heads, "ep": 1}), min(layout.ep, max(1, experts)))
    if layout.ep > 1 and not experts:
        return f"ep is {layout.ep}, and there are no experts", replace(layout, ep=1)
    if layout.ep > max(1, experts):
        return f"ep is {layout.ep}, and there are {experts} experts", with_experts(layout, experts)
    return misfit(layout, trains=trains)


def _heads(config: ModelConfig) -> int:
    """The smallest number of heads in any layer."""
    recurrent = [mixer.num_heads for mixer in (config.delta, config.mamba) if mixer is not None]
    return min([config.num_heads, *recurrent])
