"""Mixed requests for an engine, and the bits of what it answers."""

from __future__ import annotations

import numpy as np

from rlloop.types import Completion, SamplingParams

VOCABULARY = 300
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100)  # around the edges of pages and of attention's tiles


SAMPLINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "stop_token_ids": (7, 8, 9), "min_tokens": 6},
    {"temperature": 0.6, "ignore_eos": True},
)
NEEDLES = (0, 7, 23, 40, 58, 95)  # of the traffic; between them most lengths and samplings


def traffic(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Mixed requests. Some prompts begin alike, and every fifth one repeats another, so that prefixes are shared."""
    rng = np.random.default_rng(11)
    preamble = rng.integers(3, VOCABULARY, 70).tolist()
    prompts, sampling = [], []
    for i in range(count):
        length = LENGTHS[i % len(LENGTHS)]
        own = rng.integers(3, VOCABULARY, length).tolist()
        prompts.append(prompts[i - 5] if i % 5 == 4 and i > 5 else preamble[: length // 2] + own[length // 2 :])
        sampling.append(SamplingParams(max_tokens=8 + 7 * (i % 4), seed=1000 + i, **SAMPLINGS[i % len(SAMPLINGS)]))
    return prompts, sampling


def bits(completion: Completion) -> tuple[list[int], list[int], list[int]]:
    return (
        completion.token_ids,
        completion.logprobs.view(np.int32).tolist(),
        completion.raw_logprobs.view(np.int32).tolist(),
    )
