"""A pool of engines with the interface of one engine, for the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rlloop.rollout.engine.validation import one_for_each
from rlloop.rollout.fleet.membership import Canary
from rlloop.rollout.fleet.pool import EnginePool
from rlloop.types import Completion, ModelInput, SamplingParams


class PoolEngine:
    """A pool as the loop's engine: every request is computed with exactly the version published last."""

    # `rlloop.Engine.prefill_logprobs` of an engine on the trainer's weights, where there is one.
    prefill_logprobs: Callable[[Sequence[ModelInput | list[int]]], list[np.ndarray] | None] | None = None

    def __init__(self, pool: EnginePool, fingerprint: dict[str, Any]) -> None:
        self.pool, self._fingerprint = pool, fingerprint
        self.policy_version = -1

    def generate(
        self, prompts: Sequence[ModelInput | list[int]], sampling: SamplingParams | list[SamplingParams]
    ) -> list[Completion]:
        return self.pool.generate(prompts, one_for_each(prompts, sampling), self.policy_version)

    def begin(
        self, prompts: Sequence[ModelInput | list[int]], sampling: list[SamplingParams]
    ) -> Future[list[Completion]]:
        """Like `generate`, without blocking the caller's thread."""
        return self.pool.begin(prompts, sampling, self.policy_version)

    def serve_version(self, version: int, canary: Canary | None) -> dict[str, float]:
        """As `EnginePool.serve_version`; later requests ask for `version`."""
        metrics = self.pool.serve_version(version, canary)
        self.policy_version = version
        return metrics

    def fingerprint(self) -> dict[str, Any]:
        """The trainer's fingerprint: under `parity.mode=require` engines with another one are refused; otherwise each
        reports its own."""
        return self._fingerprint
