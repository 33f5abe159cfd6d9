"""A model folder out of nothing, to try things without a download: a small random Qwen3, tokenizer and chat template.

Run as `python -m rlloop.recipes.custom.tiny my-model`.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

UNKNOWN, END = "<|unknown|>", "<|end|>"
SPECIAL = (UNKNOWN, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _vocabulary(words: Sequence[str] | None) -> list[str]:
    return [*SPECIAL, *(string.printable if words is None else words)]


def tiny_config(words: Sequence[str] | None = None, *, hidden_size: int = 64, num_layers: int = 2) -> dict[str, Any]:
    """The config.json of `write_tiny`'s model."""
    vocabulary = _vocabulary(words)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(vocabulary),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": hidden_size // 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "initializer_range": 0.02,
        "eos_token_id": vocabulary.index(END),
        "dtype": "float32",
    }


def write_tiny(
    folder: Path, words: Sequence[str] | None = None, *, hidden_size: int = 64, num_layers: int = 2, seed: int = 0
) -> None:
    """`words`, between white space, are its vocabulary; None: it has a token for every printable ASCII character."""
    from rlloop.models import new_model, save_model  # imports torch

    vocabulary = _vocabulary(words)
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    if words is None:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    save_model(new_model(tiny_config(words, hidden_size=hidden_size, num_layers=num_layers), seed), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m rlloop.recipes.custom.tiny FOLDER", file=sys.stderr)
        return 2
    write_tiny(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
