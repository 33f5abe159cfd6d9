"""Random checkpoints of Kimi K2.5, made by transformers and named as the released files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Kimi_K25Config, PreTrainedModel

from tests.support.checkpoints import LATENT, SIZES, YARN_ROPE, drawn

TEXT = {**SIZES, **LATENT, "model_type": "deepseek_v3", "rope_parameters": YARN_ROPE}
IMAGE = SIZES["vocab_size"]  # no text has it: transformers reads it as token 0 where there is no image
VISION = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 48, "pos_emb_height": 4,
    "pos_emb_width": 4,
}  # fmt: skip


def make_kimi_checkpoint(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **text: Any
) -> PreTrainedModel:
    """transformers' model with random weights, written to a folder."""
    config = Kimi_K25Config(
        text_config={**TEXT, **text}, vision_config=VISION, projection_hidden_size=32, image_token_id=IMAGE,
        video_token_id=IMAGE + 1, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model = drawn(model, seed).to(dtype)
    model.save_pretrained(folder)
    name_as_released(folder)
    return model


def name_as_released(folder: Path) -> None:
    """transformers 5.23 writes the decoder's `layers` as `blocks`, as the tower's are, and one norm of the projector
    under its own name."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers.").removeprefix("model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    raw = json.loads(config.read_text())
    raw |= {"architectures": ["KimiK25ForConditionalGeneration"], "media_placeholder_token_id": raw["image_token_id"]}
    raw["text_config"] |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    config.write_text(json.dumps(raw))
