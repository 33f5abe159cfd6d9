"""An event loop in a thread, whose end others do not await."""

import asyncio

import pytest

from rlloop.errors import RlloopError
from rlloop.rollout.fleet.client import LoopThread


def test_work_that_comes_while_the_loop_ends_is_refused(monkeypatch):
    """Another thread's, when all tasks have been cancelled and the loop is about to stop."""
    thread = LoopThread("test")
    begun = thread.start(asyncio.sleep(3600))
    schedule, refused = thread._loop.call_soon_threadsafe, list[str]()

    def late(callback, *arguments, **options):
        if callback == thread._loop.stop:
            with pytest.raises(RlloopError) as error:
                thread.start(asyncio.sleep(0))
            refused.append(str(error.value))
        return schedule(callback, *arguments, **options)

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", late)
    thread.close()
    assert refused == ["the test is closed"]
    assert begun.cancelled()
