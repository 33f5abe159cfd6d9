"""Configurations of models that rlloop runs as text models: the other parts of their files are left out.

Kimi K2.5 is a Kimi K2 whose prompts may hold features of images. Without images it is the text model alone, so its
vision tower and projector are neither read nor trained; a saved folder has the source's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlloop.models.config_reader import Keys

# architecture -> the parts that are left out, and how the names of their tensors begin
LEFT_OUT = {
    "KimiK25ForConditionalGeneration": {"vision tower": "vision_tower.", "projector": "mm_projector."},
}  # fmt: skip
TEXT_TYPES = ("deepseek_v3", "kimi_k2")  # model_type in text_config
# Keys of the parts that are left out, what stands for images in a prompt, and the label that no loss counts.
OTHERS = (
    "projection_hidden_size", "projection_layer_norm_eps", "image_token_id", "video_token_id",
    "vision_start_token_id", "vision_end_token_id", "media_placeholder_token_id", "video_placeholder",
    "use_unified_vision_chunk", "ignore_index",
)  # fmt: skip
# Keys of the vision_config that is left out: in the released files, and in transformers' for a tower of the same kind.
VISION = (
    "init_pos_emb_height", "init_pos_emb_time", "init_pos_emb_width", "merge_kernel_size", "merge_type",
    "mm_hidden_size", "mm_projector_type", "patch_size", "pos_emb_type", "projector_hidden_act", "projector_ln_eps",
    "text_hidden_size", "video_attn_type", "vt_hidden_size", "vt_intermediate_size", "vt_num_attention_heads",
    "vt_num_hidden_layers",
    "model_type", "pos_emb_height", "pos_emb_time", "pos_emb_width", "hidden_size", "hidden_act", "intermediate_size",
    "num_attention_heads", "num_hidden_layers",
)  # fmt: skip


def text_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's config.json. Raises `ModelError` for keys of the whole that would change it."""
    keys = Keys(raw)
    for name in ("architectures", "model_type", "auto_map", *OTHERS):
        keys.take(name)
    text = keys.take("text_config")
    if not isinstance(text, dict):
        keys.refuse("text_config", text, "an object")
    text = {name: value for name, value in text.items() if name != "architectures"}
    own = Keys(text, "text_config.")
    own.fixed("model_type", *TEXT_TYPES)
    own.fixed("tie_word_embeddings", False)
    if keys.flag("tie_word_embeddings", True):  # transformers' default
        keys.refuse("tie_word_embeddings", True, "false")
    both = (keys.take("quantization_config"), own.take("quantization_config"))  # the released file has the second
    quantized = [each for each in both if each is not None]
    if len(quantized) == 2 and quantized[0] != quantized[1]:
        keys.refuse("quantization_config", quantized[0], "that of text_config, or one of the two")
    eos_token_id = keys.take("eos_token_id")
    if keys.has("vision_config"):
        _check_vision(keys.within("vision_config"))
    keys.refuse_the_rest()
    return {
        "eos_token_id": eos_token_id, **text, "model_type": None,
        "quantization_config": quantized[0] if quantized else None,
    }  # fmt: skip


def _check_vision(keys: Keys) -> None:
    """Refuse what a vision_config that is left out is not known to have."""
    for name in VISION:
        keys.take(name)
    if keys.has("rope_parameters"):
        rope = keys.within("rope_parameters")
        for name in ("rope_type", "rope_theta"):
            rope.take(name)
        rope.refuse_the_rest()
    keys.refuse_the_rest()
