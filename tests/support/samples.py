"""Completions as samples to train on, and how many of their logprobs have other bits."""

from __future__ import annotations

import numpy as np

from rlloop.types import Completion, Example, RewardResult, Sample


def as_sample(index: int, completion: Completion, advantage: float) -> Sample:
    example = Example(id=str(index), prompt_ids=completion.prompt_ids, prompt="", data={})
    return Sample(str(index), example, completion, "", RewardResult(0.0), group=index // 2, advantage=advantage)


def different(samples: list[Sample], logprobs: list[np.ndarray]) -> int:
    """Tokens whose bits differ."""
    pairs = zip(samples, logprobs, strict=True)
    return sum(int((s.completion.logprobs.view(np.int32) != mine.view(np.int32)).sum()) for s, mine in pairs)
