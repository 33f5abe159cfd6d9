"""An engine behind a thread: requests come from anywhere and share its batches; weights change between batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from rlloop.errors import ConfigError, RlloopError
from rlloop.types import Completion, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")
PauseMode = Literal["wait", "abort", "keep"]
SHUT = "the engine was shut down"


class SteppedEngine(Protocol):
    """What `EngineService` drives: `rlloop.Engine`, or a stand-in for it."""

    @property
    def policy_version(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams) -> int: ...

    def step(self) -> list[tuple[int, Completion]]: ...

    def abort(self, request_id: int) -> Completion | None: ...

    def stats(self) -> Any: ...

    def fingerprint(self) -> dict[str, Any]: ...


class VersionUnavailable(RlloopError):
    """The engine's weights are not those that a request asks for. `passed`: and never will be again."""

    def __init__(self, have: int, lowest: int | None, highest: int | None) -> None:
        self.have, self.lowest, self.highest = have, lowest, highest
        self.passed = highest is not None and have > highest
        wanted = f"{lowest}" if lowest == highest else f"from {lowest} to {'any' if highest is None else highest}"
        super().__init__(f"this engine has version {have} of the weights; asked for is {wanted}")


class Busy(RlloopError):
    """More is waiting than the server was told to take on."""


@dataclass(eq=False)
class _Job:
    """The requests of one call, which are answered together."""

    prompts: Sequence[list[int]]
    sampling: Sequence[SamplingParams]
    lowest: int | None
    highest: int | None
    answer: Future[list[Completion]] = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    done: dict[int, Completion] = field(default_factory=dict)


class EngineService:
    """Owns `engine`: nothing else may call it while the service runs.

    A completion has one version. So a change of weights waits until what runs is finished, while what comes in the
    meantime waits for the change; `change_weights` runs it with nothing in flight.
    """

    def __init__(self, engine: SteppedEngine, *, max_waiting: int = 4096) -> None:
        """`max_waiting`: requests (prompts) in flight or waiting; `submit` raises `Busy` above it, `ConfigError` for
        one call of more."""
        self._engine, self._max_waiting = engine, max_waiting
        self._changed = threading.Condition()
        self._inbox: list[_Job] = []
        self._cancelled: set[Future[list[Completion]]] = set()
        self._pause: tuple[Callable[[], Any], Future[Any]] | None = None
        self._halt: tuple[PauseMode, Future[None]] | None = None  # whoever waits in `pause`, and for what
        self._paused = False
        self._closed, self._why = False, SHUT
        self._admitted: list[_Job] = []  # taken from the inbox, and on their way into the engine
        self._running: dict[int, _Job] = {}  # by request id
        self._load = 0
        self.halted: str | None = None  # why nothing may be served; written in the engine's thread
        self._thread = threading.Thread(target=self._work, daemon=True, name="engine")
        self._thread.start()

    @property
    def version(self) -> int:
        """-1: none that may serve."""
        return self._engine.policy_version if self.halted is None else -1

    @property
    def paused(self) -> bool:
        """Between `pause` and `resume`."""
        return self._paused

    @property
    def load(self) -> int:
        """Requests in flight or waiting."""
        return self._load

    def fingerprint(self) -> dict[str, Any]:
        return self._engine.fingerprint()

    def stats(self) -> Any:
        """The engine's counts (`rlloop.rollout.scheduler.EngineStats`)."""
        return self._engine.stats()

    def submit(
        self,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        lowest: int | None = None,
        highest: int | None = None,
    ) -> Future[list[Completion]]:
        """Completions in the order of the prompts, all made by one version from `lowest` to `highest`.

        The future raises `VersionUnavailable` where the engine, once it gets to them, has another version, and
        `ConfigError` for prompts that it cannot take.
        """
        job = _Job(prompts, sampling, lowest, highest)
        job.answer.set_running_or_notify_cancel()  # only `cancel` ends it early
        with self._changed:
            self._check_open()
            if len(prompts) > self._max_waiting:
                raise ConfigError(
                    f"one request has {len(prompts)} prompts, and {self._max_waiting} may wait here at all; send it in "
                    "parts, or start the engine with a larger --max-waiting"
                )
            if self._load + len(prompts) > self._max_waiting:
                raise Busy(f"{self._load} requests are waiting or in flight; at most {self._max_waiting} may be")
            self._load += len(prompts)
            self._inbox.append(job)
            self._changed.notify()
        return job.answer

    def cancel(self, answer: Future[list[Completion]]) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            self._cancelled.add(answer)
            self._changed.notify()

    def change_weights(self, change: Callable[[], T]) -> T:
        """Run `change` in the engine's thread once nothing is in flight. Returns or raises what it does; where it
        raises, the weights are of no version, and nothing is served until another change succeeds."""
        answer: Future[T] = Future()
        with self._changed:
            self._check_open()
            assert self._pause is None, "one change of weights at a time"
            self._pause = (change, answer)
            self._changed.notify()
        return answer.result()

    def pause(self, mode: PauseMode = "wait") -> None:
        """Compute nothing from when this returns until `resume`; what comes in the meantime waits.

        What is in flight is finished first (`wait`), ends now, so that its callers get what there is (`abort`), or
        stays as it is and goes on after (`keep`). A change of weights that comes meanwhile finds nothing in flight
        after the first two; after `keep` it waits for `resume`, since a completion has one version.
        """
        answer: Future[None] = Future()
        with self._changed:
            self._check_open()
            assert self._halt is None, "one pause at a time"
            self._halt = (mode, answer)
            self._changed.notify()
        answer.result()

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify()

    def close(self) -> None:
        """What waits, for an answer, a pause or a change of weights, hears that it never comes: `Busy`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise Busy(self._why)

    # ---------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        why = SHUT
        try:
            self._serve()
        except Exception as error:  # the engine cannot even be told to drop a request: nobody is to wait for it
            why = self.halted = f"the engine failed: {type(error).__name__} {error}"
            log.exception("the engine failed, and serves nothing any more")
        with self._changed:
            self._closed, self._why = True, why
        for job in {id(job): job for job in [*self._running.values(), *self._admitted, *self._inbox]}.values():
            if not job.answer.done():
                job.answer.set_exception(Busy(why))
        for waiting in (self._halt, self._pause):
            if waiting is not None and not waiting[1].done():
                waiting[1].set_exception(Busy(why))

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._cancelled or self._halt or self._may_work()):
                    self._changed.wait()
                if self._closed:
                    return
                cancelled, self._cancelled = self._cancelled, set()
                pause = self._pause
                halt = self._halt
                if pause is None and halt is None and not self._paused:
                    self._admitted, self._inbox = self._inbox, []
            self._drop(cancelled)
            if halt is not None and (halt[0] != "wait" or not self._engine.has_work):
                self._stop(*halt)
                continue
            for job in self._admitted:
                if not job.answer.done():
                    self._admit(job)
            self._admitted = []
            if self._engine.has_work:
                if halt is not None or not self._paused:
                    self._step()
            elif pause is not None:
                self._change(*pause)

    def _may_work(self) -> bool:
        if self._paused:  # a change of weights needs no computing, where nothing is in flight
            return self._pause is not None and not self._engine.has_work
        return bool(self._inbox or self._pause or self._engine.has_work)

    def _stop(self, mode: PauseMode, answer: Future[None]) -> None:
        if mode == "abort":
            for job in {id(job): job for job in self._running.values()}.values():
                ended = {request: self._engine.abort(request) for request in job.ids if request not in job.done}
                job.done |= {request: made for request, made in ended.items() if made is not None}
                if len(job.done) == len(job.ids):
                    self._finish(job, [job.done[request] for request in job.ids])
                else:
                    self._finish(job, error=Busy("ended in a pause, and nothing is left of it"))
            self._running.clear()
        with self._changed:
            self._halt, self._paused = None, True
        answer.set_result(None)

    def _admit(self, job: _Job) -> None:
        have = self._engine.policy_version if self.halted is None else -1
        if (
            self.halted is not None
            or (job.lowest is not None and have < job.lowest)
            or (job.highest is not None and have > job.highest)
        ):
            self._finish(job, error=VersionUnavailable(have, job.lowest, job.highest))
            return
        try:
            for prompt, params in zip(job.prompts, job.sampling, strict=True):
                job.ids.append(self._engine.add_request(prompt, params))
        except Exception as error:  # the caller's mistake, by name, or the engine's: neither is anybody else's
            self._abort(job)
            self._finish(job, error=error)
            return
        self._running.update(dict.fromkeys(job.ids, job))
        if not job.ids:
            self._finish(job, [])

    def _step(self) -> None:
        try:
            finished = self._engine.step()
        except Exception as error:  # the engine dropped everything in flight: each caller hears why, and it goes on
            for job in {id(job): job for job in self._running.values()}.values():
                self._finish(job, error=error)
            self._running.clear()
            return
        for request, completion in finished:
            job = self._running.pop(request)
            job.done[request] = completion
            if len(job.done) == len(job.ids):
                self._finish(job, [job.done[request] for request in job.ids])

    def _change(self, change: Callable[[], Any], answer: Future[Any]) -> None:
        halted, self.halted = self.halted, "a change of weights did not end"
        try:
            result = change()
        except Exception as error:  # belongs to who asked for the change
            self.halted = halted or self.halted
            self._changed_weights()
            answer.set_exception(error)
        else:
            self.halted = None
            self._changed_weights()
            answer.set_result(result)

    def _changed_weights(self) -> None:
        with self._changed:
            self._pause = None

    def _drop(self, cancelled: set[Future[list[Completion]]]) -> None:
        if not cancelled:
            return
        for job in {id(job): job for job in [*self._running.values(), *self._admitted]}.values():
            if job.answer in cancelled:
                self._abort(job)
                self._finish(job, error=Busy("cancelled"))
        with self._changed:
            waiting = [job for job in self._inbox if job.answer in cancelled]
            self._inbox = [job for job in self._inbox if job.answer not in cancelled]
        for job in waiting:
            self._finish(job, error=Busy("cancelled"))

    def _abort(self, job: _Job) -> None:
        for request in job.ids:
            self._engine.abort(request)
            self._running.pop(request, None)

    def _finish(
        self, job: _Job, completions: list[Completion] | None = None, error: BaseException | None = None
    ) -> None:
        with self._changed:
            self._load -= len(job.prompts)
        if error is not None:
            job.answer.set_exception(error)
        else:
            assert completions is not None
            job.answer.set_result(completions)
