"""Random checkpoints of models that read images, made by transformers, and inputs for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from rlloop import ModelInput
from rlloop.inputs import Image
from rlloop.models.config import read_config
from rlloop.models.vision_processor import FILE, ImageProcessor
from rlloop.trainer import TrainSequence
from tests.support.train_sequences import make_batch, make_groups

START, PAD, END = 90, 91, 92  # tokens of the prompt's form
TEXT = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
    },
}  # fmt: skip
VISION = {
    "depth": 3, "hidden_size": 40, "intermediate_size": 56, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "out_hidden_size": 48, "num_position_embeddings": 36, "in_channels": 3,
}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, {}, {"deepstack_visual_indexes": [0, 2]}),
    "qwen3_vl_moe": (
        Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, MIXTURE, {"deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration,
        {**MIXTURE, "head_dim": 32, "shared_expert_intermediate_size": 20, "linear_key_head_dim": 12,
         "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "layer_types": ["linear_attention", "full_attention", "full_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 1, 1],
                             "mrope_interleaved": True, "partial_rotary_factor": 0.25}},
        {},
    ),
}  # fmt: skip
WIDE = {  # text and tower of sizes that fill tiles; heads of 72 numbers are Qwen3-VL's
    "text": {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 1024},
    "vision": {"hidden_size": 288, "num_heads": 4, "intermediate_size": 384, "out_hidden_size": 256},
}


def _config(family: str, tied: bool, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    make, _, own_text, own_vision = FAMILIES[family]
    return make(
        text_config={**TEXT, **own_text, **text}, vision_config={**VISION, **own_vision, **vision},
        image_token_id=PAD, video_token_id=93, vision_start_token_id=START, vision_end_token_id=END,
        tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip


def image_config(family: str, text: dict[str, Any], vision: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of such a folder's config.json, but for what `text` and `vision` change."""
    raw = json.loads(_config(family, False, text, vision or {}).to_json_string())
    return {**raw, "architectures": [FAMILIES[family][1].__name__]}


def make_image_checkpoint(
    folder: Path, family: str = "qwen3_vl", *, seed: int = 0, dtype: torch.dtype = torch.float32, tied: bool = False,
    text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None,
) -> PreTrainedModel:  # fmt: skip
    """transformers' own model with random weights, written to a folder."""
    model = FAMILIES[family][1](_config(family, tied, text or {}, vision or {}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if ".gate.weight" in name:
                parameter.copy_(noise * 4 / parameter.shape[-1] ** 0.5)
            elif "norm" in name and "bias" not in name:
                centred = family == "qwen3_5_moe" and "visual" not in name and "linear_attn" not in name
                parameter.copy_((0 if centred else 1) + 0.2 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.4 * noise)
            elif "patch_embed" in name:
                parameter.copy_(noise / 96**0.5)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def make_wide_image_checkpoint(folder: Path, family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Of sizes that fill the tiles of a GPU's kernels."""
    sections: dict[str, Any] = {"mrope_section": [12, 10, 10]}
    if family == "qwen3_5_moe":
        sections = {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25}
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_interleaved": True, **sections}
    text = {**WIDE["text"], "rope_parameters": rope}
    return make_image_checkpoint(folder, family, dtype=dtype, text=text, vision=WIDE["vision"])


def add_processor(folder: Path, least: int = 256) -> None:
    """The folder's preprocessor_config.json. `least`: pixels of the smallest picture, 64 a feature."""
    vision = read_config(folder).vision
    assert vision is not None
    (folder / FILE).write_text(json.dumps(ImageProcessor(vision, least).to_config()))


def image(height: int, width: int, seed: int = 0, numbers: int = 96) -> Image:
    generator = np.random.default_rng(seed)
    return Image(generator.uniform(-1, 1, (height * width, numbers)).astype(np.float32), height, width)


def prompt_with(*parts: list[int] | Image, merge: int = 2) -> ModelInput:
    """Texts and images in order, each image between its marks."""
    ids: list[int] = []
    places, images = [], []
    for part in parts:
        if isinstance(part, Image):
            count = part.height * part.width // merge**2
            places += range(len(ids) + 1, len(ids) + 1 + count)
            ids += [START, *[PAD] * count, END]
            images.append(part)
        else:
            ids += part
    return ModelInput.with_images(ids, places, images) if images else ModelInput.from_ids(ids)


def theirs(model: PreTrainedModel, prompt: ModelInput, completion: list[int]) -> torch.Tensor:
    """transformers' logits that predict the completion, [T, V]."""
    ids = torch.tensor([prompt.token_ids + completion])
    images = [span.image for span in prompt.contents if span.image is not None]
    if not images:
        return model(ids).logits[0, len(prompt) - 1 : -1]
    kinds = torch.zeros_like(ids)
    for span in prompt.contents:
        kinds[0, span.start : span.end] = 1
    made = model(
        ids, pixel_values=torch.cat([torch.from_numpy(each.patches) for each in images]).to(model.dtype),
        image_grid_thw=torch.tensor([[1, each.height, each.width] for each in images]), mm_token_type_ids=kinds,
    )  # fmt: skip
    return made.logits[0, len(prompt) - 1 : -1]


def inputs() -> list[tuple[ModelInput, list[int]]]:
    """Prompts with images of several shapes, two at once and none, and completions."""
    rng = np.random.default_rng(0)

    def text(count: int) -> list[int]:
        return rng.integers(3, 90, count).tolist()

    prompts = [
        prompt_with(text(3), image(4, 6), text(5)),
        prompt_with(image(12, 10, 1), text(2), image(2, 2, 2), text(4)),
        prompt_with(text(20)),
        prompt_with(text(1), image(2, 8, 3)),
    ]
    return [(prompt, text(count)) for prompt, count in zip(prompts, (9, 20, 11, 1), strict=True)]


def wide_prompts() -> list[ModelInput]:
    """For `make_wide_image_checkpoint`: one large image, two images, text alone (the 9th to 12th), and `inputs`."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, 90, int(n)).tolist() for n in rng.integers(1, 60, 12)]
    large = [prompt_with(text, image(24, 20, seed), text[:5]) for seed, text in enumerate(texts[:4])]
    two = [prompt_with(image(4, 6, seed), text, image(12, 10, seed)) for seed, text in enumerate(texts[4:8])]
    return [*large, *two, *(prompt_with(text) for text in texts[8:]), *(prompt for prompt, _ in inputs())]


def make_picture_batch(count: int, seed: int) -> list[TrainSequence]:
    """As `make_batch`, with an image in about half of the prompts, two in some, and one in two of the prompts."""
    batch, shared = make_batch(count, seed), image(2, 4, seed)
    for index, (each, kind) in enumerate(zip(batch, np.random.default_rng(seed).permutation(count), strict=True)):
        images = [[], [image(4, 6, seed + index)], [], [shared], [shared, image(4, 2, seed + index)]][kind % 5]
        prompt, moved = prompt_with(each.token_ids[:1], *images, each.token_ids[1 : each.predict[0]]), each.predict[0]
        ids = prompt.token_ids + each.token_ids[moved:]
        batch[index] = replace(
            each, token_ids=ids, predict=range(len(prompt), len(ids)), model_input=prompt if images else None
        )
    return batch


def make_picture_groups() -> list[TrainSequence]:
    """Groups of 3, 1 and 2, each with a picture in its prompt: 42 features, of which 2 stand after what is shared."""
    picture, batch = image(12, 14), []
    for each in make_groups([(3, 30), (1, 30), (2, 70)]):
        prompt = prompt_with(each.token_ids[:23], picture, each.token_ids[23 : each.predict[0]])
        ids = prompt.token_ids + each.token_ids[each.predict[0] :]
        batch.append(replace(each, token_ids=ids, predict=range(len(prompt), len(ids)), model_input=prompt))
    return batch
