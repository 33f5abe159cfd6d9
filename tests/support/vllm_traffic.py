"""Mixed requests for vLLM, and everything that its answers hold."""

from __future__ import annotations

import numpy as np

from rlloop import SamplingParams
from rlloop.types import Completion

SAMPLINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "ignore_eos": True},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "stop_token_ids": (7, 8, 9), "min_tokens": 6},
)


def traffic(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Mixed requests: prompts that begin alike and prompts that repeat, every kind of sampling."""
    rng = np.random.default_rng(5)
    preamble = rng.integers(3, 300, 70).tolist()
    prompts, sampling = [], []
    for i in range(count):
        own = rng.integers(3, 300, int(rng.integers(1, 60))).tolist()
        prompts.append(prompts[i - 5] if i % 5 == 4 and i > 5 else preamble[: 17 * (i % 4)] + own)
        sampling.append(SamplingParams(max_tokens=12 + 9 * (i % 4), seed=100 + i, **SAMPLINGS[i % len(SAMPLINGS)]))
    return prompts, sampling


def bits(completions: list[Completion]) -> list[tuple]:
    return [
        (
            each.prompt_ids,
            each.token_ids,
            each.logprobs.tobytes(),
            each.raw_logprobs.tobytes(),
            each.finish_reason,
            each.sampling,
            None if each.routed_experts is None else (each.routed_experts.dtype, each.routed_experts.tobytes()),
            None if each.selected is None else each.selected.tobytes(),
        )
        for each in completions
    ]


def check_same(made: list[Completion], expected: list[Completion]) -> None:
    """Equal tokens and bits, and equal choices; which of a token's experts comes first is left open."""
    assert [c.token_ids for c in made] == [c.token_ids for c in expected]
    for a, b in zip(made, expected, strict=True):
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
        assert a.raw_logprobs.tobytes() == b.raw_logprobs.tobytes()
        assert (a.routed_experts is None) == (b.routed_experts is None)
        if a.routed_experts is not None and b.routed_experts is not None:
            assert a.routed_experts.dtype == b.routed_experts.dtype
            assert np.array_equal(np.sort(a.routed_experts), np.sort(b.routed_experts))
        assert (a.selected is None) == (b.selected is None)
        assert a.selected is None or np.array_equal(a.selected, b.selected)
