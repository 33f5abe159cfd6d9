"""Turns of the service's one thread, by a clock that only work moves."""

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest

from rlloop.training.lanes import Action, Lane, SamplingLane, Worker
from rlloop.training.provenance import SampledSequences
from rlloop.training.sampling import SampleCall, Sampling


class Slow(Lane):
    """A backend whose units each take `seconds`. It is busy while `units` are left."""

    def __init__(self, clock, seconds, owner=None, units=10**6, weight=1):
        self.clock, self.seconds, self.owner, self.units = clock, seconds, owner, units
        self.done, self._weight = 0, weight

    @property
    def busy(self):
        return self.units > 0

    @property
    def weight(self):
        return self._weight

    def place(self, call, seq_id):
        return Future()

    def step(self):
        self.clock.now += self.seconds
        self.units -= 1
        self.done += 1
        self.clock.ran(self)

    def broken(self, error):
        raise error

    def close(self, error):
        pass


class Clock:
    """`until`: work stops at this time. `hooks`: what happens when it is `time`, by time."""

    def __init__(self):
        self.now, self.until, self.hooks = 0.0, 0.0, {}
        self.lanes, self.served, self.over = [], [], threading.Event()

    def ran(self, lane):
        for time in [time for time in self.hooks if time <= self.now]:
            self.hooks.pop(time)()
        if self.now >= self.until:
            for each in self.lanes:
                each.units = 0
            self.over.set()


def run(clock, lanes, until):
    """Serve lanes until the clock says so."""
    clock.lanes, clock.until = list(lanes), until
    worker = Worker("turns", lambda lane: None, lambda: clock.now)
    clock.served = worker.lanes
    with worker.changed:
        worker.lanes += lanes
        worker.changed.notify_all()
    assert clock.over.wait(60)
    worker.close(RuntimeError("over"))


def used(lanes):
    return [lane.done * lane.seconds for lane in lanes]


def test_64_sessions_have_equal_time_however_long_their_units_are():
    clock = Clock()
    lanes = [Slow(clock, 0.01 * (1 + number % 8)) for number in range(64)]
    run(clock, lanes, until=64 * 2.0)
    assert min(used(lanes)) >= 0.9 * max(used(lanes))


def test_models_of_one_client_share_its_turns():
    clock = Clock()
    flood, alone = [Slow(clock, 0.02, "flood") for _ in range(16)], Slow(clock, 0.02, "alone")
    run(clock, [*flood, alone], until=64.0)
    assert abs(sum(used(flood)) - alone.done * 0.02) <= 0.04
    assert max(used(flood)) - min(used(flood)) <= 0.04


@pytest.mark.parametrize("made", ["early", "late"])
def test_a_newcomer_neither_waits_nor_catches_up(made):
    clock = Clock()
    early, late = [Slow(clock, 0.05) for _ in range(3)], Slow(clock, 0.05, units=0)
    before = []

    def comes():
        before.extend(lane.done for lane in early)
        late.units = 10**6
        if made == "late":
            clock.served.append(late)
            clock.lanes.append(late)

    clock.hooks[30.0] = comes
    run(clock, [*early, late] if made == "early" else early, until=50.0)
    since = [lane.done - count for lane, count in zip(early, before, strict=True)]
    assert all(abs(late.done - each) <= 2 for each in since), (late.done, since)


def test_pauses_do_not_pay():
    clock = Clock()
    greedy, steady = Slow(clock, 1.0, units=1), Slow(clock, 0.05)

    def again():  # one long unit, a moment's pause, the next
        greedy.units = 1
        if clock.now < 90:
            clock.hooks[clock.now + 0.06] = again

    clock.hooks[1.06] = again
    run(clock, [greedy, steady], until=100.0)
    assert greedy.done * 1.0 <= 55


def test_one_long_unit_is_forgotten():
    clock = Clock()
    lanes = [Slow(clock, 0.02) for _ in range(64)]
    lanes[0].seconds = 5.0
    clock.hooks[5.0] = lambda: setattr(lanes[0], "seconds", 0.02)  # after its first, for which kernels were compiled
    run(clock, lanes, until=120.0)
    fair = (120 - 5) / 64 / 0.02
    assert 0.3 * fair < lanes[0].done - 1 < fair  # and not 0, which it would have until the others have used 5 s each
    assert max(lane.done for lane in lanes[1:]) - min(lane.done for lane in lanes[1:]) <= 2


def test_an_engine_has_a_share_for_each_model_that_samples():
    clock = Clock()
    engine, lanes = Slow(clock, 0.05, weight=4), [Slow(clock, 0.05) for _ in range(4)]
    run(clock, [engine, *lanes], until=40.0)
    assert abs(used([engine])[0] - sum(used(lanes))) <= 0.5


def test_requests_may_begin_while_another_thread_counts_them():
    class Begins(deque[Any]):
        def __len__(self) -> int:
            sampling._calls[str(len(sampling._calls))] = self
            return 1

    engine: Any = None
    sampling = Sampling(engine, SampledSequences(1), max_running=1)
    sampling._calls["first"] = Begins()
    assert sampling.waiting == 1


def test_samples_fail_where_no_engine_can_be_made_and_the_next_tries_again():
    def make() -> Sampling:
        tries.append(len(tries))
        raise MemoryError("no room for the cache")

    tries = list[int]()
    lane, ran = SamplingLane(make), list[str]()
    worker = Worker("no engine", lambda lane: None)
    calls: list[Any] = [sample(), sample(), Action(lambda: ran.append("dropped")), sample()]
    with worker.changed:
        worker.lanes.append(lane)
        futures = [lane.place(call) for call in calls]
        worker.changed.notify_all()
    for future in futures[:2] + futures[3:]:
        with pytest.raises(MemoryError, match="no room"):
            future.result(60)
    futures[2].result(60)
    assert (ran, tries, lane.busy) == (["dropped"], [0, 1], False)  # what needs no engine is done
    with worker.changed:
        later = lane.place(sample())
        worker.changed.notify_all()
    with pytest.raises(MemoryError):
        later.result(60)
    worker.close(RuntimeError("over"))


def sample() -> SampleCall:
    nothing: Any = None
    return SampleCall(nothing, nothing, [], [], nothing, 0, 0, [])
