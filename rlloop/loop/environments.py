"""Environments, which reply to the policy's turns of a conversation until they are done.

An environment's step may call tools, wait and fail. Each step runs independently, under a time limit: a slow one delays
no other conversation, and a failing one breaks only its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from rlloop.chat import Message
from rlloop.protocols import Task
from rlloop.rewards.event_loop import EventLoop, LoopBlocked
from rlloop.rewards.runner import HOPELESS, Calls, RewardFailure, failure, is_timeout, not_tried
from rlloop.types import Example

__all__ = [
    "ConversationTask", "Environment", "EnvironmentSteps", "Message", "Opening", "Reply", "as_reply", "opening_of",
    "opens",
]  # fmt: skip

log = logging.getLogger(__name__)
CLOSED = RewardFailure("error", "the run has ended")


@dataclass(frozen=True)
class Reply:
    """An environment's answer to one turn of the policy."""

    messages: Sequence[Message] = ()  # at least one, unless done
    reward: float = 0.0  # of this turn; a conversation's reward is their sum
    done: bool = False
    solved: bool = False  # counts where any turn says so
    components: Mapping[str, float] = field(default_factory=dict)  # logged as reward/<name>; added over the turns


class Environment(Protocol):
    """The other side of one conversation. `ConversationTask.environment` creates a new one for each.

    Its replies must be a function of the example and the policy's messages, randomness included, so that a resumed run
    repeats them. A step that raises or outlasts `scoring.timeout` breaks the conversation: its sample is rejected with
    the reason.
    """

    def step(self, message: str) -> Reply | Awaitable[Reply]:
        """Reply to `message`, the text of the policy's turn.

        A coroutine function shares an event loop with other conversations' steps. A plain function is called in a
        thread of its own, while other conversations' steps run in others.

        An environment with the attribute `idempotent = True` is called as `step(message, key)`, and retried with the
        same key, up to `scoring.retries` times, if that raises or exceeds its time: a step of a known key must be
        answered, not executed twice. Other environments are not retried.

        An optional method `close` is always called at the end of the conversation.
        """
        ...


@dataclass(frozen=True)
class Opening:
    """An environment's additions to the prompt before the policy's first turn; a function of the example."""

    observation: str | None = None  # appended to the last message
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas of functions, for the chat template


Factory = TypeVar("Factory", bound=Callable[..., Any])


def opens(opening: Callable[..., Opening]) -> Callable[[Factory], Factory]:
    """Decorator for factories of environments: `opening`, called with the same arguments, gives their `Opening`
    (`opening_of`)."""

    def marked(factory: Factory) -> Factory:
        vars(factory)["opening"] = opening
        return factory

    return marked


def opening_of(factory: Any) -> Callable[[Example], Opening] | None:
    """The factory's `opening`, bound to its arguments; None if its environments add nothing to the prompt."""
    opening = getattr(getattr(factory, "func", factory), "opening", None)
    return None if opening is None else partial(opening, **getattr(factory, "keywords", {}))


def seed_of(example: Example) -> int:
    """Of an environment's episode: 31 bits of the example's whole id."""
    return int.from_bytes(hashlib.blake2b(example.id.encode(), digest_size=4).digest(), "little") >> 1


class ConversationTask(Task, Protocol):
    """A task whose examples start conversations."""

    @property
    def max_turns(self) -> int:
        """Limit of the policy's turns, each of up to `rollout.max_tokens` tokens."""
        ...

    @property
    def max_conversation_tokens(self) -> int:
        """Limit of a conversation's tokens; it ends when another whole turn would not fit."""
        ...

    def environment(self, example: Example) -> Environment:
        """A new environment, for one conversation that begins with `example`."""
        ...

    def between(self, messages: Sequence[Message], stop: int | None) -> list[int]:
        """The ids of everything between two turns of the policy: `messages` as the chat template renders them.

        `stop` is the id that ended the first turn, None if that was cut off (`rlloop.chat.ChatTokenizer.between`).
        """
        ...


class EnvironmentSteps:
    """Runs environments' steps; each has its outcome as soon as it ends.

    All async steps share an event loop until `close`, so that connection pools outlive a batch. A loop that a step
    blocks is abandoned after `timeout` seconds: that step has timed out, and the others begin again in a new one.
    Environments that were being closed on it are left behind.

    The lock keeps a step from starting on a loop that `close` is stopping in another thread.
    """

    def __init__(self, *, timeout: float = 60.0, concurrency: int = 64, retries: int = 0) -> None:
        """`timeout` in seconds, of one step; `concurrency`: steps at a time; `retries`: of idempotent ones."""
        self.timeout, self.concurrency, self.retries = timeout, concurrency, retries
        self._loop: EventLoop | None = None
        self._calls = self._new_calls()
        self._waiting: dict[int, _Step] = {}
        self._ending = set[Future[None]]()  # environments that are being closed
        self._keys = itertools.count()
        self._timeouts = self._others = 0  # outcomes of this batch
        self._closed, self._lock = False, threading.RLock()

    @property
    def busy(self) -> bool:
        """True while some step has no outcome yet."""
        return bool(self._waiting)

    def submit(self, environment: Environment, message: str, name: str = "") -> Future[Reply | RewardFailure]:
        """A future of the reply or the failure; it never raises. `name`: the idempotency key."""
        idempotent = getattr(environment, "idempotent", False)
        arguments = (environment, message, name) if idempotent else (environment, message)
        key, step = next(self._keys), _Step(arguments, self.retries if idempotent else 0)
        with self._lock:
            self._waiting[key] = step
            if self._closed:
                self._finish(key, CLOSED)
            else:
                self._start(key, step)
        return step.outcome

    def end(self, environment: Any) -> Future[None]:
        """Close an environment, within `timeout`, whatever comes of it."""
        ended: Future[None] = Future()

        async def close() -> None:
            async with asyncio.timeout(self.timeout):
                if inspect.iscoroutinefunction(environment.close):
                    await environment.close()
                else:
                    await asyncio.to_thread(environment.close)

        with self._lock:
            self._ending.add(ended)
            if self._closed:
                self._leave(ended)
            else:
                self._on_loop().start(close()).add_done_callback(lambda _: self._leave(ended))
        return ended

    def check(self) -> None:
        """Replace the event loop if a step, or an environment's `close`, blocks it. To be called about every `POLL`
        seconds while one of them runs."""
        with self._lock:
            if self._loop is None or not (self._waiting or self._ending):
                return
            try:
                self._loop.check(self.timeout)
            except LoopBlocked as error:
                self._replace_loop(error.owner)

    def settle(self) -> None:
        """End a batch: cancel running steps, so that they never overlap with the next batch."""
        with self._lock:
            for step in list(self._waiting.values()):
                step.call.cancel()
            self._waiting = {}
            if self._calls.unfinished():
                self._drop_loop()
            self._calls, self._timeouts, self._others = self._new_calls(), 0, 0

    def close(self) -> None:
        """End the run, from any thread: pending steps fail, so that a batch ahead ends."""
        with self._lock:
            self._closed = True
            self._drop_loop()
            for key in list(self._waiting):
                self._finish(key, CLOSED)

    def _new_calls(self) -> Calls:
        return Calls(_step, as_reply, self.timeout, self.concurrency)

    def _on_loop(self) -> EventLoop:
        if self._loop is None:
            self._loop = EventLoop()
        return self._loop

    def _drop_loop(self) -> None:
        if self._loop is not None:
            self._loop.stop()
        for each in list(self._ending):
            self._leave(each)
        self._loop, self._calls = None, self._new_calls()

    def _replace_loop(self, owner: Any) -> None:
        """Leave a blocked loop behind: the step that blocks it has timed out, and the others begin again. Where an
        environment's `close` blocks it, all steps that have begun have timed out."""
        calls, late = self._calls, f"blocked its event loop for longer than {self.timeout:g} s"
        if self._ending:
            log.warning("environments whose end was not awaited, on a blocked event loop: %d", len(self._ending))
        self._drop_loop()
        for key, outcome in calls.outcomes.copy().items():
            self._finish(key, outcome)
        for key in calls.at_fault(owner):
            self._finish(key, RewardFailure("timeout", late))
        hopeless = self._timeouts >= HOPELESS and not self._others
        rest = not_tried(self._timeouts, self.timeout)
        for key, step in list(self._waiting.items()):
            if hopeless:
                self._finish(key, rest)
            else:
                self._start(key, step)

    def _start(self, key: int, step: _Step) -> None:
        calls = self._calls
        step.call = self._on_loop().start(calls.one(key, step.arguments))

        def ended(_: Future[None]) -> None:  # in the loop's thread
            with self._lock:
                if calls is not self._calls or key not in calls.outcomes:
                    return
                outcome = calls.outcomes.pop(key) if step.retries else calls.outcomes[key]
                if step.retries and isinstance(outcome, RewardFailure) and key in self._waiting:
                    step.retries -= 1
                    self._start(key, step)
                else:
                    self._finish(key, outcome)
                    calls.forget(key)

        step.call.add_done_callback(ended)

    def _leave(self, ended: Future[None]) -> None:
        with self._lock:
            if ended in self._ending:
                self._ending.remove(ended)
                ended.set_result(None)

    def _finish(self, key: int, outcome: Reply | RewardFailure) -> None:
        step = self._waiting.pop(key, None)
        if step is not None:
            if is_timeout(outcome):
                self._timeouts += 1
            else:
                self._others += 1
            step.outcome.set_result(outcome)


@dataclass
class _Step:
    arguments: tuple[Any, ...]  # of `_step`
    retries: int  # that are left
    outcome: Future[Reply | RewardFailure] = field(default_factory=Future)
    call: Future[None] = field(default_factory=Future)


async def _step(environment: Environment, *arguments: str) -> Any:
    """`arguments`: the message, and the key for an idempotent environment."""
    if inspect.iscoroutinefunction(environment.step):
        return await environment.step(*arguments)
    return await asyncio.to_thread(_step_in_thread, environment, arguments)


def _step_in_thread(environment: Environment, arguments: tuple[str, ...]) -> Any:
    try:
        return environment.step(*arguments)
    except BaseException as error:  # a future does not carry every exception: StopIteration
        return failure(error)


def as_reply(value: Any) -> Reply | RewardFailure:
    """A step's return value if it is a valid `Reply`, else a failure that describes it."""
    if isinstance(value, RewardFailure):
        return value
    if not isinstance(value, Reply):
        return RewardFailure("invalid", f"step returned {value!r:.80}; it must return a Reply")
    if not value.done and not value.messages:
        return RewardFailure("invalid", "step returned no messages and was not done; the policy has nothing to answer")
    if not all(map(math.isfinite, [value.reward, *value.components.values()])):
        return RewardFailure("invalid", f"step returned a number that is not finite: {value!r:.80}")
    return value
