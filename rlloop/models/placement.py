"""Checks that a model can be divided over a layout, before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rlloop.models.architecture import ModelConfig
from rlloop.parallel.layout import Layout, Misfit, misfit, refuse_misfits, with_at_most, with_experts


def check_placement(config: ModelConfig, layouts: Mapping[str, Layout]) -> None:
    """Raises `ConfigError` for layouts that the model does not support, naming the nearest ones that it does.

    `layouts`: by their key in the configuration. Those of `rollout.layout` are an engine's, others a trainer's, whose
    cp ranks split sequences.
    """
    refuse_misfits(layouts, partial(fault, config), config.architecture)


def fault(config: ModelConfig, key: str, layout: Layout) -> Misfit | None:
    """The first rule that a layout violates, and one of as many ranks to try instead. `key`: see `check_placement`."""
    if layout.pp > config.num_layers:
        rule = f"pp is {layout.pp}, and there are {config.num_layers} layers"
        return rule, with_at_most(layout, "pp", config.num_layers)
    deep = 0 if config.vision is None else len(config.vision.deepstack)
    if layout.pp > 1 and config.num_layers // layout.pp < deep:
        rule = f"pp is {layout.pp}, and a picture's features enter the first {deep} layers, all of the first stage"
        return rule, with_at_most(layout, "pp", max(1, config.num_layers // deep))
    experts = 0 if config.mixture is None or not config.mixture.layers else config.mixture.num_experts
    for axis in ("cp", "tp"):
        if (degree := getattr(layout, axis)) > (heads := fewest_heads(config)):
            return f"{axis} is {degree}, and ranks split layers of {heads} heads", with_at_most(layout, axis, heads)
    if layout.ep > 1 and not experts:
        return f"ep is {layout.ep}, and there are no experts", with_experts(layout, 1)
    if layout.ep > max(1, experts):
        return f"ep is {layout.ep}, and there are {experts} experts", with_experts(layout, experts)
    return misfit(layout, trains=key != "rollout.layout")


def fewest_heads(config: ModelConfig) -> int:
    """The smallest number of heads in any layer."""
    recurrent = [mixer.num_heads for mixer in (config.delta, config.mamba) if mixer is not None]
    return min([config.num_heads, *recurrent])
