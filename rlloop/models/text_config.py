"""Configurations of models that rlloop runs as text models: the other parts of their files are left out.

Kimi K2.5 is a Kimi K2 whose prompts may hold features of images. Without images it is the text model alone, so its
vision tower and projector are neither read nor trained; a saved folder has the source's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlloop.models.config_reader import Keys, all_are
from rlloop.models.packed_config import given_once

# architecture -> the parts that are left out, and how the names of their tensors begin
LEFT_OUT = {
    "KimiK25ForConditionalGeneration": {"vision tower": "vision_tower.", "projector": "mm_projector."},
}  # fmt: skip
TEXT_TYPES = ("deepseek_v3", "kimi_k2")  # model_type in text_config
# Keys of the parts that are left out, what stands for images in a prompt, and the label that no loss counts.
OTHERS = (
    "projection_layer_norm_eps", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "media_placeholder_token_id", "video_placeholder", "use_unified_vision_chunk", "ignore_index",
)  # fmt: skip
# Keys of vision_config in the released files, and in transformers' for a tower of the same kind.
VISION_COUNTS = (
    "init_pos_emb_height", "init_pos_emb_time", "init_pos_emb_width", "pos_emb_height", "pos_emb_time", "pos_emb_width",
    "patch_size", "vt_intermediate_size", "intermediate_size", "vt_num_hidden_layers", "num_hidden_layers",
)  # fmt: skip
VISION_FIXED = {
    "model_type": ("", "kimi_k25", "kimi_k25_vision"),
    "merge_type": ("sd2_tpool",),
    "mm_projector_type": ("patchmerger",),
    "pos_emb_type": ("divided_fixed",),
    "video_attn_type": ("spatial_temporal",),
    "projector_hidden_act": ("gelu",),
    "hidden_act": ("gelu_pytorch_tanh",),
}


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
    quantized = given_once(keys, own)  # the released file has it in text_config
    eos_token_id = keys.take("eos_token_id")
    projection = keys.take("projection_hidden_size")
    if keys.has("vision_config"):
        _check_vision(keys.within("vision_config"), text.get("hidden_size"), projection)
    keys.refuse_the_rest()
    return {"eos_token_id": eos_token_id, **text, "model_type": None, "quantization_config": quantized}


def _check_vision(keys: Keys, text_size: Any, projection_size: Any) -> None:
    """Refuse a vision_config that no tower of this kind can have, though it is left out."""
    for name, allowed in VISION_FIXED.items():
        keys.fixed(name, *allowed)
    for name in filter(keys.has, VISION_COUNTS):
        keys.count(name)
    keys.number("projector_ln_eps", 1e-5)
    merged = keys.take("merge_kernel_size", [2, 2])
    if not all_are(merged, int) or len(merged) != 2 or min(merged) < 1:
        keys.refuse("merge_kernel_size", merged, "two positive whole numbers")
    keys.fixed("text_hidden_size", text_size)
    size = "vt_hidden_size" if keys.has("vt_hidden_size") else "hidden_size"
    width = keys.count(size, 1152)
    for name in ("hidden_size", "mm_hidden_size"):  # the projector reads the tower's features
        keys.fixed(name, width)
    if projection_size not in (None, width):
        keys.refuse(size, width, f"projection_hidden_size ({projection_size!r})")
    for name in ("vt_num_attention_heads", "num_attention_heads"):
        if keys.has(name) and width % (heads := keys.count(name)):
            keys.refuse(name, heads, f"a divisor of {size} ({width})")
    if keys.has("rope_parameters"):
        rope = keys.within("rope_parameters")
        rope.fixed("rope_type", "axial")
        rope.number("rope_theta", 10000.0)
        rope.refuse_the_rest()
    keys.refuse_the_rest()
