"""A config.json, read so that no key of it is passed over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rlloop.errors import ModelError

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
        # training with other losses, or with other devices; heads that predict further tokens
        "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers",
        "num_nextn_predict_layers",
        # generation settings, which older files keep here; `SamplingParams` is what rlloop samples with
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
        "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
        "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    }
)  # fmt: skip


class Keys:
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

    def has(self, name: str) -> bool:
        return self._left.get(name) is not None

    def fixed(self, name: str, allowed: Any) -> None:
        """Takes a key that is understood with one value only."""
        if (given := self.take(name, None)) not in (allowed, None):
            self.refuse(name, given, json.dumps(allowed))

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


def read_json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise ModelError(f"{file} holds {type(read).__name__}, not a JSON object")
    return read
