"""Checks of an engine's completions against its requests that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlloop.types import Completion, FinishReason, SamplingParams, stop_ids


@dataclass(frozen=True)
class Vocabulary:
    """Size of a model's vocabulary, the ids that end a sequence, and those that stand for images or videos."""

    size: int
    eos_token_ids: tuple[int, ...]
    placeholders: tuple[int, ...] = ()


def fault_of(
    completion: Completion, prompt_ids: Sequence[int], sampling: SamplingParams, vocabulary: Vocabulary
) -> str | None:
    """The difference of a completion of one turn from its request; None if there is none.

    Versions are not compared, nor is the choice of tokens: `rlloop.models.redraw` draws them again, from weights.
    """
    if list(completion.prompt_ids) != list(prompt_ids):
        return f"its prompt is {_ids(completion.prompt_ids)}, and was asked for as {_ids(prompt_ids)}"
    for name, asked in () if completion.sampling is sampling else vars(sampling).items():
        if (used := getattr(completion.sampling, name)) != asked and (name != "seed" or asked is not None):
            return f"it was made with {name}={used!r}, and asked for with {name}={asked!r}"
    ids = completion.token_ids
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary.size):
        wrong = [id for id in ids if not 0 <= id < vocabulary.size]
        return f"token id {wrong[0]} is not in the vocabulary, whose ids are 0 to {vocabulary.size - 1}"
    return ending_fault(completion.token_ids, completion.finish_reason, sampling, vocabulary.eos_token_ids)


def ending_fault(
    token_ids: Sequence[int], finish_reason: FinishReason, sampling: SamplingParams, eos_token_ids: tuple[int, ...]
) -> str | None:
    """A contradiction between the end of one turn and its finish reason or sampling parameters; None if there is none.

    A stop token may also be the last token allowed. Then both finish reasons are true.
    """
    stops, count = stop_ids(sampling, eos_token_ids), len(token_ids)
    at = next((index for index, id in enumerate(token_ids) if id in stops), None)
    if count > sampling.max_tokens:
        return f"it has {count} tokens, and max_tokens is {sampling.max_tokens}"
    if at is not None and at < sampling.min_tokens:
        return f"token {at} (id {token_ids[at]}) ends a completion, and min_tokens is {sampling.min_tokens}"
    if at is not None and at < count - 1:
        return f"token {at} (id {token_ids[at]}) ends a completion, and {count - 1 - at} more follow"
    if finish_reason == "stop" and at is None:
        last = f"its last token is {token_ids[-1]}" if count else "it has no token"
        return f"its finish_reason is stop, and {last}; what ends it is {', '.join(map(str, stops)) or 'nothing'}"
    if finish_reason == "length" and count < sampling.max_tokens:
        return f"its finish_reason is length after {count} tokens, and max_tokens is {sampling.max_tokens}"
    return None


def _ids(ids: Sequence[int]) -> str:
    return f"{list(ids)!r}" if len(ids) <= 8 else f"{list(ids[:4])!r} and {len(ids) - 4} more"
