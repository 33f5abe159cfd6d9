"""One token a number: the recipe's own tokenizer, as the files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SYMBOLS = (PAD, EOS, UNKNOWN, "->", "=", ",", "+", "-", "*", "/")


def make_tokenizer(largest_number: int, largest_target: int) -> Tokenizer:
    """Words between white space: the symbols, and every whole number that a worked trace can need."""
    largest = max(largest_number**2, 2 * largest_number, largest_target)
    words = [*SYMBOLS, *map(str, range(largest + 1))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files from which `transformers.AutoTokenizer` loads the same tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,  # it would glue commas to the word before them
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
