"""Prompts that several rows of a forward begin with, computed once.

The completions of a group read the same prompt. Its tokens are one sequence of the forward, and each completion is a
sequence that goes on from there (`AttentionLayout.of_families`): attention reads the prompt's keys, and a recurrence
begins with the state that the prompt left. What is shared ends at a tile of attention's keys and before the last
prompt token: each row computes that one, from which its first new token is predicted, itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlloop.models.transformer import Model
from rlloop.numerics.layout import SHARED_TILE
from rlloop.types import ModelInput


class Row(Protocol):
    """A `ScoreRow` or `TrainSequence`."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def predict(self) -> Sequence[int]: ...
    @property
    def model_input(self) -> ModelInput | None: ...


def why_not_shared(model: Model, *, trains: bool) -> str | None:
    """The reason why forwards of this model cannot share prompts, as a clause for messages; None: they can.

    `trains`: forwards to be differentiated, which take more.
    """
    if model.context.ranks("cp").size > 1:
        return "layout.cp divides whole sequences over ranks"
    ours = model.profile.attention == "rlloop" and (model.profile.recurrent == "rlloop" or not model.recurrent)
    if not (ours and model.profile.holds_contract):
        return "the profile's operations do not promise the same bits for shared and whole prompts"
    if trains and model.indexed_layers():
        return "sparse attention has gradients of whole sequences only"
    return None


def shared_tokens(rows: Sequence[Row]) -> list[int]:
    """[rows]: how many tokens each row can take from the row before it, its first ones; a multiple of `SHARED_TILE`.

    Rows share a prompt (the tokens before the first predicted one) that is the same as a whole, with its images and
    positions.
    """
    counts, before = [], None
    for row in rows:
        length = row.predict[0] if len(row.predict) else 0
        prompt = row.token_ids[:length], b"" if row.model_input is None else row.model_input.content_key(0, length)
        counts.append((length - 1) // SHARED_TILE * SHARED_TILE if length and prompt == before else 0)
        before = prompt
    return counts


@dataclass(frozen=True)
class Pieces:
    """The sequences of one forward over rows of tokens."""

    spans: list[tuple[int, int, int]]  # each sequence's row, and its tokens there: from, up to
    families: list[list[int]]  # their lengths, as `AttentionLayout.of_families` takes them
    starts: np.ndarray  # [rows] int64: a row's token i, where it is no shared one, is the forward's token starts + i
    places: list[np.ndarray]  # of each row's tokens in the forward

    @classmethod
    def of(cls, lengths: Sequence[int], shared: Sequence[int]) -> Pieces:
        """The pieces of rows of these lengths, `shared` as `shared_tokens` counts them.

        Example: lengths [130, 133], shared [0, 128]: spans [(0, 0, 128), (0, 128, 130), (1, 128, 133)].
        """
        spans, families, starts, indices, total = [], [], [], [], 0
        prefix = np.zeros(0, np.int64)
        for row, (length, known, ahead) in enumerate(zip(lengths, shared, [*shared[1:], 0], strict=True)):
            begin = max(known, ahead)
            if not known:
                families.append([begin] if begin else [])
                spans += [(row, 0, begin)] if begin else []
                prefix = np.arange(total, total + begin)
                total += begin
            families[-1].append(length - begin)
            spans.append((row, begin, length))
            starts.append(total - begin)
            indices.append(np.concatenate([prefix, np.arange(total, total + length - begin)]))
            total += length - begin
        return cls(spans, families, np.array(starts), indices)

    @property
    def shares(self) -> bool:
        return len(self.spans) > len(self.families)
