"""Applies a trainer's configuration to its model: recomputation, offloading, and frozen weights."""

from __future__ import annotations

from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.models import Model


def apply_settings(model: Model, config: TrainerConfig) -> None:
    """Set which layers the model recomputes, and freeze its vision tower under `freeze_vision_tower`.

    The tower is all of `visual`: patch embedding, positions, blocks, the merger and those of deepstack. Call this
    before masters are made, which leave frozen weights out. Raises `ConfigError` for a model that has no tower.
    """
    model.checkpoint_layers = config.checkpoint_every
    model.checkpoint_keep_attention = config.checkpoint_keep_attention
    model.checkpoint_offload = config.checkpoint_offload
    if not config.freeze_vision_tower:
        return
    if model.config.vision is None:
        raise ConfigError(
            f"trainer.freeze_vision_tower: {model.config.architecture} reads text only and has no vision tower; set it "
            "to false"
        )
    if model.visual is not None:  # None: another stage of a pipeline has it
        model.visual.requires_grad_(False)
