"""Reads a Hugging Face config.json into a `ModelConfig`; keys that rlloop does not understand are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlloop.errors import ModelError
from rlloop.models.architecture import ModelConfig
from rlloop.models.config_reader import ASKED, Keys, all_are, read_json
from rlloop.models.families import ALIASES, FAMILIES, LACKING, Family
from rlloop.models.packed_config import MODELOPT, read_scheme, with_modelopt
from rlloop.models.ropes import read_rope
from rlloop.models.text_config import LEFT_OUT, text_of
from rlloop.models.vision_config import TOWERED, split, with_tower

# Supported with this value only, which is also the default.
FIXED: dict[str, Any] = {
    "attention_dropout": 0,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}
# Counts of multi-token-prediction layers by family: released files have such layers, the model leaves them out.
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def how_to_fetch(path: str | Path) -> str:
    """Advice for a missing model folder: for a name such as Qwen/Qwen3-0.6B, the command that downloads it."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)) and not Path(path).exists():
        local = str(path).partition("/")[2]
        return (
            f"if it is a model of the Hugging Face Hub, fetch it: `hf download {path} --local-dir {local}` (hf is "
            f"of the package huggingface_hub), and give {local}"
        )
    return "give a Hugging Face checkpoint folder"


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a Hugging Face folder. Its generation_config.json, if any, names the end-of-sequence tokens,
    and its hf_quant_config.json the format of packed weights.

    Raises `ModelError` for a folder or file that is missing, for an adapter in the folder, and as `parse_config` does.
    """
    path = Path(folder)
    if not path.is_dir():
        is_no = "is no folder" if path.exists() else "does not exist"
        raise ModelError(f"model folder {path} {is_no}; {how_to_fetch(path)}")
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"{path} holds an adapter (adapter_config.json), which would not be applied; merge it into the weights, or "
            "move it to a folder of its own"
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; give a Hugging Face checkpoint folder")
    generation = path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    raw = read_json(path / "config.json")
    if (path / MODELOPT).is_file():
        raw = with_modelopt(raw, read_json(path / MODELOPT))
    return parse_config(raw, eos_token_id=eos)


def parse_config(raw: Mapping[str, Any], *, eos_token_id: int | list[int] | None = None) -> ModelConfig:
    """Parse the content of a config.json. `eos_token_id`, from generation_config.json, overrides the one in it.

    Raises `ModelError` naming the key for anything that rlloop would not compute as Hugging Face does.
    """
    keys = Keys(raw)
    architecture, family = _family(keys)
    if architecture in LEFT_OUT:
        text = text_of(raw)
        config = _parsed(text, Keys(text), architecture, family, eos_token_id)
        return replace(config, left_out=LEFT_OUT[architecture], raw=dict(raw))
    if architecture not in TOWERED:
        return _parsed(raw, keys, architecture, family, eos_token_id)
    text, others = split(raw, architecture)
    keys = Keys(text)
    _family(keys)
    return with_tower(_parsed(text, keys, architecture, family, eos_token_id), others, raw)


def _parsed(
    raw: Mapping[str, Any], keys: Keys, architecture: str, family: Family, eos_token_id: int | list[int] | None
) -> ModelConfig:
    if (quantized := keys.take("quantization_config")) is not None:
        read_scheme(quantized)
    for name, allowed in FIXED.items():
        keys.fixed(name, allowed)
    keys.fixed("hidden_act", "silu", "swish", null=False)
    keys.fixed("is_causal", True, null=False)
    hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    blocks = raw.get("layers_block_type") or raw.get("hybrid_override_pattern")  # Nemotron counts its layers this way
    counted = len(blocks) if isinstance(blocks, list | str) and blocks else 1 if "layers_block_type" in raw else ASKED
    num_layers, vocab_size = keys.count("num_hidden_layers", counted, most=10_000), keys.count("vocab_size")
    max_positions = keys.count("max_position_embeddings")
    rope = read_rope(keys, max_positions, architecture)
    eos_in_config = keys.take("eos_token_id")
    own = {"rope": rope, **family(keys, hidden_size, num_heads, num_layers, rope)}
    if "intermediate_size" not in own:
        own["intermediate_size"] = keys.count("intermediate_size")
    if "tied" not in own:
        own["tied"] = keys.flag("tie_word_embeddings", False)
    if "rms_norm_eps" not in own:
        own["rms_norm_eps"] = keys.number("rms_norm_eps", 1e-6)
    keys.where_null(**dict.fromkeys(FURTHER, 0))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        **own,
        max_positions=max_positions,
        further_layers=max(keys.count(name, 0, least=0) for name in FURTHER),
        initializer_range=keys.number("initializer_range", 0.02),
        eos_token_ids=_token_ids(eos_in_config if eos_token_id is None else eos_token_id, vocab_size),
        quantization=quantized,
        raw=dict(raw),
    )
    keys.refuse_the_rest()
    if config.num_heads % config.num_kv_heads:
        keys.refuse("num_key_value_heads", config.num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    if config.rope_dim % 2:
        keys.refuse("head_dim" if config.latent is None else "qk_rope_head_dim", config.rope_dim, "an even number")
    if config.rope.sections is not None and max(config.rope.sections[1:]) * 3 > config.rope_dim // 2 + 2:
        keys.refuse("rope_parameters.mrope_section", list(config.rope.sections), f"{config.rope_dim // 2} frequencies")
    if config.rope_dim == 0 != config.rope.share:
        keys.refuse("partial_rotary_factor", config.rope.share, f"2 or more of the {config.head_dim} numbers of a head")
    return config


def _family(keys: Keys) -> tuple[str, Family]:
    model_type, architectures = keys.take("model_type"), keys.take("architectures")
    named = architectures or [name for name, (kinds, _) in FAMILIES.items() if model_type in kinds]
    named = [ALIASES.get(name, name) for name in named] if all_are(named, str) else []
    kinds, family = FAMILIES.get(named[0], ((), None)) if len(named) == 1 else ((), None)
    if lacking := LACKING.get(str(model_type)):
        raise ModelError(
            f"config.json: model_type {model_type!r} is not supported; rlloop lacks its {', '.join(lacking)}"
        )
    if family is None or model_type not in (*kinds, None):
        supported = [f"{name} ({' or '.join(kinds)})" for name, (kinds, _) in FAMILIES.items()]
        raise ModelError(
            f"config.json: architectures {architectures} with model_type {model_type!r} are not supported; supported "
            f"are {', '.join(supported)}"
        )
    return named[0], family


def _token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for id in ids:
        if type(id) is not int or not 0 <= id < vocab_size:
            raise ModelError(f"eos_token_id is {value!r}; ids are whole numbers from 0 to {vocab_size - 1}")
    return ids
