"""Mathematical answers, judged by math-verify."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from rlloop.errors import ConfigError
from rlloop.types import Example, RewardResult


def _equivalent(gold: str, answer: str, seconds: int) -> tuple[bool, bool]:
    """(whether an answer was found, whether it equals the gold one). Runs in the main thread of its own process, where
    math-verify's alarm-based limits work."""
    from math_verify import parse, verify

    expected = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=seconds)
    if not expected:
        raise ValueError(f"math-verify cannot read the reference answer {gold!r}")
    found = parse(answer, parsing_timeout=seconds)
    return bool(found), bool(found) and bool(verify(expected, found, timeout_seconds=seconds))


class MathReward:
    """1 where the completion's last mathematical expression equals `example.data[answer_key]`, else 0.

    The comparison runs in a worker process, which is replaced when it outlasts `seconds` (a huge power in one integer
    operation cannot be interrupted in any other way); that is the sample's `timeout`, not a 0. Component: `answered`.
    """

    def __init__(self, *, answer_key: str = "answer", seconds: int = 5) -> None:
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise ConfigError("reward MathReward needs math-verify: pip install 'rlloop[math]'") from None
        self.answer_key, self.seconds = answer_key, seconds
        self._pool: ProcessPoolExecutor | None = None
        self._turn = asyncio.Semaphore(1)

    async def __call__(self, prompt: str, completion: str, example: Example) -> RewardResult:
        if self.answer_key not in example.data:
            raise ValueError(f"example {example.id!r} has no {self.answer_key!r} in its data")
        async with self._turn:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            work = self._pool.submit(_equivalent, str(example.data[self.answer_key]), completion, self.seconds)
            try:
                # Twice math-verify's own limits (reading and comparing), and the first call's imports.
                answered, equal = await asyncio.wait_for(asyncio.wrap_future(work), 2 * self.seconds + 20)
            except TimeoutError:
                self._replace_pool()
                raise
        return RewardResult(float(equal), equal, {"answered": float(answered)})

    def _replace_pool(self) -> None:
        assert self._pool is not None
        for process in list(self._pool._processes.values()):
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
