"""A model folder whose tokens are bytes and pieces of words, so that characters and stop strings lie across tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlloop.recipes.custom.tiny import SPECIAL, UNKNOWN, write_tiny

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def as_units(text: str) -> str:
    """Its bytes as the letters that stand for them in a byte-level vocabulary."""
    [(units, _)] = BYTES.pre_tokenize_str(text)
    return units


LETTERS = [*"abcdefgh .,\n<|>:", *(as_units("é🙂"))]
WORDS = ["cab", "bad", "dé", "a b"]


def write_model(folder: Path) -> Path:
    """A random Qwen3 of some thirty tokens, with a chat template."""
    words = [*(as_units(text) if text.isascii() else text for text in LETTERS), *map(as_units, WORDS)]
    write_tiny(folder, words, hidden_size=32)
    vocabulary = {word: id for id, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer, tokenizer.decoder = BYTES, decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def without_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
