"""An engine in its own thread: callers in any thread share its batches; weights change between batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlloop.errors import ConfigError
from rlloop.protocols import Listener, SteppedEngine
from rlloop.rollout.engine.jobs import Job, each_once
from rlloop.rollout.errors import Busy, VersionUnavailable
from rlloop.types import Completion, ModelInput, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")
PauseMode = Literal["wait", "abort", "keep"]
SHUT = "the engine was shut down"


class EngineService:
    """Runs `engine`, which nothing else may call while the service runs.

    A completion has one version of the weights. So a change of weights waits for running requests, and new requests
    wait for the change; `change_weights` runs it with nothing in flight.
    """

    def __init__(self, engine: SteppedEngine, *, max_waiting: int = 4096) -> None:
        """`max_waiting`: requests (prompts) in flight or waiting; `submit` raises `Busy` above it, `ConfigError` for
        one call of more."""
        self._engine, self._max_waiting = engine, max_waiting
        self._changed = threading.Condition()
        self._inbox: list[Job] = []
        self._cancelled: set[Future[list[Completion]]] = set()
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []  # of `_between_steps`
        self._pause: tuple[Callable[[], Any], Future[Any]] | None = None
        self._halt: tuple[PauseMode, Future[None]] | None = None  # the caller that waits in `pause`, and its mode
        self._paused = False
        self._closed, self._why = False, SHUT
        self._admitted: list[Job] = []  # taken from the inbox, not yet in the engine
        self._unscored: list[Job] = []  # admitted, with prompts still to be scored
        self._running: dict[int, Job] = {}  # by request id
        self._load = 0
        self.halted: str | None = None  # reason why nothing may be served; written in the engine's thread
        self._thread = threading.Thread(target=self._work, daemon=True, name="engine")
        self._thread.start()

    @property
    def version(self) -> int:
        """The version of the weights; -1 if they must not be served."""
        return self._engine.policy_version if self.halted is None else -1

    @property
    def paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._paused

    @property
    def load(self) -> int:
        """Requests in flight or waiting."""
        return self._load

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        return self._engine.longest

    def fingerprint(self) -> dict[str, Any]:
        return self._engine.fingerprint()

    def stats(self) -> Any:
        """The engine's counts (`rlloop.rollout.engine.scheduler.EngineStats`)."""
        return self._engine.stats()

    def submit(
        self,
        prompts: Sequence[ModelInput | list[int]],
        sampling: Sequence[SamplingParams],
        lowest: int | None = None,
        highest: int | None = None,
        *,
        listener: Listener | None = None,
        top: int = 0,
        score: int | None = None,
        only_score: bool = False,
        adapters: Sequence[str | None] = (),
    ) -> Future[list[Completion]]:
        """Completions in the order of the prompts, all made by one version from `lowest` to `highest`.

        `listener` receives tokens as they are drawn. `top`: number of alternatives for each. `score`: first report the
        logprobs of the prompts' own tokens to the listener, with this many alternatives; one prompt per engine step,
        and consecutive uses of one list in `prompts` are scored once. `only_score`: generate nothing, so completions
        are empty. `adapters`: a name for each prompt; empty: none.

        The future raises `VersionUnavailable` if the engine has another version when the call's turn comes, and
        `ConfigError` for prompts that it cannot take. Raises `Busy` when too many requests wait.
        """
        job = Job(prompts, sampling, lowest, highest, listener, top, score, only_score, adapters)
        job.answer.set_running_or_notify_cancel()  # only `cancel` ends it early
        with self._changed:
            self._check_open()
            if len(prompts) > self._max_waiting:
                raise ConfigError(
                    f"one request has {len(prompts)} prompts, and at most {self._max_waiting} may wait; send it in "
                    "parts, or start the engine with a larger --max-waiting"
                )
            if self._load + len(prompts) > self._max_waiting:
                raise Busy(f"{self._load} requests are waiting or in flight; at most {self._max_waiting} may be")
            self._load += len(prompts)
            self._inbox.append(job)
            self._changed.notify()
        return job.answer

    def cancel(self, answer: Future[list[Completion]]) -> None:
        """Cancel a call; its future gets `Busy`."""
        with self._changed:
            self._cancelled.add(answer)
            self._changed.notify()

    def change_weights(self, change: Callable[[], T]) -> T:
        """Run `change` in the engine's thread once nothing is in flight; returns its result or raises its error.

        After an error the weights have no version, and nothing is served until another change succeeds."""
        answer: Future[T] = Future()
        with self._changed:
            self._check_open()
            assert self._pause is None, "one change of weights at a time"
            self._pause = (change, answer)
            self._changed.notify()
        return answer.result()

    @property
    def adapters(self) -> dict[str, int]:
        """The versions of the engine's adapters by name; empty for an engine that has none."""
        return dict(getattr(self._engine, "adapter_versions", {}))

    def load_adapter(self, name: str, folder: str | Path) -> int:
        """As `Engine.load_adapter`, while requests run: the folder is read in the caller's thread."""
        if not hasattr(self._engine, "read_adapter"):
            raise ConfigError("this engine computes no adapters; start one with --engine embedded")
        engine: Any = self._engine
        weights = engine.read_adapter(folder)
        return self._between_steps(lambda: engine.add_adapter(name, weights))

    def drop_adapter(self, name: str) -> None:
        """As `Engine.drop_adapter`; current requests finish with the adapter."""
        engine: Any = self._engine
        self._between_steps(lambda: engine.drop_adapter(name))

    def _between_steps(self, call: Callable[[], T]) -> T:
        """Run `call` in the engine's thread between two steps; returns or raises what it does."""
        answer: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._calls.append((call, answer))
            self._changed.notify()
        return answer.result()

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stop computing until `resume`; returns once stopped. New requests wait.

        Requests in flight are finished first (`wait`), end now with the tokens that they have (`abort`), or continue
        after the pause (`keep`). A change of weights runs during the pause after `wait` and `abort`; after `keep` it
        waits for `resume`, since a completion has one version.
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
        """End the thread. Calls, pauses and changes of weights that are still waiting get `Busy`."""
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
        except Exception as error:  # the engine cannot even drop a request, so no caller may wait for it
            why = self.halted = f"the engine failed: {type(error).__name__} {error}"
            log.exception("the engine failed, and serves nothing any more")
        with self._changed:
            self._closed, self._why = True, why
        for job in each_once([*self._running.values(), *self._unscored, *self._admitted, *self._inbox]):
            if not job.answer.done():
                job.answer.set_exception(Busy(why))
        for waiting in (self._halt, self._pause, *self._calls):
            if waiting is not None and not waiting[1].done():
                waiting[1].set_exception(Busy(why))

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._cancelled or self._halt or self._calls or self._may_work()):
                    self._changed.wait()
                if self._closed:
                    return
                cancelled, self._cancelled = self._cancelled, set()
                calls, self._calls = self._calls, []
                pause = self._pause
                halt = self._halt
                if pause is None and halt is None and not self._paused:
                    self._admitted, self._inbox = self._inbox, []
            for call, answer in calls:  # first, since nobody else has them if the rest fails
                try:
                    answer.set_result(call())
                except Exception as error:  # goes to the caller
                    answer.set_exception(error)
            self._drop(cancelled)
            if halt is not None and (halt[0] != "wait" or not self._has_work):
                self._stop(*halt)
                continue
            for job in self._admitted:
                if not job.answer.done():
                    self._admit(job)
            self._admitted = []
            if self._has_work:
                if halt is not None or not self._paused:
                    self._step()
            elif pause is not None:
                self._change(*pause)

    def _may_work(self) -> bool:
        if self._paused:  # with nothing in flight, a change of weights needs no computing
            return self._pause is not None and not self._has_work
        return bool(self._inbox or self._pause or self._has_work)

    @property
    def _has_work(self) -> bool:
        return bool(self._unscored) or self._engine.has_work

    def _stop(self, mode: PauseMode, answer: Future[None]) -> None:
        if mode == "abort":
            for request, job in list(self._running.items()):
                if request in self._running and (completion := self._engine.abort(request)) is not None:
                    self._keep(job, request, completion)
            for job in each_once([*self._running.values(), *self._unscored]):
                self._fail(job, Busy("aborted by a pause before any token was drawn"))
        with self._changed:
            self._halt, self._paused = None, True
        answer.set_result(None)

    def _admit(self, job: Job) -> None:
        if self.halted is not None or not job.accepts(self._engine.policy_version):
            self._finish(job, error=VersionUnavailable(self.version, job.lowest, job.highest))
            return
        if job.score is None or not job.prompts:
            self._start(job)
        else:
            self._unscored.append(job)

    def _start(self, job: Job) -> None:
        if job.only_score or not job.prompts:
            empty = job.without_tokens(self._engine.policy_version)
            if all(self._heard(job, index, completion) for index, completion in enumerate(empty)):
                self._finish(job, empty)
            return
        try:
            for index, (prompt, params) in enumerate(zip(job.prompts, job.sampling, strict=True)):
                job.ids.append(self._engine.add_request(prompt, params, top_logprobs=job.top, **job.arguments(index)))
        except Exception as error:  # the caller's mistake or the engine's; other jobs are not affected
            self._fail(job, error)
            return
        job.index = {request: index for index, request in enumerate(job.ids)}
        self._running.update(dict.fromkeys(job.ids, job))

    def _score(self, job: Job) -> None:
        """Score the job's next prompt."""
        begin, prompts = job.scored, job.prompts
        try:
            scores = self._engine.score(prompts[begin], job.score or 0, **job.arguments(begin))
            while job.scored < len(prompts) and prompts[job.scored] is prompts[begin]:
                if job.listener is not None:
                    job.listener.scored(job.scored, scores)
                job.scored += 1
        except Exception as error:  # goes to the caller
            self._fail(job, error)
            return
        if job.scored == len(prompts):
            self._unscored.remove(job)
            self._start(job)

    def _step(self) -> None:
        if self._unscored:
            self._score(self._unscored[0])
        if not self._engine.has_work:
            return
        try:
            finished = self._engine.step()
        except Exception as error:  # the engine dropped everything in flight: each caller gets the error
            for job in each_once(self._running.values()):
                self._finish(job, error=error)
            self._running.clear()
            return
        for request, completion in finished:
            if request in self._running:  # else its listener failed
                self._tell(self._running[request], request, completion)
        for request, job in [each for each in self._running.items() if each[1].listener is not None]:
            if request in self._running:
                self._tell(job, request)

    def _tell(self, job: Job, request: int, completion: Completion | None = None) -> None:
        """Report a request's new tokens to its listener, which may end it. `completion`: the whole, if it has ended."""
        kept = None
        if job.listener is not None:
            segment = job.unheard(self._engine, request, completion)
            try:
                kept = job.listener.made(job.index[request], segment) if segment.token_ids else None
            except Exception as error:  # the listener's, so its caller gets it
                self._fail(job, error)
                return
        if kept is not None:
            completion = completion or self._engine.abort(request)
            assert completion is not None, "the engine lost a request"
            completion = completion.stopped_at(kept)
        if completion is not None:
            self._keep(job, request, completion)

    def _keep(self, job: Job, request: int, completion: Completion) -> None:
        self._running.pop(request, None)
        job.done[request] = completion
        if self._heard(job, job.index[request], completion) and len(job.done) == len(job.ids):
            self._finish(job, [job.done[request] for request in job.ids])

    def _heard(self, job: Job, index: int, completion: Completion) -> bool:
        try:
            if job.listener is not None:
                job.listener.finished(index, completion)
        except Exception as error:  # the listener's, so its caller gets it
            self._fail(job, error)
            return False
        return True

    def _change(self, change: Callable[[], Any], answer: Future[Any]) -> None:
        halted, self.halted = self.halted, "a change of weights did not end"
        result, failure = None, None
        try:
            result = change()
            self.halted = None
        except Exception as error:  # goes to the caller of the change
            self.halted, failure = halted or self.halted, error
        with self._changed:
            self._pause = None
        if failure is None:
            answer.set_result(result)
        else:
            answer.set_exception(failure)

    def _drop(self, cancelled: set[Future[list[Completion]]]) -> None:
        if not cancelled:
            return
        for job in each_once([*self._running.values(), *self._unscored, *self._admitted]):
            if job.answer in cancelled:
                self._fail(job, Busy("cancelled"))
        with self._changed:
            waiting = [job for job in self._inbox if job.answer in cancelled]
            self._inbox = [job for job in self._inbox if job.answer not in cancelled]
        for job in waiting:
            self._finish(job, error=Busy("cancelled"))

    def _fail(self, job: Job, error: BaseException) -> None:
        """Drop the job's requests, in the engine and here, and raise `error` to its caller."""
        self._unscored = [other for other in self._unscored if other is not job]
        for request in job.ids:
            self._engine.abort(request)
            self._running.pop(request, None)
        self._finish(job, error=error)

    def _finish(
        self, job: Job, completions: list[Completion] | None = None, error: BaseException | None = None
    ) -> None:
        with self._changed:
            self._load -= len(job.prompts)
        if error is not None:
            job.answer.set_exception(error)
        else:
            assert completions is not None
            job.answer.set_result(completions)
