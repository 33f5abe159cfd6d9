"""What other threads ask a pool of engines while engines join it."""

from types import SimpleNamespace
from typing import Any

from rlloop.rollout.fleet.membership import PoolSettings
from rlloop.rollout.fleet.pool import EnginePool


def test_an_engine_may_join_while_another_thread_counts_the_serving_ones():
    class Joins:
        last = SimpleNamespace(longest=128)

        @property
        def status(self) -> str:
            members[str(len(members))] = self
            return "serving"

    connect: Any = None
    pool = EnginePool(PoolSettings(), print, connect)
    members: Any = pool._members._all
    members["first"] = Joins()
    assert pool.longest == 128
    members.clear()
    pool.close()
