"""Refusal of a model that trains and that a GPU has no room for, before it is made or loaded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from rlloop.config.run import RunConfig
from rlloop.errors import ConfigError
from rlloop.models.architecture import ModelConfig
from rlloop.models.weight_reader import packed_parameters
from rlloop.numerics.packed import Packing
from rlloop.parallel.layout import Layout, beside, changes, keys_of
from rlloop.training.memory import DTYPES, GIB, layouts, predict, preference


def check_room(config: RunConfig, model: ModelConfig, folder: str | Path | None, device: torch.device) -> None:
    """Raises `ConfigError` where the weights of a rank, its masters and moments alone take more than its GPU has.

    `folder`: the model's; None: it has not been made. What a step takes beside them is not counted, since it depends on
    the batch: `rlloop doctor --model` predicts it.
    """
    if device.type != "cuda" or config.model.dtype not in DTYPES or config.model.quantize != "none":
        return
    if model.quantization is not None and not config.model.lora.rank:
        return  # packed weights do not train, which is refused when they are loaded
    packed = {} if folder is None else packed_parameters(model, Path(folder))
    needs = partial(_taken, config, model, packed)
    layout, room = config.world.trainer, torch.cuda.get_device_properties(device).total_memory
    taken = needs(layout, config.trainer.offload)
    if taken <= room:
        return
    staged = not (config.algorithm.critic.lr or config.trainer.shard == "parameters")
    trainer, rollout = config.layouts
    fitting = (
        "set " + " ".join(changes("trainer.layout", trainer, each) + changes("rollout.layout", rollout, beside(each)))
        for each in sorted(layouts(model, layout.world_size), key=preference)
        if (staged or each.pp == 1) and needs(each, config.trainer.offload) <= room
    )
    advice = list(itertools.islice(fitting, 1))
    if config.model.dtype != "float32" and needs(layout, "masters") <= room:
        advice.append("set trainer.offload=masters")
    raise ConfigError(
        f"trainer.layout ({keys_of(layout) or 'one rank'}) keeps {taken / GIB:.1f} GiB of weights, masters and moments "
        f"on a GPU, which has {room / GIB:.1f}; {', or '.join([*advice, 'use more GPUs'])}. What fits, with all that a "
        f"step takes: rlloop doctor --model {folder or 'FOLDER'} --gpus {layout.world_size}"
        f"{'' if folder else ', of a folder with config.json'}"
    )


def _taken(config: RunConfig, model: ModelConfig, packed: Mapping[str, Packing], layout: Layout, offload: str) -> int:
    """Bytes that a rank holds from its first update on. An adapter's own are left out: few, and not known exactly."""
    trainer, lora = config.trainer, config.model.lora.rank
    parts = predict(
        model, layout, DTYPES[config.model.dtype], trainer.max_batch_tokens, offload, lora=lora,
        freeze_tower=trainer.freeze_vision_tower, packed=packed,
        pieces=trainer.shard == "parameters",
    ).parts  # fmt: skip
    return sum(parts.get(name, 0) for name in ("compute copy", *(() if lora else ("masters", "optimizer"))))
