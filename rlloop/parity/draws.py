"""Comparison of sampled tokens with those that the same seeds draw from the trainer's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlloop.types import Sample


@dataclass(frozen=True)
class WrongDraw:
    """A sampled token that its seed does not draw."""

    uid: str  # of the sequence
    index: int  # of the token among the policy's own
    token_id: int
    expected: int
    seed: int | None

    def __str__(self) -> str:
        return (
            f"sequence {self.uid}, token {self.index} of the completion: its id is {self.token_id}, and seed "
            f"{self.seed} draws {self.expected}"
        )


@dataclass(frozen=True)
class Draws:
    """The result of drawing one step's tokens again."""

    tokens: int = 0  # drawn again
    different: int = 0
    first: WrongDraw | None = None

    @property
    def metrics(self) -> dict[str, float]:
        if not self.tokens:
            return {}
        return {"parity/redrawn": self.tokens, "parity/redrawn_different": self.different / self.tokens}

    def describe(self) -> str:
        return (
            f"{self.different} of {self.tokens} tokens are not those that their seeds draw from the trainer's "
            f"distribution, though the logprobs are equal: the engine chose them in another way. First: {self.first}"
        )


def check_draws(samples: Sequence[Sample], redrawn: Sequence[np.ndarray] | None) -> Draws:
    """Compare the policy's own tokens with those drawn again: [T] for each sample, −1 where none was drawn."""
    tokens = different = 0
    first = None
    for sample, expected in zip(samples, redrawn or (), strict=redrawn is not None):
        completion = sample.completion
        own = np.asarray(completion.token_ids, np.int64)[list(completion.written)]
        if np.array_equal(own, expected):  # ids are not negative, so all were drawn again
            tokens += len(own)
            continue
        wrong = (own != expected) & (expected >= 0)
        tokens, different = tokens + int((expected >= 0).sum()), different + int(wrong.sum())
        if first is None and wrong.any():
            at = int(wrong.argmax())
            first = WrongDraw(sample.uid, at, int(own[at]), int(expected[at]), completion.sampling.seed)
    return Draws(tokens, different, first)
