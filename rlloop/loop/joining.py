"""Completions joined from what engines returned: a turn from its pieces, a conversation from its turns.

Each part's prompt begins with all tokens of the part before, so tokens, logprobs and choices are concatenated as
sampled, and one forward of the trainer over the whole gives the bits of every part.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlloop.chat import Message
from rlloop.loop.environments import Reply
from rlloop.types import Completion, FinishReason, SamplingParams


@dataclass
class Turn:
    """One turn of the policy in progress, in one piece or several consecutive ones.

    A token is drawn by the seed and its position, so pieces of one version equal the turn sampled at once.
    """

    ids: list[int]  # everything before its next token
    sampling: SamplingParams  # of the whole turn
    pieces: list[Completion] = field(default_factory=list)

    def next_piece(self, most: int) -> SamplingParams:
        """Sampling parameters of the next request after `ids`: the rest of the turn, or at most `most` tokens of it."""
        params = self.sampling
        count = min(most or params.max_tokens, params.max_tokens - self._made)
        least = min(max(0, params.min_tokens - self._made), count)
        return dataclasses.replace(params, max_tokens=count, min_tokens=least)

    def add(self, piece: Completion) -> bool:
        """Add a piece; True if it ends the turn."""
        self.pieces.append(piece)
        self.ids = [*piece.prompt_ids, *piece.token_ids]
        return piece.finish_reason != "length" or self._made >= self.sampling.max_tokens

    def completion(self) -> Completion:
        """The turn's completion, of at least one piece. Pieces of several versions have no choices of experts."""
        first, last = self.pieces[0], self.pieces[-1]
        if first is last and first.sampling.max_tokens == self.sampling.max_tokens:
            return first
        used = dataclasses.replace(self.sampling, seed=first.sampling.seed)
        return dataclasses.replace(_concatenated(self.pieces), sampling=used, finish_reason=last.finish_reason)

    @property
    def _made(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)


def joined(turns: Sequence[Completion], finish_reason: FinishReason) -> Completion:
    """One completion of a conversation's turns.

    Turns of several versions have no choices of experts: each version read the tokens before its turns again.
    """
    whole, begin = _concatenated(turns), len(turns[0].prompt_ids)
    spans = tuple((len(each.prompt_ids) - begin, len(each.prompt_ids) - begin + len(each.token_ids)) for each in turns)
    by_turn, last = whole.version_spans in (None, spans), turns[-1].model_input
    if last is not None and whole.model_input is not None and len(last.contents) == len(whole.model_input.contents):
        last = whole.model_input  # no reply brought a picture
    return dataclasses.replace(
        whole,
        model_input=last,
        finish_reason=finish_reason,
        turns=spans,
        version_spans=None if by_turn else whole.version_spans,
    )


def recorded(
    completion: Completion, decode: Callable[[list[int]], str], replies: Sequence[Reply] = ()
) -> list[dict[str, Any]]:
    """A conversation by turn, as JSON values; docs/agents.md has the keys.

    `replies`: the environment's, one for each turn that it answered.
    """
    turns, conversation = completion.turns or ((0, len(completion.token_ids)),), list[dict[str, Any]]()
    for index, (start, end) in enumerate(turns):
        entry: dict[str, Any] = {"tokens": [start, end], "text": decode(completion.token_ids[start:end])}
        if completion.versions is not None:
            versions = [version for first, _, version in completion.runs if first == start or start < first < end]
            entry["version"] = versions[0] if len(versions) == 1 else versions
        if index + 1 < len(turns):
            entry["read"] = [end, turns[index + 1][0]]
        if index < len(replies):
            reply = replies[index]
            entry |= {"reward": float(reply.reward), "messages": [_as_recorded(each) for each in reply.messages]}
            if reply.components:
                entry["components"] = {name: float(value) for name, value in reply.components.items()}
        conversation.append(entry)
    return conversation


def _as_recorded(message: Message) -> dict[str, Any]:
    """The message's recorded fields, as text, and the digests of its pictures."""
    kept = {name: message[name] for name in ("role", "name", "arguments", "content") if name in message}
    text = {name: each if isinstance(each, str) else json.dumps(each, default=str) for name, each in kept.items()}
    return {**text, "images": list(message["images"])} if "images" in message else text


def _concatenated(completions: Sequence[Completion]) -> Completion:
    """The completions as one; if versions differ, `version_spans` has each version's tokens."""
    first, begin = completions[0], len(completions[0].prompt_ids)
    runs = list[tuple[int, int, int]]()
    for completion in completions:
        offset = len(completion.prompt_ids) - begin
        for start, end, version in completion.runs:
            if runs and runs[-1][1:] == (offset + start, version):
                runs[-1] = (runs[-1][0], offset + end, version)
            else:
                runs.append((offset + start, offset + end, version))
    versions = tuple(version for _, _, version in runs)
    mixed = len(set(versions)) > 1
    return dataclasses.replace(
        first,
        policy_version=min(versions),
        versions=versions if mixed else None,
        version_spans=tuple((start, end) for start, end, _ in runs) if mixed else None,
        token_ids=[*completions[-1].prompt_ids[begin:], *completions[-1].token_ids],
        logprobs=np.concatenate([completion.logprobs for completion in completions]),
        raw_logprobs=np.concatenate([completion.raw_logprobs for completion in completions]),
        routed_experts=None if mixed else _as_first_read([completion.routed_experts for completion in completions]),
        selected=None if mixed else _as_first_read([completion.selected for completion in completions]),
    )


def _as_first_read(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The arrays [tokens, ...] joined, each without the tokens that earlier ones had read already.

    A token's choice is the one that it was first read with, since what followed was sampled over it; when it reads a
    token again, a stock engine may choose otherwise.
    """
    first_read, known = list[np.ndarray](), 0
    for each in arrays:
        if each is None:
            return None
        first_read.append(each[known:])
        known = len(each)
    return np.concatenate(first_read)
