"""Runs a reward over a batch of completions: sync, async or batched, with a time limit, and never a silent 0.

A reward that raises, hangs or returns something else than a number is a `RewardFailure` on that sample alone; the loop
then rejects the sample with the reason and goes on with the rest.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlloop.errors import ConfigError
from rlloop.types import RewardResult


@dataclass(frozen=True)
class RewardFailure:
    """Why a sample has no reward."""

    kind: Literal["error", "timeout", "invalid"]
    message: str


Outcome = RewardResult | RewardFailure
TAKEN = "mean", "std", "solved", "groups_without_signal", "kl_ref"  # as reward/NAME, by metrics of every reward
HOPELESS = 8  # samples of a batch that hang one after the other, and none before them ended
Request = tuple[Any, ...]  # what the reward is called with: prompt, completion, example


def as_result(value: Any) -> Outcome:
    """A reward's return value as a result. A plain number counts as solved from 1 upwards."""
    if isinstance(value, RewardResult):
        result = value
    elif isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        result = RewardResult(float(value), solved=float(value) >= 1.0)
    else:
        return RewardFailure("invalid", f"returned {value!r}; it must return a number or a RewardResult")
    if taken := [name for name in result.components if name in TAKEN]:
        return RewardFailure("invalid", f"has a component {taken[0]!r}, which is a metric's name; call it another")
    numbers = [result.reward, *result.components.values()]
    if not all(math.isfinite(number) for number in numbers):
        return RewardFailure("invalid", f"returned a number that is not finite: {result}")
    components = {name: float(number) for name, number in result.components.items()}
    return RewardResult(float(result.reward), bool(result.solved), components)  # numpy's and torch's are in no record


def _is_timeout(outcome: Any) -> bool:
    return isinstance(outcome, RewardFailure) and outcome.kind == "timeout"


def _failure(error: Exception) -> RewardFailure:
    return RewardFailure("error", f"{type(error).__name__}: {error}")


def _late(error: TimeoutError, what: str) -> RewardFailure:
    return RewardFailure("timeout", str(error) or what)


class RewardRunner:
    """Scores batches with one reward.

    A reward with the attribute `batched = True` is called once with three lists and returns a list. An async one runs
    at most `concurrency` at a time, or as its own attribute `concurrency` says where that is less; waiting for a turn
    here is no part of a sample's time. A sync one runs in a worker thread; one that outlasts `timeout` seconds is left
    behind there (Python cannot kill a thread), so a reward that may hang should be async or run its own process, as
    the shipped code and math rewards do.
    """

    def __init__(
        self,
        reward: Callable[..., Any],
        *,
        timeout: float = 60.0,
        concurrency: int = 64,
        accept: Callable[[Any], Any] = as_result,
    ) -> None:
        """`accept` makes an outcome of what a call returned; an environment's steps have another than rewards."""
        if timeout <= 0:
            raise ConfigError(f"the reward's timeout is {timeout}; it must be a positive number of seconds")
        if concurrency < 1:
            raise ConfigError(f"the reward's concurrency is {concurrency}; it must be at least 1")
        self.reward, self.timeout, self.accept = reward, timeout, accept
        self.concurrency = min(concurrency, getattr(reward, "concurrency", None) or concurrency)
        self.batched = bool(getattr(reward, "batched", False))
        target = getattr(reward, "func", reward)  # through functools.partial
        self.is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(self, requests: Sequence[Request]) -> list[Any]:
        """One outcome a request, in order."""
        if not requests:
            return []
        if self.batched:
            return self._score_batch(requests)
        if self.is_async:
            return self._run_async(self._score_async(requests))
        return self._score_sync(requests)

    def close(self) -> None:
        """Stops the event loop, after the reward's own async `close`, where it has one."""
        if self._loop is None:
            return
        closer = getattr(self.reward, "close", None)
        if inspect.iscoroutinefunction(closer):
            self._run_async(closer())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None

    def _run_async(self, work: Coroutine[Any, Any, Any]) -> Any:
        # One loop for the runner's life, so that connection pools and process pools outlive a step.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run_loop, args=(self._loop,), daemon=True, name="rlloop-reward").start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # what an interrupt leaves behind

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.close()

    async def _score_async(self, requests: Sequence[Request]) -> list[Outcome]:
        places = asyncio.Semaphore(self.concurrency)

        async def one(request: Request) -> Outcome:
            async with places:
                try:
                    return self.accept(await asyncio.wait_for(self.reward(*request), self.timeout))
                except TimeoutError as error:
                    return _late(error, f"took longer than {self.timeout:g} s")
                except Exception as error:  # whatever the user's code raises is that sample's outcome
                    return _failure(error)

        return list(await asyncio.gather(*(one(request) for request in requests)))

    def _score_batch(self, requests: Sequence[Request]) -> list[Outcome]:
        prompts, completions, examples = (list(column) for column in zip(*requests, strict=True))
        if self.is_async:

            async def call() -> Any:
                return await asyncio.wait_for(self.reward(prompts, completions, examples), self.timeout)

            def work() -> Any:
                return self._run_async(call())
        else:

            def work() -> Any:
                return self._in_thread(lambda: self.reward(prompts, completions, examples))

        try:
            values = list(work())
        except TimeoutError as error:
            return [_late(error, f"the batch took longer than {self.timeout:g} s")] * len(requests)
        except Exception as error:  # as above
            return [_failure(error)] * len(requests)
        if len(values) != len(requests):
            wrong = f"the batch has {len(requests)} samples and the reward returned {len(values)}"
            return [RewardFailure("invalid", wrong)] * len(requests)
        return [value if isinstance(value, RewardFailure) else self._accepted(value) for value in values]

    def _accepted(self, value: Any) -> Outcome:
        try:
            return self.accept(value)
        except Exception as error:  # as above
            return _failure(error)

    def _in_thread(self, work: Callable[[], Any]) -> Any:
        box: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                box.put((True, work()))
            except Exception as error:  # carried to the caller
                box.put((False, error))

        threading.Thread(target=run, daemon=True, name="rlloop-reward").start()
        try:
            good, value = box.get(timeout=self.timeout)
        except queue.Empty:
            raise TimeoutError from None
        if not good:
            raise value
        return value

    def _score_sync(self, requests: Sequence[Request]) -> list[Outcome]:
        """One worker goes through the list; where it hangs, it is abandoned and another takes the rest.

        Where the first `HOPELESS` all hang, the others are not tried: at a minute each, a batch would fail after hours.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(requests):
            if len(outcomes) >= HOPELESS and all(map(_is_timeout, outcomes)):
                rest = RewardFailure(
                    "timeout", f"not tried: the first {len(outcomes)} took longer than {self.timeout:g} s"
                )
                return outcomes + [rest] * (len(requests) - len(outcomes))
            worker = _Worker(self.reward, self.accept, requests[len(outcomes) :])
            threading.Thread(target=worker.run, daemon=True, name="rlloop-reward").start()
            outcomes += worker.wait(self.timeout)
        return outcomes


class _Worker:
    """Calls a sync reward, request after request, in a thread that can be left behind."""

    def __init__(self, reward: Callable[..., Any], accept: Callable[[Any], Any], requests: Sequence[Request]) -> None:
        self.reward, self.accept, self.requests = reward, accept, requests
        self.outcomes: list[Outcome] = []
        self.began = time.monotonic()  # with the request after those that have an outcome
        self.finished, self.abandoned = threading.Event(), False

    def run(self) -> None:
        for request in self.requests:
            try:
                outcome = self.accept(self.reward(*request))
            except Exception as error:  # as above
                outcome = _failure(error)
            if self.abandoned:
                return
            self.outcomes.append(outcome)
            self.began = time.monotonic()
        self.finished.set()

    def wait(self, timeout: float) -> list[Outcome]:
        """All outcomes, or those before a request that takes longer than `timeout` seconds, and that it did."""
        while not self.finished.wait(max(0.0, self.began + timeout - time.monotonic())):
            made = len(self.outcomes)  # before the time is read: a request that ends in between has begun later
            if time.monotonic() - self.began >= timeout:
                self.abandoned = True
                return [*self.outcomes[:made], RewardFailure("timeout", f"took longer than {timeout:g} s")]
        return self.outcomes
