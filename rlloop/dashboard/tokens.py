"""A completion's tokens as text, each with both logprobs. Uses the run's own tokenizer, if there is one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from rlloop.dashboard.chat_text import calls_in, messages_of


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
    """A rollout record for display.

    `tokens` are objects with `id`, `text` and, for the policy's own, `engine`, `advantage`, `entropy` where it is
    recorded, and `trainer`, `d` (null if not finite) and `same` (equal bits) where the trainer scored it (`compared`).
    `trace` is the conversation: messages with `role`, `text` and, in the policy's turns, `tokens`, [start, end).
    """
    ids = row["token_ids"]
    texts = pieces(tokenizer, ids) if tokenizer is not None else [None] * len(ids)
    tokens: list[dict[str, Any]] = [{"id": id, "text": text} for id, text in zip(ids, texts, strict=True)]
    spans = [(0, len(ids))] if row.get("turns") is None else row["turns"]
    written = [index for start, end in spans for index in range(start, end)]
    compared = row["outcome"] == "trained"
    engine = row["logprobs"]
    trainer = row.get("trainer_logprobs", engine)
    advantages = row.get("token_advantages") or [row.get("advantage") if compared else None] * len(written)
    entropies = row.get("entropies") or [None] * len(written)
    for index, mu, pi, advantage, entropy in zip(written, engine, trainer, advantages, entropies, strict=True):
        tokens[index] |= {"engine": mu, "advantage": advantage, "entropy": entropy}
        if compared:
            d = math.inf if mu is None or pi is None else float(np.float32(pi)) - float(np.float32(mu))
            same = mu == pi or (mu is not None and pi is not None and np.float32(mu) == np.float32(pi) != 0)
            tokens[index] |= {"trainer": pi, "d": d if math.isfinite(d) else None, "same": bool(same)}
    left_out = (
        "logprobs", "trainer_logprobs", "raw_logprobs", "token_ids", "entropies", "token_advantages", "routed_experts",
        "conversation",
    )  # fmt: skip
    return {
        **{key: value for key, value in row.items() if key not in left_out},
        "sampling": {key: str(value) for key, value in row["sampling"].items()},  # a seed has more bits than a double
        "tokens": tokens,
        "compared": compared,
        "surprise": surprise(engine),
        "has_text": tokenizer is not None,
        "trace": _trace(row, texts, spans, tokenizer),
    }


def surprise(logprobs: Sequence[float | None]) -> float | None:
    """Mean of a completion's negative logprobs, in nats a token."""
    finite = [value for value in logprobs if value is not None]
    return -sum(finite) / len(finite) if finite else None


def _trace(
    row: Mapping[str, Any], texts: Sequence[str | None], spans: Sequence[Sequence[int]], tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    prompt = row["prompt"]
    if tokenizer is not None and not row.get("images"):  # whose placeholders would fill a page
        prompt = tokenizer.decode(row["prompt_ids"], skip_special_tokens=False)
    prompt_messages = messages_of(prompt) or messages_of(row["prompt"])  # a tokenizer may lack the prompt's words
    trace: list[dict[str, Any]] = [{"role": role, "text": text} for role, text in prompt_messages]
    recorded = row.get("conversation") or []
    for number, (start, end) in enumerate(spans):
        turn = recorded[number] if number < len(recorded) else {}
        text = turn.get("text") or "".join(piece or "" for piece in texts[start:end])
        trace.append({
            "role": "assistant", "text": text, "tokens": [start, end], "calls": calls_in(text),
            "reward": turn.get("reward"), "components": turn.get("components"),
        })  # fmt: skip
        until = spans[number + 1][0] if number + 1 < len(spans) else len(texts)
        if messages := turn.get("messages"):
            trace += [
                {
                    "role": each.get("role", "user"),
                    "name": each.get("name"),
                    "text": each.get("content", ""),
                    "images": each.get("images", []),
                    "read": until - end,
                }
                for each in messages
            ]
        elif until > end:
            between = "".join(piece or "" for piece in texts[end:until])
            trace += [
                {"role": role, "text": text, "read": until - end}
                for role, text in messages_of(between, "environment")
                if text and role != "assistant"
            ]
    return trace
