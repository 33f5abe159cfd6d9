"""Configurations of models that read images: a text_config and a vision_config beside the ids of placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from rlloop.models.architecture import ModelConfig, VisionConfig
from rlloop.models.config_reader import Keys, all_are
from rlloop.models.packed_config import given_once


@dataclass(frozen=True)
class Towered:
    """A family with a vision tower."""

    text_types: tuple[str, ...]  # model_type in text_config
    vision_types: tuple[str, ...]  # model_type in vision_config
    deepstack: tuple[int, ...] | None  # default of a missing deepstack_visual_indexes; None: the family has none


# Released files give the tower the model_type of the whole model.
TOWERED = {
    "Qwen3VLForConditionalGeneration": Towered(("qwen3_vl_text",), ("qwen3_vl_vision", "qwen3_vl"), (8, 16, 24)),
    "Qwen3VLMoeForConditionalGeneration": Towered(
        ("qwen3_vl_moe_text",), ("qwen3_vl_moe_vision", "qwen3_vl_moe"), (8, 16, 24)
    ),
    "Qwen3_5MoeForConditionalGeneration": Towered(
        ("qwen3_5_moe_text",), ("qwen3_5_moe_vision", "qwen3_5_moe"), None
    ),
}  # fmt: skip
MARKS = ("vision_start_token_id", "vision_end_token_id")  # tokens that only mark up the prompt


def split(raw: Mapping[str, Any], architecture: str) -> tuple[dict[str, Any], Keys]:
    """The text model's config.json, and the whole model's other keys."""
    keys, family = Keys(raw), TOWERED[architecture]
    for name in ("architectures", "model_type", *MARKS):
        keys.take(name)
    text = keys.take("text_config")
    if not isinstance(text, dict):
        keys.refuse("text_config", text, "an object")
    text = dict(text)
    own = Keys(text, "text_config.")
    own.fixed("model_type", *family.text_types)
    tied = keys.flag("tie_word_embeddings", False)  # transformers ties by the outer one alone
    text = {**text, "architectures": [architecture], "model_type": None, "tie_word_embeddings": tied}
    text["quantization_config"] = given_once(keys, own)  # the tower's weights stay plain: `weight_reader`
    if (eos_token_id := keys.take("eos_token_id")) is not None:
        text.setdefault("eos_token_id", eos_token_id)
    return text, keys


def with_tower(config: ModelConfig, keys: Keys, raw: Mapping[str, Any]) -> ModelConfig:
    """The text model's configuration and its tower's. `keys`: those of the whole model that are left."""
    vision_config = keys.take("vision_config")
    if not isinstance(vision_config, dict):
        keys.refuse("vision_config", vision_config, "an object")
    token = keys.count("image_token_id", least=0, most=config.vocab_size - 1)
    video = keys.count("video_token_id", least=0) if keys.has("video_token_id") else None
    keys.refuse_the_rest()
    vision = _read(Keys(vision_config, "vision_config."), TOWERED[config.architecture], token, video)
    if vision.out_size != config.hidden_size:
        Keys({}, "vision_config.").refuse(
            "out_hidden_size", vision.out_size, f"the decoder's hidden_size ({config.hidden_size})"
        )
    if len(vision.deepstack) > config.num_layers:
        Keys({}, "vision_config.").refuse(
            "deepstack_visual_indexes", list(vision.deepstack), f"at most one for each of {config.num_layers} layers"
        )
    return replace(config, vision=vision, raw=dict(raw))


def _read(keys: Keys, family: Towered, image_token_id: int, video_token_id: int | None) -> VisionConfig:
    keys.fixed("model_type", *family.vision_types)
    keys.fixed("hidden_act", "gelu_pytorch_tanh")
    keys.fixed("attention_dropout", 0)
    keys.take("initializer_range")
    rope = keys.take("rope_parameters", {})
    if not isinstance(rope, dict):
        keys.refuse("rope_parameters", rope, "an object")
    rope = Keys(rope, "vision_config.rope_parameters.")
    rope.fixed("rope_type", "axial")
    theta = rope.number("rope_theta", 10000.0)
    rope.refuse_the_rest()
    depth, width = keys.count("depth", 27), keys.count("hidden_size", 1152)
    heads, positions = keys.count("num_heads", 16), keys.count("num_position_embeddings", 2304)
    if width % heads or width // heads % 4:
        keys.refuse("num_heads", heads, f"a number that cuts hidden_size ({width}) into heads of a multiple of 4")
    if isqrt(positions) ** 2 != positions:
        keys.refuse("num_position_embeddings", positions, "a square")
    blocks = keys.take("deepstack_visual_indexes", list(family.deepstack or ()))
    if not all_are(blocks, int) or blocks != sorted({*blocks} & {*range(depth)}) or (blocks and not family.deepstack):
        allowed = f"blocks of the {depth}, ascending" if family.deepstack else "an empty list"
        keys.refuse("deepstack_visual_indexes", blocks, allowed)
    config = VisionConfig(
        depth=depth,
        hidden_size=width,
        intermediate_size=keys.count("intermediate_size", 4304),
        num_heads=heads,
        channels=keys.count("in_channels", 3),
        patch_size=keys.count("patch_size", 16),
        temporal_patch_size=keys.count("temporal_patch_size", 2),
        merge_size=keys.count("spatial_merge_size", 2),
        out_size=keys.count("out_hidden_size", 3584),
        side=isqrt(positions),
        deepstack=tuple(blocks),
        rope_theta=theta,
        image_token_id=image_token_id,
        video_token_id=video_token_id,
    )
    keys.refuse_the_rest()
    return config
