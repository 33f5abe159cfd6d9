"""Turns of the service's one thread, by a clock that only work moves."""

import threading
from concurrent.futures import Future

import pytest

from rlloop.training.lanes import Lane, Worker


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
        self.lanes, self.over = [], threading.Event()

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
    worker = clock.worker = Worker("turns", lambda lane: None, lambda: clock.now)
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
    assert max(used(lanes)) - min(used(lanes)) <= 2 * max(lane.seconds for lane in lanes)


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
            clock.worker.lanes.append(late)
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
    assert greedy.done * 1.0 <= 52


def test_an_engine_has_a_share_for_each_model_that_samples():
    clock = Clock()
    engine, lanes = Slow(clock, 0.05, weight=4), [Slow(clock, 0.05) for _ in range(4)]
    run(clock, [engine, *lanes], until=40.0)
    assert abs(used([engine])[0] - sum(used(lanes))) <= 0.5
