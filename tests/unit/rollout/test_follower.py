"""A follower's status while its engine's weights change."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rlloop.errors import SyncError
from rlloop.rollout.fleet.weight_follower import ReplicaFollower
from rlloop.sync.publisher import Publisher
from rlloop.sync.replica import Replica
from rlloop.sync.store import FolderStore
from rlloop.sync.target import TORN, MemoryTarget
from tests.support.weight_history import KEY, PUBLIC, history


def test_a_look_that_fails_oddly_is_not_the_last_one(tmp_path):
    """An error that no replica knows, then a store that cannot be read."""

    class Odd(Replica):
        odd = True

        def poll(self):
            if self.odd:
                raise MemoryError("no room")
            return super().poll()

    (tmp_path / "latest").mkdir()
    replica = Odd(FolderStore(tmp_path), PUBLIC, MemoryTarget())
    service: Any = SimpleNamespace(halted=None, version=0)
    follower = ReplicaFollower(replica, service, interval=60)

    def looks_until(said: str) -> None:
        while said not in follower.error or follower.status != "behind":
            follower.wait_for(0, 0.1)
            assert follower._thread.is_alive()

    looks_until("no room")
    replica.odd = False
    looks_until("Is a directory")
    (tmp_path / "latest").rmdir()
    Publisher(FolderStore(tmp_path), KEY, "run").publish(history(0)[0], 0)
    follower.wait_for(0, 20)
    assert (follower.status, follower.error) == ("ready", "")
    follower.close()


class Halting(MemoryTarget):
    """Stops at each write until it may go on, and may fail there."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.go = threading.Event(), threading.Event()
        self.fails = False

    def write(self, name, bits):
        self.writing.set()
        self.go.wait(240)
        if self.fails:
            raise SyncError("no such memory")
        super().write(name, bits)


@pytest.fixture
def line(tmp_path):
    store, target = FolderStore(tmp_path), Halting()
    service: Any = SimpleNamespace(halted=None, version=0)
    follower = ReplicaFollower(Replica(store, PUBLIC, target), service, interval=0.02)
    yield Publisher(store, KEY, "run"), target, follower
    target.go.set()
    follower.close()


def test_a_commit_under_way_is_no_failure(line):
    publisher, target, follower = line
    assert follower.status == "behind"
    publisher.publish(history(0)[0], 0)
    follower.wake()
    assert target.writing.wait(240)
    assert (target.version, follower.status) == (TORN, "behind")
    target.go.set()
    follower.wait_for(0, 20)
    assert (target.version, follower.status, follower.error) == (0, "ready", "")


def test_one_that_failed_is_and_the_next_try_ends_it(line):
    publisher, target, follower = line
    target.fails = True
    target.go.set()
    publisher.publish(history(0)[0], 0)
    follower.wait_for(0, 20)
    assert (target.version, follower.status, follower.error) == (TORN, "failed", "no such memory")
    target.fails = False
    while follower.status != "ready":
        follower.wait_for(0, 0.1)
    assert target.version == 0
