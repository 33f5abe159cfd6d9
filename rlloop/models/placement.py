"""Checks that a model can be divided over a layout, before anything loads."""

from __future__ import annotations

from dataclasses import replace

from rlloop.errors import ConfigError
from rlloop.models.architecture import ModelConfig
from rlloop.parallel.layout import Layout


def check_placement(config: ModelConfig, layout: Layout, key: str, *, trains: bool) -> None:
    """Raises `ConfigError` for a layout that the model does not support, naming the nearest one that it does.

    `key`: the layout's in the configuration, `trainer.layout` or `rollout.layout`. `trains`: it is a trainer's, whose
    cp ranks split sequences; an engine's has cp 1.
    """
    if (misfit := _fault(config, layout, trains)) is None:
        return
    fault, fitting = misfit
    while (further := _fault(config, fitting, trains)) is not None:
        fitting = further[1]
    changed = {name: degree for name, degree in vars(fitting).items() if degree != getattr(layout, name)}
    instead = ", ".join(f"{key}.{name}={degree}" for name, degree in changed.items())
    raise ConfigError(f"{key} does not fit {config.architecture}: {fault}; set {instead}")


def _fault(config: ModelConfig, layout: Layout, trains: bool) -> tuple[str, Layout] | None:
    """The first rule that a layout violates, and a layout of smaller degrees that satisfies it."""
    if config.vision is not None and (layout.world_size > 1 or layout.ep > 1):
        return f"{config.architecture} reads images, which is not proven over several ranks", Layout()
    if layout.pp > config.num_layers:
        fault = f"pp is {layout.pp}, and there are {config.num_layers} layers"
        return fault, replace(layout, pp=config.num_layers)
    if layout.cp > 1 and not trains:
        return f"cp is {layout.cp}, and an engine does not split sequences", _without_cp(layout)
    if layout.cp > 1 and layout.tp > 1:
        return f"cp is {layout.cp} and tp {layout.tp}, which both split heads", _without_cp(layout)
    if layout.cp > 1 and (config.delta is not None or config.mamba is not None):
        return f"cp is {layout.cp}, and recurrent layers read tokens one after the other", _without_cp(layout)
    if layout.cp > 1 and config.latent is not None and config.latent.indexer is not None:
        return f"cp is {layout.cp}, and an indexer selects among the tokens of one rank", _without_cp(layout)
    for axis in ("cp", "tp"):
        if (degree := getattr(layout, axis)) > (heads := _heads(config)):
            fault = f"{axis} is {degree}, and ranks split layers of {heads} heads"
            return fault, _experts_fit(config, replace(layout, **{axis: heads, "ep": 1}), layout.ep)
    return _experts_fault(config, layout)


def _experts_fault(config: ModelConfig, layout: Layout) -> tuple[str, Layout] | None:
    if layout.ep == 1:
        return None
    if config.mixture is None or not config.mixture.layers:
        return f"ep is {layout.ep}, and there are no experts", replace(layout, ep=1)
    fitting = _experts_fit(config, replace(layout, ep=1), layout.ep)
    if layout.ep > config.mixture.num_experts:
        return f"ep is {layout.ep}, and there are {config.mixture.num_experts} experts", fitting
    if not _meets(layout, layout.ep):
        alike = layout.cp * layout.tp
        return f"ep is {layout.ep}, which neither divides tp nor is a multiple of cp x tp = {alike}", fitting
    return None


def _meets(layout: Layout, ep: int) -> bool:
    """True if the ranks of an expert group have whole micro-batches together, or (tp) the same tokens each."""
    return ep % (layout.cp * layout.tp) == 0 or (layout.cp == 1 and layout.tp % ep == 0)


def _experts_fit(config: ModelConfig, layout: Layout, most: int) -> Layout:
    """With the largest ep up to `most` that fits."""
    shared, count = layout.dp_shard * layout.cp * layout.tp, config.mixture.num_experts if config.mixture else 1
    fits = (ep for ep in range(min(most, count), 0, -1) if shared % ep == 0 and _meets(layout, ep))
    return replace(layout, ep=next(fits, 1))


def _heads(config: ModelConfig) -> int:
    """The smallest number of heads in any layer."""
    recurrent = [mixer.num_heads for mixer in (config.delta, config.mamba) if mixer is not None]
    return min([config.num_heads, *recurrent])


def _without_cp(layout: Layout) -> Layout:
    return replace(layout, cp=1, ep=1)
