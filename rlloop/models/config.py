"""config.json of a Hugging Face folder, read into what the model is built from. What is not understood is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rlloop.errors import ModelError


@dataclass(frozen=True)
class Llama3Scaling:
    """Rope frequencies stretched for a longer context, as Llama 3.1 does (rope_type `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder, whatever its family calls it: what `transformer.Model` is built from."""

    architecture: str  # Hugging Face's: a key of `FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool  # queries and keys are normed a head at a time, before the rope
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tied: bool  # the output projection is the embedding
    initializer_range: float  # standard deviation of a new model's matrices
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False)  # config.json as it was


# Known to leave a forward pass and its gradient alone. A key that is neither here nor read below is refused.
INERT = frozenset(
    {
        # what the file says about itself
        "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "tokenizer_class",
        "unsloth_fixed", "unsloth_version", "is_llama_config", "transformers.js_config",
        # how Hugging Face runs it
        "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "use_cache", "torchscript",
        "cache_implementation", "return_dict", "output_attentions", "output_hidden_states", "pretraining_tp",
        "is_decoder", "use_bfloat16", "gradient_checkpointing",
        # other heads than the language model's
        "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "num_labels",
        # tokens. (A pad token is a token like any other here: Hugging Face alone gives its embedding no gradient.)
        "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix",
        # generation settings, which older files keep here; `SamplingParams` is what rlloop samples with
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
        "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
        "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    }
)  # fmt: skip

# Understood with this value only, which is also the one that a missing key means.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a Hugging Face folder; its generation_config.json, if any, says which tokens end a sequence.

    Raises `ModelError` for a folder or file that is missing, and as `parse_config` does.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"model folder {path} does not exist; give a Hugging Face checkpoint folder")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; give a Hugging Face checkpoint folder")
    generation = path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    return parse_config(read_json(path / "config.json"), eos_token_id=eos)


def parse_config(raw: Mapping[str, Any], *, eos_token_id: int | list[int] | None = None) -> ModelConfig:
    """The content of a config.json. `eos_token_id`, that of generation_config.json, wins over the one in it.

    Raises `ModelError` naming the key for whatever rlloop would not compute as Hugging Face does.
    """
    keys = _Keys(raw)
    architecture, family = _family(keys)
    if keys.take("quantization_config", None) is not None:
        raise ModelError("config.json has a quantization_config; float32, bfloat16 and float16 weights are supported")
    for name, allowed in FIXED.items():
        if (given := keys.take(name, None)) not in (allowed, None):
            keys.refuse(name, given, f"{json.dumps(allowed)}")
    hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    num_layers, vocab_size = keys.count("num_hidden_layers"), keys.count("vocab_size")
    max_positions = keys.count("max_position_embeddings")
    _refuse_sliding_window(keys, num_layers)
    eos_in_config = keys.take("eos_token_id", None)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        **family(keys, hidden_size, num_heads),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_rope(keys, max_positions),
        max_positions=max_positions,
        tied=keys.flag("tie_word_embeddings", False),
        initializer_range=keys.number("initializer_range", 0.02),
        eos_token_ids=_token_ids(eos_in_config if eos_token_id is None else eos_token_id, vocab_size),
        raw=dict(raw),
    )
    keys.refuse_the_rest()
    if config.num_heads % config.num_kv_heads:
        keys.refuse("num_key_value_heads", config.num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    if config.head_dim % 2:
        keys.refuse("head_dim", config.head_dim, "an even number")
    return config


# ------------------------------------------------------------------------------------------------------- families


def _llama(keys: _Keys, hidden_size: int, num_heads: int) -> dict[str, Any]:
    bias = keys.flag("attention_bias", False)
    return {
        "num_kv_heads": keys.count("num_key_value_heads", num_heads),
        "head_dim": keys.count("head_dim", hidden_size // num_heads),
        "qk_norm": False,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": keys.flag("mlp_bias", False),
    }


def _qwen2(keys: _Keys, hidden_size: int, num_heads: int) -> dict[str, Any]:
    return {
        "num_kv_heads": keys.count("num_key_value_heads"),
        "head_dim": keys.count("head_dim", hidden_size // num_heads),
        "qk_norm": False,
        "qkv_bias": True,
        "output_bias": False,
        "mlp_bias": False,
    }


def _qwen3(keys: _Keys, hidden_size: int, num_heads: int) -> dict[str, Any]:
    bias = keys.flag("attention_bias", False)
    return {
        "num_kv_heads": keys.count("num_key_value_heads"),
        "head_dim": keys.count("head_dim"),
        "qk_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": False,
    }


Family = Callable[["_Keys", int, int], dict[str, Any]]

FAMILIES: dict[str, tuple[str, Family]] = {  # architecture -> (model_type, what is its own)
    "LlamaForCausalLM": ("llama", _llama),
    "Qwen2ForCausalLM": ("qwen2", _qwen2),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
}


def _family(keys: _Keys) -> tuple[str, Family]:
    model_type, architectures = keys.take("model_type", None), keys.take("architectures", None)
    named = architectures or [name for name, (kind, _) in FAMILIES.items() if kind == model_type]
    kind, family = FAMILIES.get(named[0], (None, None)) if len(named) == 1 else (None, None)
    if family is None or model_type not in (kind, None):
        raise ModelError(
            f"config.json: architectures {architectures} with model_type {model_type!r} are not supported; supported "
            f"are {', '.join(f'{name} ({kind})' for name, (kind, _) in FAMILIES.items())}"
        )
    return named[0], family


def _refuse_sliding_window(keys: _Keys, num_layers: int) -> None:
    """A window may be named where no layer uses it, as Qwen's files do."""
    window, uses = keys.take("sliding_window", None), keys.take("use_sliding_window", None)
    first, kinds = keys.take("max_window_layers", None), keys.take("layer_types", None)
    if kinds is not None:
        other = sorted({kind for kind in kinds if kind != "full_attention"})
        if other or len(kinds) != num_layers:
            keys.refuse("layer_types", other or kinds, f"full_attention, once for each of {num_layers} layers")
    elif window is not None and uses is not False and (first is None or first < num_layers):
        keys.refuse("sliding_window", window, "null, or any with use_sliding_window false: full attention only")


ROPE_KEYS = {
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def _rope(keys: _Keys, max_positions: int) -> RopeConfig:
    """Either spelling: `rope_theta` beside `rope_scaling`, or both inside `rope_parameters` (transformers 5)."""
    scaling, parameters = keys.take("rope_scaling", None), keys.take("rope_parameters", None)
    if scaling and parameters and scaling != parameters:
        raise ModelError("config.json has both rope_scaling and rope_parameters, and they differ; keep one")
    theta = keys.number("rope_theta", 10000.0)
    name = "rope_scaling" if scaling else "rope_parameters"
    rope = _Keys(scaling or parameters or {}, f"{name}.")
    theta = rope.number("rope_theta", theta)
    older_name = rope.take("type", "default")
    kind = rope.take("rope_type", older_name)
    if kind not in ROPE_KEYS:
        rope.refuse("rope_type", kind, " or ".join(ROPE_KEYS))
    if (share := rope.take("partial_rotary_factor", None)) not in (1, None):
        rope.refuse("partial_rotary_factor", share, "1")
    scaled = None
    if kind == "llama3":
        scaled = Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_positions=rope.count("original_max_position_embeddings", max_positions),
        )
        if scaled.high_freq_factor <= scaled.low_freq_factor:
            rope.refuse(
                "high_freq_factor", scaled.high_freq_factor, f"above low_freq_factor ({scaled.low_freq_factor})"
            )
    rope.refuse_the_rest()
    return RopeConfig(theta, scaled)


# --------------------------------------------------------------------------------------------------------- reading


class _Keys:
    """A JSON object of which every key has to be taken, known as inert, or null."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self._left = dict(raw)
        self._prefix = prefix

    def take(self, name: str, default: Any) -> Any:
        given = self._left.pop(name, None)
        return default if given is None else given

    def count(self, name: str, default: int | None = None) -> int:
        given = self._take_or(name, default)
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            self.refuse(name, given, "a positive whole number")
        return given

    def number(self, name: str, default: float | None = None) -> float:
        given = self._take_or(name, default)
        if not isinstance(given, int | float) or isinstance(given, bool) or given <= 0:
            self.refuse(name, given, "a positive number")
        return float(given)

    def flag(self, name: str, default: bool) -> bool:
        given = self.take(name, default)
        if not isinstance(given, bool):
            self.refuse(name, given, "true or false")
        return given

    def refuse(self, name: str, given: Any, allowed: str) -> NoReturn:
        raise ModelError(f"config.json: {self._prefix}{name} is {given!r}; supported is {allowed}")

    def refuse_the_rest(self) -> None:
        unknown = sorted(name for name, given in self._left.items() if given is not None and name not in INERT)
        if unknown:
            raise ModelError(
                f"config.json: rlloop does not know what {', '.join(self._prefix + name for name in unknown)} would "
                "change; remove it if it changes nothing"
            )

    def _take_or(self, name: str, default: Any) -> Any:
        given = self.take(name, default)
        if given is None:
            raise ModelError(f"config.json has no {self._prefix}{name}")
        return given


def _token_ids(given: Any, vocab_size: int) -> tuple[int, ...]:
    ids = () if given is None else tuple(given) if isinstance(given, list) else (given,)
    for id in ids:
        if not isinstance(id, int) or not 0 <= id < vocab_size:
            raise ModelError(f"eos_token_id is {given!r}; ids are whole numbers from 0 to {vocab_size - 1}")
    return ids


def read_json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise ModelError(f"{file} holds {type(read).__name__}, not a JSON object")
    return read
