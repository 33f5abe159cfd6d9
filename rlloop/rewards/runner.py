"""Runs a reward over a batch of completions: sync, async or batched, with a time limit.

A reward that raises (also SystemExit and KeyboardInterrupt), hangs or returns no number gives that sample a
`RewardFailure`, never a silent 0. The loop rejects the sample with the reason and goes on with the others.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlloop.errors import ConfigError
from rlloop.rewards.event_loop import GRACE, OWNER, EventLoop, LoopBlocked
from rlloop.types import RewardResult

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardFailure:
    """The reason why a sample has no reward."""

    kind: Literal["error", "timeout", "invalid"]
    message: str


Outcome = RewardResult | RewardFailure
TAKEN = "mean", "std", "solved", "groups_without_signal", "kl_ref"  # names of the metrics reward/NAME of every reward
HOPELESS = 8  # if the first so many samples of a batch hang, the others are not tried
# Beginnings of the names of files that are not the user's: of rlloop, Python and installed packages.
INSTALLED = (Path(__file__).parents[1], *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
NOT_THE_USERS = ("<", *(f"{folder}{os.sep}" for folder in INSTALLED))
Request = tuple[Any, ...]  # arguments of the reward: prompt, completion, example


def as_result(value: Any) -> Outcome:
    """A reward's return value as a result. A plain number of 1 or more counts as solved."""
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
    return RewardResult(float(result.reward), bool(result.solved), components)  # records take no numpy or torch numbers


def is_timeout(outcome: Any) -> bool:
    return isinstance(outcome, RewardFailure) and outcome.kind == "timeout"


def failure(error: BaseException) -> RewardFailure:
    """An exception of the user's code, with the last place in that code, if it came that far."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f" ({Path(file).name}, line {line})" for file, line in places if not file.startswith(NOT_THE_USERS)]
    return RewardFailure("error", f"{type(error).__name__}: {error}{own[-1] if own else ''}")


def not_tried(tried: int, timeout: float) -> RewardFailure:
    return RewardFailure("timeout", f"not tried: the first {tried} took longer than {timeout:g} s")


class RewardRunner:
    """Scores batches with one reward.

    A reward with the attribute `batched = True` is called once with three lists and returns a list. Of an async reward,
    at most `concurrency` calls run at a time, or fewer if it has an attribute `concurrency`; waiting for a turn does
    not count towards `timeout`. Python can stop neither a thread nor an uncooperative coroutine: a sync reward that
    takes longer than `timeout` seconds, or an async one that blocks its event loop or ignores cancellation, is left
    behind in a daemon thread, and the other samples go on in a new one. A reward that may hang should therefore await,
    or use a process of its own, as the shipped code and math rewards do.
    """

    def __init__(
        self,
        reward: Callable[..., Any],
        *,
        timeout: float = 60.0,
        concurrency: int = 64,
        accept: Callable[[Any], Any] = as_result,
    ) -> None:
        """`accept` converts a return value to an outcome; environments' steps use another one than rewards."""
        if timeout <= 0:
            raise ConfigError(f"the reward's timeout is {timeout}; it must be a positive number of seconds")
        if concurrency < 1:
            raise ConfigError(f"the reward's concurrency is {concurrency}; it must be at least 1")
        self.reward, self.timeout, self.accept = reward, timeout, accept
        self.concurrency = min(concurrency, getattr(reward, "concurrency", None) or concurrency)
        self.batched = bool(getattr(reward, "batched", False))
        target = getattr(reward, "func", reward)  # through functools.partial
        self.is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)
        self._loop: EventLoop | None = None

    def score(self, requests: Sequence[Request]) -> list[Any]:
        """One outcome for each request, in order."""
        if not requests:
            return []
        if self.batched:
            return self._score_batch(requests)
        return (self._score_async if self.is_async else self._score_sync)(requests, self.accept)

    def close(self) -> None:
        """Call the reward's async `close`, if it has one, and stop the event loop."""
        if self._loop is None:
            return
        closer = getattr(self.reward, "close", None)
        if inspect.iscoroutinefunction(closer):
            [outcome] = self._score_async([()], lambda value: value, closer)
            if isinstance(outcome, RewardFailure):
                log.warning("the reward's close: %s", outcome.message)
        self._drop_loop()

    def _drop_loop(self) -> None:
        if self._loop is not None:
            self._loop.stop()
            self._loop = None

    def _score_batch(self, requests: Sequence[Request]) -> list[Outcome]:
        columns = tuple(list(column) for column in zip(*requests, strict=True))
        score = self._score_async if self.is_async else self._score_sync
        [values] = score([columns], list)
        if isinstance(values, RewardFailure):
            return [values] * len(requests)
        if len(values) != len(requests):
            wrong = f"the batch has {len(requests)} samples and the reward returned {len(values)}"
            return [RewardFailure("invalid", wrong)] * len(requests)
        return [value if isinstance(value, RewardFailure) else self._accepted(value) for value in values]

    def _accepted(self, value: Any) -> Outcome:
        try:
            return self.accept(value)
        except Exception as error:  # any error in the user's code is this sample's outcome
            return failure(error)

    def _score_async(
        self, requests: Sequence[Request], accept: Callable[[Any], Any], function: Callable[..., Any] | None = None
    ) -> list[Any]:
        """All on one event loop. A loop that is blocked is abandoned, and a new one takes the rest."""
        outcomes: dict[int, Any] = {}
        while len(outcomes) < len(requests):
            if len(outcomes) >= HOPELESS and all(map(is_timeout, outcomes.values())):
                rest = not_tried(len(outcomes), self.timeout)
                return [outcomes.get(index, rest) for index in range(len(requests))]
            if self._loop is None:
                self._loop = EventLoop()
            calls = Calls(function or self.reward, accept, self.timeout, self.concurrency)
            pending = {index: each for index, each in enumerate(requests) if index not in outcomes}
            try:
                self._loop.run(calls.score(pending), self.timeout)
                outcomes |= calls.outcomes
            except LoopBlocked as error:
                late = RewardFailure("timeout", f"blocked its event loop for longer than {self.timeout:g} s")
                # Samples in neither start again on the new loop.
                outcomes |= calls.outcomes.copy() | dict.fromkeys(calls.at_fault(error.owner), late)
                self._drop_loop()
            if calls.unfinished():  # tasks that ignore cancellation could block later rounds
                self._drop_loop()
        return [outcomes[index] for index in range(len(requests))]

    def _score_sync(self, requests: Sequence[Request], accept: Callable[[Any], Any]) -> list[Any]:
        """All in one worker thread. One that hangs is abandoned, and a new one takes the rest.

        If the first `HOPELESS` all hang, the others are not tried: at a minute each, a batch would take hours to fail.
        """
        outcomes: list[Any] = []
        while len(outcomes) < len(requests):
            if len(outcomes) >= HOPELESS and all(map(is_timeout, outcomes)):
                return outcomes + [not_tried(len(outcomes), self.timeout)] * (len(requests) - len(outcomes))
            worker = _Worker(self.reward, accept, requests[len(outcomes) :])
            threading.Thread(target=worker.run, daemon=True, name="rlloop-reward").start()
            outcomes += worker.wait(self.timeout)
        return outcomes


class Calls:
    """Calls of an async function on an event loop: each has an outcome in the end, unless the loop is abandoned."""

    def __init__(
        self, reward: Callable[..., Any], accept: Callable[[Any], Any], timeout: float, concurrency: int
    ) -> None:
        self.reward, self.accept, self.timeout = reward, accept, timeout
        self.outcomes: dict[int, Any] = {}
        self._slots, self._tasks = asyncio.Semaphore(concurrency), dict[int, asyncio.Task[Any]]()

    async def score(self, requests: Mapping[int, Request]) -> None:
        await asyncio.gather(*(self.one(index, request) for index, request in requests.items()))

    async def one(self, index: int, request: Request) -> None:
        async with self._slots:
            OWNER.set((self, index))
            task = self._tasks[index] = asyncio.ensure_future(self._call(request))
            try:
                await asyncio.wait([task], timeout=self.timeout)
                if task.done():
                    self.outcomes[index] = task.result()
                    return
            finally:
                task.cancel()  # also if an interrupt ended the wait
            await asyncio.wait([task], timeout=GRACE)
            self.outcomes[index] = RewardFailure("timeout", f"took longer than {self.timeout:g} s")

    async def _call(self, request: Request) -> Any:
        try:
            return self.accept(await self.reward(*request))
        except TimeoutError as error:  # raised by the reward itself
            return RewardFailure("timeout", str(error) or "raised TimeoutError")
        except BaseException as error:  # any error in the user's code is this sample's outcome, also SystemExit
            return failure(error)

    def unfinished(self) -> list[int]:
        """Indices of samples whose coroutine still runs."""
        return [index for index, task in self._tasks.copy().items() if not task.done()]  # the loop's thread adds to it

    def forget(self, index: int) -> None:
        """Drop the outcome of a request, which its caller has taken."""
        self.outcomes.pop(index, None)
        if index in self._tasks and self._tasks[index].done():
            del self._tasks[index]

    def at_fault(self, owner: tuple[Calls, int] | None) -> list[int]:
        """Indices of samples that block the loop: the owner's, if it is of this round; all that run, if not known."""
        if owner is None:
            return self.unfinished()
        return [owner[1]] if owner[0] is self else []


class _Worker:
    """Calls a sync reward, request after request, in a thread that can be abandoned."""

    def __init__(self, reward: Callable[..., Any], accept: Callable[[Any], Any], requests: Sequence[Request]) -> None:
        self.reward, self.accept, self.requests = reward, accept, requests
        self.outcomes: list[Outcome] = []
        self.began = time.monotonic()  # start of the request that is running
        self.finished, self.abandoned = threading.Event(), False

    def run(self) -> None:
        for request in self.requests:
            try:
                outcome = self.accept(self.reward(*request))
            except BaseException as error:  # SystemExit would end this thread silently
                outcome = failure(error)
            if self.abandoned:
                return
            self.began = time.monotonic()  # before the outcome counts, or the next request would seem late
            self.outcomes.append(outcome)
        self.finished.set()

    def wait(self, timeout: float) -> list[Outcome]:
        """All outcomes; or those up to and with the first request that takes longer than `timeout` seconds."""
        while not self.finished.wait(max(0.0, self.began + timeout - time.monotonic())):
            done = len(self.outcomes)  # read before the time: if a request ends in between, `began` is later
            if time.monotonic() - self.began >= timeout:
                self.abandoned = True
                return [*self.outcomes[:done], RewardFailure("timeout", f"took longer than {timeout:g} s")]
        return self.outcomes
