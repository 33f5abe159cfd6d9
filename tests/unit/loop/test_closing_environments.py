"""Environments that are being closed while an event loop is blocked."""

import asyncio
import threading
import time

import pytest

from rlloop.loop.environments import EnvironmentSteps, Reply

EVER = 60.0  # seconds


class Ends:
    """`blocks`: the step or the end that never lets the event loop go on."""

    def __init__(self, blocks: str = "") -> None:
        self.blocks, self.begun = blocks, threading.Event()

    async def step(self, message: str) -> Reply:
        self.begun.set()
        if self.blocks == "step":
            time.sleep(EVER)
        await asyncio.sleep(0.05)
        return Reply(done=True)

    async def close(self) -> None:
        self.begun.set()
        if self.blocks == "close":
            time.sleep(EVER)
        await asyncio.sleep(EVER)


@pytest.mark.parametrize("blocks", ["step", "close"])
def test_an_environment_s_end_is_left_behind_with_a_blocked_loop(blocks):
    steps, waits = EnvironmentSteps(timeout=0.5), Ends("close" if blocks == "close" else "")
    ended = steps.end(waits)
    assert waits.begun.wait(EVER)
    stepped = [steps.submit(Ends(), ""), *([steps.submit(Ends("step"), "")] if blocks == "step" else [])]
    until = time.monotonic() + EVER / 2
    while not (ended.done() and all(each.done() for each in stepped)):
        assert time.monotonic() < until, "it waits for ever"
        steps.check()
        time.sleep(0.01)
    assert isinstance(stepped[0].result(0), Reply)  # begun again, and not to blame
    steps.close()


def test_a_run_that_ends_leaves_behind_what_is_being_closed():
    steps = EnvironmentSteps(timeout=EVER)
    waits = Ends()
    ended = steps.end(waits)
    assert waits.begun.wait(EVER)
    steps.close()
    assert ended.result(0) is None
