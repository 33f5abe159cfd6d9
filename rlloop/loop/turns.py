"""Completions of prompts that come one by one: one interface over the ways in which engines take requests."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from rlloop.protocols import Engine, SteppedEngine, SubmittingEngine
from rlloop.types import Completion, SamplingParams

LINGER = 0.02  # seconds that a call of `generate` waits for environments that are about to reply


class Turns(Protocol):
    """One batch of conversations' way to the engine. For one thread, which calls `work` while `has_work`."""

    linger: float  # seconds to wait for further prompts before `work`, where some may come

    def submit(self, prompt_ids: list[int], sampling: SamplingParams) -> Future[Completion]: ...

    @property
    def has_work(self) -> bool:
        """Whether a completion waits for this thread's `work`."""
        ...

    def work(self) -> None:
        """Compute some of what was submitted. An engine that computes by itself has nothing to do here."""
        ...

    def close(self) -> None:
        """Drop what is left."""
        ...


def turns_of(engine: Engine) -> Turns:
    """By `submit` where the engine has it, else step by step, else by `generate`."""
    if isinstance(engine, SubmittingEngine):
        return SubmittedTurns(engine)
    if isinstance(engine, SteppedBatchEngine):
        return SteppedTurns(engine)
    return GeneratedTurns(engine)


class SubmittedTurns:
    """Of an engine that computes by itself, such as one elsewhere."""

    linger = 0.0
    has_work = False

    def __init__(self, engine: SubmittingEngine) -> None:
        self._engine = engine
        self._futures: list[Future[Completion]] = []

    def submit(self, prompt_ids: list[int], sampling: SamplingParams) -> Future[Completion]:
        future = self._engine.submit(prompt_ids, sampling)
        self._futures = [*(each for each in self._futures if not each.done()), future]
        return future

    def work(self) -> None:
        raise AssertionError("the engine computes by itself")

    def close(self) -> None:
        for future in self._futures:
            future.cancel()


@runtime_checkable
class SteppedBatchEngine(Engine, SteppedEngine, Protocol):
    """An engine in this process: whole batches, or step by step."""


class SteppedTurns:
    """Of an engine in this process: a prompt joins the batch at the engine's next step."""

    linger = 0.0

    def __init__(self, engine: SteppedBatchEngine) -> None:
        assert not engine.has_work, "another caller's requests are in flight"
        self._engine = engine
        self._futures: dict[int, Future[Completion]] = {}  # by request id

    def submit(self, prompt_ids: list[int], sampling: SamplingParams) -> Future[Completion]:
        future: Future[Completion] = Future()
        self._futures[self._engine.add_request(prompt_ids, sampling)] = future
        return future

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def work(self) -> None:
        for request, completion in self._engine.step():
            self._futures.pop(request).set_result(completion)

    def close(self) -> None:
        for request in self._futures:
            self._engine.abort(request)
        self._engine.generate([], [])  # after which an engine may rest: vLLM's gives its memory back


class GeneratedTurns:
    """Of an engine that takes whole batches alone: each call of `generate` has every prompt that waits by then."""

    linger = LINGER

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[tuple[list[int], SamplingParams, Future[Completion]]] = []

    def submit(self, prompt_ids: list[int], sampling: SamplingParams) -> Future[Completion]:
        future: Future[Completion] = Future()
        self._waiting.append((prompt_ids, sampling, future))
        return future

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def work(self) -> None:
        batch, self._waiting = self._waiting, []
        completions = self._engine.generate([prompt for prompt, _, _ in batch], [params for _, params, _ in batch])
        for (_, _, future), completion in zip(batch, completions, strict=True):
            future.set_result(completion)

    def close(self) -> None:
        self._waiting = []
