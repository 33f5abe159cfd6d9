"""A completion's tokens as text, each with both logprobs. Uses the run's own tokenizer, if there is one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer


def find_tokenizer(run: Path, config: Mapping[str, Any]) -> Path | None:
    """`tokenizer.json` of the run's folder, else of its newest checkpoint, else of the model that it began with."""
    checkpoints = sorted((run / "checkpoints").glob("step_*"), key=lambda folder: int(folder.name[5:]), reverse=True)
    model = config.get("model.path")
    folders = [run, *checkpoints, *([Path(model)] if isinstance(model, str) else [])]
    return next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)


@lru_cache(maxsize=4)
def load_tokenizer(file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(file))


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token's text, as what it adds to the token before, since some tokenizers drop a leading space."""
    texts = []
    for index, id in enumerate(ids):
        before = tokenizer.decode([ids[index - 1]], skip_special_tokens=False) if index else ""
        both = tokenizer.decode(list(ids[max(0, index - 1) : index + 1]), skip_special_tokens=False)
        text = both[len(before) :] if both.startswith(before) else ""
        if not text or "\ufffd" in text:  # part of a character, or merged with the token before
            text = tokenizer.id_to_token(id) or ""
        texts.append(text)
    return texts


def explain(row: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A rollout record for display. `tokens` are objects with `id`, `text` and, for the policy's own, `engine`,
    `trainer`, `d` (null if not finite) and `same` (equal bits). `compared`: the trainer scored the completion.
    """
    ids = row["token_ids"]
    texts = pieces(tokenizer, ids) if tokenizer is not None else [None] * len(ids)
    tokens: list[dict[str, Any]] = [{"id": id, "text": text} for id, text in zip(ids, texts, strict=True)]
    written = (
        range(len(ids))
        if row.get("turns") is None
        else [index for start, end in row["turns"] for index in range(start, end)]
    )
    compared = row["outcome"] == "trained"
    engine = row["logprobs"]
    trainer = row.get("trainer_logprobs", engine)
    for index, mu, pi in zip(written, engine, trainer, strict=True):
        tokens[index]["engine"] = mu
        if compared:
            d = math.inf if mu is None or pi is None else float(np.float32(pi)) - float(np.float32(mu))
            same = mu == pi or (mu is not None and pi is not None and np.float32(mu) == np.float32(pi) != 0)
            tokens[index] |= {"trainer": pi, "d": d if math.isfinite(d) else None, "same": bool(same)}
    left_out = ("logprobs", "trainer_logprobs", "raw_logprobs", "token_ids")
    return {
        **{key: value for key, value in row.items() if key not in left_out},
        "sampling": {key: str(value) for key, value in row["sampling"].items()},  # a seed has more bits than a double
        "tokens": tokens,
        "compared": compared,
        "prompt_tokens": None if tokenizer is None else pieces(tokenizer, row["prompt_ids"]),
    }
