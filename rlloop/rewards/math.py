"""A reward for mathematical answers, compared by math-verify."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from rlloop.errors import ConfigError
from rlloop.rewards.event_loop import OnThisLoop
from rlloop.rewards.examples import field_of
from rlloop.types import Example, RewardResult


def _equivalent(gold: str, answer: str, seconds: int) -> tuple[bool, bool]:
    """(an answer was found, it equals the gold one). Must run in the main thread of a process, where math-verify's
    limits, which use alarms, work."""
    from math_verify import parse, verify

    expected = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=seconds)
    if not expected:
        raise ValueError(f"math-verify cannot read the reference answer {gold!r}")
    parsed = parse(answer, parsing_timeout=seconds)
    return bool(parsed), bool(parsed) and bool(verify(expected, parsed, timeout_seconds=seconds))


def _begin_worker() -> None:
    """Ignore the signals that let a run finish its step, and end with the parent process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


class MathReward:
    """1 if the completion's last mathematical expression equals `example.data[answer_key]`, else 0.

    The comparison runs in a worker process, which is killed and replaced if it takes longer than `seconds` (nothing
    else interrupts a huge power in one integer operation) or dies. Then the sample fails; it does not get a 0.
    Component: `answered`.
    """

    concurrency = 1  # samples at a time

    def __init__(self, *, answer_key: str = "answer", seconds: int = 5) -> None:
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise ConfigError("reward MathReward needs math-verify: pip install 'rlloop[math]'") from None
        self.answer_key, self.seconds = answer_key, seconds
        self._pool: ProcessPoolExecutor | None = None
        self._turn = OnThisLoop(lambda: asyncio.Semaphore(1))

    def check_example(self, example: Example) -> None:
        field_of(example, self.answer_key, "answer_key")

    async def __call__(self, prompt: str, completion: str, example: Example) -> RewardResult:
        gold = str(field_of(example, self.answer_key, "answer_key"))
        limit = 2 * self.seconds + 20  # math-verify's own limit twice (parse, compare), and the first call's imports
        async with self._turn.get():
            work = self._submit(gold, completion)
            try:
                answered, equal = await asyncio.wait_for(asyncio.wrap_future(work), limit)
            except TimeoutError:
                self._drop_pool()
                raise TimeoutError(f"math-verify took longer than {limit} s") from None
            except (asyncio.CancelledError, BrokenProcessPool):
                self._drop_pool()
                raise
        return RewardResult(float(equal), equal, {"answered": float(answered)})

    def _submit(self, gold: str, answer: str) -> Future[tuple[bool, bool]]:
        if self._pool is not None:
            try:
                return self._pool.submit(_equivalent, gold, answer, self.seconds)
            except BrokenProcessPool:  # its worker died while idle
                self._drop_pool()
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin_worker)
        return self._pool.submit(_equivalent, gold, answer, self.seconds)

    def _drop_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        self._drop_pool()
