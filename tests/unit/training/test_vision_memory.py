"""Memory predicted for vision towers: what they save, what their training works in, and what a frozen one needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlloop.inputs import Image
from rlloop.models import Model, new_model
from rlloop.parallel.layout import Layout
from rlloop.training import vision_memory
from rlloop.training.memory import predict
from tests.support.image_models import image_config
from tests.support.memory_use import Peak, saved

SIDE = 32
PATCHES = SIDE**2
TOWERS = {  # in each, another term is the largest
    "width": {"depth": 4, "deepstack_visual_indexes": [0, 2], "hidden_size": 80, "intermediate_size": 40},
    "inner": {"depth": 2, "deepstack_visual_indexes": [], "hidden_size": 32, "intermediate_size": 512},
    "patches": {"depth": 1, "deepstack_visual_indexes": [], "hidden_size": 8, "patch_size": 16},
}


def outside(vision: Any, itemsize: int) -> int:
    """Bytes a patch that a tower saves, but for its blocks' inside."""
    return vision_memory.inputs(vision, itemsize) + vision_memory.kept(vision, itemsize)


def made(name: str, dtype: str, every: int = 1) -> tuple[Model, Any, Image]:
    model = new_model(image_config("qwen3_vl", {}, TOWERS[name]), seed=0, dtype=dtype)
    model.checkpoint_layers = every
    vision = model.config.vision
    assert vision is not None
    patches = np.random.default_rng(0).standard_normal((PATCHES, vision.patch_width), np.float32)
    return model, vision, Image(patches, SIDE, SIDE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TOWERS)
def test_what_a_tower_saves_is_predicted_within_a_hundredth(name: str, dtype: str) -> None:
    model, vision, image = made(name, dtype)
    itemsize = model.dtype.itemsize
    with saved(list(model.parameters())) as kept:
        model.see([image])
    assert kept.bytes == pytest.approx(PATCHES * outside(vision, itemsize), rel=0.01)
    model.checkpoint_layers = 0
    with saved(list(model.parameters())) as whole:
        model.see([image])
    tables = 2 * 4 * vision.head_dim // 2 + 8  # that all blocks read
    # A block's input is one sum in `block`, and was counted in `kept` by its parts; what a merger of deepstack read was
    # counted once.
    deep = len(vision.deepstack)
    sums = 2 * vision.depth - 1 - deep
    blocks = vision.depth * vision_memory.block(vision, itemsize) - itemsize * vision.hidden_size * sums
    expected = outside(vision, itemsize) + blocks + tables
    assert whole.bytes == pytest.approx(PATCHES * expected, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_and_seeing_hold_what_is_predicted(dtype: str) -> None:
    """Training at most a fifth less: the last merger's part of `kept` is freed before blocks begin."""
    model, vision, image = made("width", dtype)
    itemsize, features = model.dtype.itemsize, PATCHES // vision.merge_size**2
    model.see([image])  # tables of its grid are kept
    with Peak() as peak:
        model.see([image])[0].float().sum().backward()
    work = vision_memory.block(vision, itemsize) + vision_memory.block_backward(vision, itemsize)
    work += outside(vision, itemsize)
    predicted = PATCHES * work + features * vision_memory.features(vision, itemsize, True)
    assert 0.8 * predicted <= peak.bytes <= 1.05 * predicted
    model.requires_grad_(False)
    with Peak() as peak:
        model.see([image])
    predicted = PATCHES * vision_memory.forward(vision, itemsize)
    predicted += features * vision_memory.features(vision, itemsize, False)
    assert peak.bytes == pytest.approx(predicted, rel=0.2)


def test_a_tower_counts_where_it_trains_and_by_its_tokens() -> None:
    config = new_model(image_config("qwen3_vl", {}, TOWERS["width"]), seed=0).config
    vision = config.vision
    assert vision is not None

    def parts(**options: Any) -> dict[str, int]:
        return predict(config, options.pop("layout", Layout()), torch.bfloat16, 4096, **options).parts

    text, some, every = parts(image_tokens=0), parts(image_tokens=1024), parts()
    features = 4 * vision_memory.kept(vision, 2) + vision_memory.features(vision, 2, True)
    of_layer = 2 * 4096 * config.hidden_size
    assert text["kept"] == config.num_layers * of_layer
    for made, tokens in ((some, 1024), (every, 4096)):  # when the tower's turn comes, layers have freed what they kept
        assert made["kept"] == of_layer + tokens * 4 * vision_memory.inputs(vision, 2)
        assert made["features"] == tokens * features
    spread = parts(layout=Layout(cp=4))
    assert (spread["kept"], spread["features"]) == (every["kept"] // 4, every["features"] // 4)
    away = parts(offload_activations=True)  # the blocks' inputs, not what is saved outside of checkpoints
    assert (away["kept"], away["features"]) == (of_layer, every["features"])
    for frozen in (parts(freeze_tower=True), parts(lora=4)):
        assert frozen["kept"] == of_layer
        assert frozen["features"] == 4096 * vision_memory.features(vision, 2, False)
    seen = 4 * 4096 * vision_memory.forward(vision, 2)
    assert parts(freeze_tower=True)["activations"] == max(text["activations"], seen)
    work = vision_memory.block(vision, 2) + vision_memory.block_backward(vision, 2)
    work = max(work, vision_memory.forward(vision, 2))
    assert every["activations"] == max(text["activations"], 4 * 4096 * work)
