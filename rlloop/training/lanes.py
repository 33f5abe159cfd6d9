"""Fair scheduling: calls queue in lanes, one per model and one per engine; one thread serves them a unit at a time.

A unit is one micro-batch, one optimizer step, one save, or one step of an engine. The owner that has used the least of
the thread's time goes next, with its least used lane. An owner that becomes busy starts level with the others, so it
neither waits nor catches up.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from rlloop.errors import ConfigError
from rlloop.training.calls import LossCall
from rlloop.training.futures import promised
from rlloop.training.sampling import SampleCall, Sampling
from rlloop.training.trained_model import TrainedModel


class Action:
    """A call other than forward and forward_backward. `closes`: it needs the open micro-batch's gradient."""

    def __init__(self, run: Callable[[], Any], *, closes: bool = False) -> None:
        self.run, self.closes = run, closes
        self.future = promised()

    @classmethod
    def failed(cls, error: BaseException) -> Action:
        """A call that failed its checks; it only uses up its number in the order."""
        action = cls(lambda: None)
        action.future.set_exception(error)
        return action


Call = LossCall | Action
T = TypeVar("T")
HORIZON = 30.0  # seconds of the thread


class Turns(Generic[T]):
    """Fair turns by time used: the busy one that has used the least is next.

    Past use decays: after `HORIZON` seconds of all owners' use, a second counts 1/e. So one long unit, such as the
    first of its shape, which compiles kernels, delays its owner for seconds, not until all others have used as much.
    """

    def __init__(self) -> None:
        self._used = dict[T, float]()  # seconds, by weight: of the busy, and of the idle that are ahead of the clock
        self._busy, self._clock = set[T](), 0.0  # virtual clock: use of the last owner before its turn

    def next(self, busy: Collection[T]) -> T:
        """The next one of `busy`; ties go to the first. One that was not busy starts level with the others."""
        for each in busy:
            if each not in self._busy:
                self._used[each] = max(self._used.get(each, 0.0), self._clock)
        self._busy = set(busy)
        self._used = {each: used for each, used in self._used.items() if each in self._busy or used > self._clock}
        chosen = min(busy, key=self._used.__getitem__)
        self._clock = self._used[chosen]
        return chosen

    def charge(self, one: T, seconds: float, weight: int) -> None:
        fade = math.exp(-seconds / HORIZON)
        self._used = {each: used * fade for each, used in self._used.items()}
        self._used[one] += seconds / weight
        self._clock *= fade


class Lane:
    """A queue of work that takes turns with other lanes. Lanes of one `owner` share its turns."""

    owner: object = None  # None: the lane's own
    ended = False  # closed: no further calls

    @property
    def busy(self) -> bool:
        raise NotImplementedError

    @property
    def weight(self) -> int:
        """Shares of the thread's time."""
        return 1

    def place(self, call: Any, seq_id: int | None) -> Future[Any]:
        """Queue a call; returns its future."""
        raise NotImplementedError

    def step(self) -> None:
        """One unit of work."""
        raise NotImplementedError

    def broken(self, error: BaseException) -> None:
        """Fail the calls of the last unit, which raised this error."""
        raise NotImplementedError

    def close(self, error: BaseException) -> None:
        """Fail all waiting calls."""
        raise NotImplementedError


class ModelLane(Lane):
    """The calls of one model, in order of their numbers."""

    def __init__(self, model_id: str, owner: str | None = None) -> None:
        self.model_id, self.owner = model_id, owner
        self.model: TrainedModel | None = None  # set once it is created
        self.gone: BaseException | None = None  # reason why it takes no calls: its creation failed, or it was dropped
        self._queue: deque[Call] = deque()
        self._early: dict[int, Call] = {}
        self._next, self._numbered = 1, None

    def place(self, call: Call, seq_id: int | None) -> Future[Any]:
        """Queue a call. Raises `ConfigError` for a number that was used, or numbers given to only some calls."""
        if self.gone is not None:
            return self.first(call)  # to fail: no call before it may come
        if self._numbered is not None and self._numbered is not (seq_id is not None):
            raise ConfigError(f"model {self.model_id} has calls with and without seq_id; give one to all, or to none")
        if seq_id is not None and (seq_id < self._next or seq_id in self._early):
            raise ConfigError(f"model {self.model_id} had a call of seq_id {seq_id} already; the next is {self._next}")
        self._numbered = seq_id is not None
        if seq_id is None:
            return self.first(call)
        self._early[seq_id] = call
        while (ready := self._early.pop(self._next, None)) is not None:
            self._queue.append(ready)
            self._next += 1
        return call.future

    def first(self, call: Call) -> Future[Any]:
        """Queue a call that has no number, such as a model's creation or its end."""
        self._queue.append(call)
        return call.future

    def end(self) -> None:
        """Queue the calls that wait for others, which will not come, to fail as the model is `gone`."""
        self._queue += self._early.values()
        self._early.clear()
        self.ended = True

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._early)

    @property
    def busy(self) -> bool:
        return bool(self._queue) or (self.model is not None and self.model.unanswered)

    def step(self) -> None:
        while self._queue:
            call = self._queue[0]
            if self.gone is not None and not call.future.done():
                call.future.set_exception(self.gone)
            if call.future.done():
                self._queue.popleft()
            elif isinstance(call, LossCall):
                assert self.model is not None
                if call.trains and not self.model.take(call):
                    self.model.finish_leaf()
                    return
                if not call.trains:
                    self.model.forward(call)
                    if not call.waiting:
                        self._queue.popleft()
                    return
                self._queue.popleft()
            elif call.closes and self.model is not None and self.model.open:
                self.model.finish_leaf()
                return
            else:
                self._queue.popleft()
                self._act(call)
                return
        if self.model is not None and self.model.unanswered:
            self.model.answer()

    def _act(self, action: Action) -> None:
        try:
            result = action.run()
        except Exception as error:
            action.future.set_exception(error)
        else:
            action.future.set_result(result)

    def broken(self, error: BaseException) -> None:
        _fail([*list(self._queue)[:1], *([] if self.model is None else self.model.lose(error))], error)

    def close(self, error: BaseException) -> None:
        _fail([*self._queue, *self._early.values(), *([] if self.model is None else self.model.lose(error))], error)
        self._queue.clear()
        self._early.clear()


class SamplingLane(Lane):
    """The requests of one engine: a share of the time for each model that has some."""

    def __init__(self, make: Callable[[], Sampling]) -> None:
        self._make, self._new = make, deque[SampleCall | Action]()
        self.sampling: Sampling | None = None  # created at the first request for a sample

    def place(self, call: SampleCall | Action, seq_id: int | None = None) -> Future[Any]:
        self._new.append(call)
        return call.future

    @property
    def waiting(self) -> int:
        return len(self._new) + (0 if self.sampling is None else self.sampling.waiting)

    @property
    def busy(self) -> bool:
        return bool(self._new) or (self.sampling is not None and self.sampling.busy)

    @property
    def weight(self) -> int:
        return 1 if self.sampling is None else max(1, self.sampling.owners)

    def ready(self) -> Sampling:
        if self.sampling is None:
            self.sampling = self._make()
        return self.sampling

    def step(self) -> None:
        while self._new:
            if isinstance(self._new[0], SampleCall):
                self.ready()  # while the call waits: if no engine can be made, `broken` fails it
            call = self._new.popleft()
            if isinstance(call, SampleCall):
                self.ready().add(call)
                continue
            try:
                call.future.set_result(call.run())
            except Exception as error:
                call.future.set_exception(error)
            return
        self.ready().step()

    def broken(self, error: BaseException) -> None:
        if self.sampling is not None:
            self.sampling.fail_all(error)
            return
        while self._new and isinstance(self._new[0], SampleCall):  # others need no engine; the next sample tries again
            _fail([self._new.popleft()], error)

    def close(self, error: BaseException) -> None:
        _fail(self._new, error)
        self._new.clear()
        if self.sampling is not None:
            self.sampling.fail_all(error)


def _fail(calls: Iterable[Call | SampleCall], error: BaseException) -> None:
    for call in calls:
        if not call.future.done():
            call.future.set_exception(error)


class Worker:
    """The thread and the lanes that it serves. `changed` guards them; placing a call requires it."""

    def __init__(
        self, name: str, after: Callable[[Lane], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`after`: called in the thread after each unit. `clock`: of the seconds that a unit is charged."""
        self.changed = threading.Condition()
        self.lanes: list[Lane] = []
        self.error: BaseException | None = None  # reason why it accepts no further calls
        self._after, self._clock = after, clock
        self._owners, self._own = Turns[object](), dict[object, Turns[Lane]]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises `ConfigError` once it is closed."""
        if self.error is not None:
            raise ConfigError(f"the training service takes no more calls: {self.error}")

    def close(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for lane in self.lanes:
            lane.close(error)

    def _next(self) -> tuple[object, Lane]:
        """The owner and the lane that have the next unit; one lane or more is busy."""
        busy: dict[object, list[Lane]] = {}
        for lane in self.lanes:
            if lane.busy:
                busy.setdefault(lane if lane.owner is None else lane.owner, []).append(lane)
        self._own = {owner: self._own.get(owner) or Turns() for owner in busy}
        owner = self._owners.next(busy)
        return owner, self._own[owner].next(busy[owner])

    def _run(self) -> None:
        while True:
            with self.changed:
                while self.error is None and not any(lane.busy for lane in self.lanes):
                    self.changed.wait()
                if self.error is not None:
                    return
                owner, lane = self._next()
            began = self._clock()
            try:
                lane.step()
            except Exception as error:
                lane.broken(error)
            self._after(lane)
            seconds = self._clock() - began
            self._owners.charge(owner, seconds, lane.weight)
            self._own[owner].charge(lane, seconds, lane.weight)
