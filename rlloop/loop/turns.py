"""Submission of single turns to engines: step by step, by calls that overlap, or by whole batches."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from rlloop.protocols import Engine, OverlappingEngine, SteppedEngine
from rlloop.types import Completion, ModelInput, SamplingParams

LINGER = 0.001  # seconds at most before a step
CALLS = 4  # in flight at a time, of an engine whose calls overlap


class Turns(Protocol):
    """Submits single prompts to an engine, from one thread, which calls `work` while `has_work`."""

    @property
    def linger(self) -> float:
        """Seconds to wait before `work`, counted from the last event, for environments about to reply."""
        ...

    def submit(self, prompt: ModelInput | list[int], sampling: SamplingParams) -> Future[Completion]: ...

    @property
    def has_work(self) -> bool:
        """True if `work` has something to do."""
        ...

    def work(self) -> None:
        """Run one step of the engine, or one call. Raises what the engine raises."""
        ...

    def close(self) -> None:
        """Drop pending turns."""
        ...


def turns_of(engine: Engine) -> Turns:
    """Step by step if the engine can, else by calls that overlap, else by one call after the other."""
    if isinstance(engine, SteppedBatchEngine):
        return SteppedTurns(engine)
    if isinstance(engine, OverlappingEngine):
        return OverlappedTurns(engine)
    return GeneratedTurns(engine)


@runtime_checkable
class SteppedBatchEngine(Engine, SteppedEngine, Protocol):
    """An engine in this process: whole batches, or step by step."""


class SteppedTurns:
    """A prompt joins the batch at the engine's next step.

    The wait before a step is at most a fiftieth of the last one, so that it costs no more of the engine's time.
    """

    def __init__(self, engine: SteppedBatchEngine) -> None:
        assert not engine.has_work, "another caller's requests are in flight"
        self._engine = engine
        self._futures: dict[int, Future[Completion]] = {}  # by request id
        self.linger = 0.0

    def submit(self, prompt: ModelInput | list[int], sampling: SamplingParams) -> Future[Completion]:
        future: Future[Completion] = Future()
        self._futures[self._engine.add_request(prompt, sampling)] = future
        return future

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def work(self) -> None:
        began = time.monotonic()
        ended = self._engine.step()
        self.linger = min(LINGER, (time.monotonic() - began) / 50)
        for request, completion in ended:
            self._futures.pop(request).set_result(completion)

    def close(self) -> None:
        for request in self._futures:
            self._engine.abort(request)
        self._engine.generate([], [])  # lets an idle engine free memory, as vLLM's does


@dataclass(eq=False)
class _Call:
    """Prompts that are sent to the engine together."""

    prompts: list[ModelInput | list[int]] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)
    futures: list[Future[Completion]] = field(default_factory=list)

    def finish(self, completions: list[Completion]) -> None:
        for future, completion in zip(self.futures, completions, strict=True):
            future.set_result(completion)


class GeneratedTurns:
    """One call of `generate` at a time, each with all prompts waiting by then."""

    linger = 0.02

    def __init__(self, engine: Engine) -> None:
        self._engine, self._waiting = engine, _Call()

    def submit(self, prompt: ModelInput | list[int], sampling: SamplingParams) -> Future[Completion]:
        future: Future[Completion] = Future()
        self._waiting.prompts.append(prompt)
        self._waiting.sampling.append(sampling)
        self._waiting.futures.append(future)
        return future

    @property
    def has_work(self) -> bool:
        return bool(self._waiting.prompts)

    def work(self) -> None:
        call, self._waiting = self._waiting, _Call()
        call.finish(self._engine.generate(call.prompts, call.sampling))

    def close(self) -> None:
        self._waiting = _Call()


class OverlappedTurns(GeneratedTurns):
    """Up to `CALLS` calls in flight; further prompts wait and share the next call."""

    def __init__(self, engine: OverlappingEngine) -> None:
        super().__init__(engine)
        self._begin = engine.begin
        self._calls: list[Future[list[Completion]]] = []  # in flight
        self._closed = False

    @property
    def has_work(self) -> bool:
        self._calls = [answer for answer in self._calls if not answer.done()]
        return super().has_work and len(self._calls) < CALLS

    def work(self) -> None:
        call, self._waiting = self._waiting, _Call()

        def finish(answer: Future[list[Completion]]) -> None:  # in the engine's thread
            if self._closed:
                return
            error = CancelledError() if answer.cancelled() else answer.exception()  # as when the engine is closed
            if error is None:
                call.finish(answer.result())
            else:
                for future in call.futures:
                    future.set_exception(error)

        self._calls.append(self._begin(call.prompts, call.sampling))
        self._calls[-1].add_done_callback(finish)

    def close(self) -> None:
        super().close()
        self._closed = True
        for answer in self._calls:
            answer.cancel()
