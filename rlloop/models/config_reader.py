"""Typed reading of config.json in which no key is ignored silently."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rlloop.errors import ModelError
from rlloop.models.architecture import MixtureConfig

Own = dict[str, Any]  # arguments of ModelConfig that a family decides

# Keys that change neither a forward pass nor its gradient. A key that is neither here nor read by a family is refused.
INERT = frozenset(
    {
        # about the file itself
        "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "tokenizer_class",
        "unsloth_fixed", "unsloth_version", "is_llama_config", "transformers.js_config", "merged_adapter",
        # how Hugging Face runs it
        "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "use_cache", "torchscript",
        "cache_implementation", "return_dict", "output_attentions", "output_hidden_states", "pretraining_tp",
        "is_decoder", "use_bfloat16", "gradient_checkpointing",
        # heads other than the language model's
        "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "num_labels",
        # tokens. (A pad token is a token like any other here: Hugging Face alone gives its embedding no gradient.)
        "bos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "cls_token_id", "mask_token_id",
        "decoder_start_token_id", "prefix",
        # other losses or devices in training
        "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "tf_legacy_loss",
        # generation settings, which older files keep here; rlloop samples with `SamplingParams`
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
        "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
        "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    }
)  # fmt: skip


# Names of layer kinds in older files.
OLDER_NAMES = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
FLOAT32 = (2.0**-126, 2.0**127)
MOST = 2**24  # limit of any count: a larger one is a mistake, and would end in a failing allocation
ASKED: Any = object()  # in place of a default: the key is required


class Keys:
    """A JSON object of which every key must be read, inert or null: `refuse_the_rest` checks that.

    `count`, `number`, `flag` and `names` check types. A null is not a missing key: the first three refuse it unless
    `where_null` has given the value that it means to transformers.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str = "", file: str = "config.json") -> None:
        self._left = dict(raw)
        self._prefix, self._file = prefix, file

    def copy(self) -> Keys:
        """A copy, to read a key without consuming it."""
        return Keys(self._left, self._prefix, self._file)

    def has(self, name: str) -> bool:
        return self._left.get(name) is not None

    def null(self, name: str) -> bool:
        return name in self._left and self._left[name] is None

    def where_null(self, **meanings: Any) -> None:
        self._left.update({name: meaning for name, meaning in meanings.items() if self.null(name)})

    def take(self, name: str, default: Any = None) -> Any:
        """Consume a key that changes nothing or that the caller checks; a null is `default`."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def count(self, name: str, default: int = ASKED, *, least: int = 1, most: int = MOST) -> int:
        value = self._take_or(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(name, value, "a positive whole number" if least else "a whole number, 0 or above")
        if value > most:
            self.refuse(name, value, f"at most {most}")
        return value

    def number(self, name: str, default: float = ASKED, *, zero: bool = False) -> float:
        value = self._take_or(name, default)
        typed = isinstance(value, int | float) and not isinstance(value, bool)
        if not typed or not (FLOAT32[0] <= value <= FLOAT32[1] or (zero and value == 0)):  # so no NaN, no infinity
            self.refuse(name, value, f"{'0 or ' if zero else ''}a positive number that float32 holds")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._take_or(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def names(
        self, name: str, allowed: Collection[str], length: int, letters: Mapping[str, str] | None = None
    ) -> list[str] | None:
        """One of `allowed` for each of `length` layers, from a list or (`letters`) a string; None without the key."""
        if (value := self.take(name)) is None:
            return None
        kinds: list[str] = [OLDER_NAMES.get(kind) or kind for kind in value] if all_are(value, str) else []
        if letters and isinstance(value, str):
            kinds = [letters.get(letter, letter) for letter in value]
        if len(kinds) != length or not {*kinds} <= {*allowed}:
            spelled = f" (or a string of {' '.join(letters)})" if letters else ""
            self.refuse(name, value, f"{' or '.join(allowed)} for each of {length} layers{spelled}")
        return kinds

    def within(self, name: str) -> Keys:
        """Consume an object, to read its keys in turn."""
        if not isinstance(value := self.take(name), dict):
            self.refuse(name, value, "an object")
        return Keys(value, f"{self._prefix}{name}.", self._file)

    def fixed(self, name: str, *allowed: Any, null: bool = True) -> None:
        """Consume a key supported with these values only, each of which means the same as a missing key."""
        refused = self.null(name) and not null
        actual = self.take(name, allowed[0])
        if refused or actual not in allowed:
            self.refuse(name, None if refused else actual, " or ".join(json.dumps(value) for value in allowed))

    def refuse(self, name: str, value: Any, allowed: str) -> NoReturn:
        shown = "null" if value is None else repr(value)
        raise ModelError(f"{self._file}: {self._prefix}{name} is {shown}; supported is {allowed}")

    def refuse_the_rest(self) -> None:
        unknown = sorted(name for name, value in self._left.items() if value is not None and name not in INERT)
        if unknown:
            raise ModelError(
                f"{self._file}: rlloop does not know what {', '.join(self._prefix + name for name in unknown)} would "
                "change; remove it if it changes nothing"
            )

    def _take_or(self, name: str, default: Any) -> Any:
        if name not in self._left and default is ASKED:
            raise ModelError(f"{self._file} has no {self._prefix}{name}")
        return self._left.pop(name, default)


def all_are(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def expert_count(keys: Keys, *names: str, default: int = ASKED) -> int:
    """The number of experts, by the first of the family's `names` for it; a file may repeat it under other names."""
    name = next(filter(keys.has, names), names[-1])
    count = keys.count(name, default)
    for other in ("num_experts", "num_local_experts", "n_routed_experts"):
        if keys.has(other) and (value := keys.count(other)) != count:
            keys.refuse(other, value, f"the number of experts that {name} says ({count})")
    return count


def check_routing(keys: Keys, mixture: MixtureConfig) -> None:
    """Refuse a routing that cannot choose `top_k` experts from its groups."""
    count, rule = mixture.num_experts, mixture.routing
    if count % rule.groups or (rule.groups > 1 and count // rule.groups < 2):
        keys.refuse("n_group", rule.groups, f"1, or a divisor of the {count} experts that leaves two in a group")
    if rule.top_groups > rule.groups:
        keys.refuse("topk_group", rule.top_groups, f"at most n_group ({rule.groups})")
    if rule.top_k > count // rule.groups * rule.top_groups:
        keys.refuse("num_experts_per_tok", rule.top_k, "at most the number of experts that can be chosen")


def read_json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise ModelError(f"{file} holds {type(read).__name__}, not a JSON object")
    return read
