"""Environments that are being closed while an event loop is blocked."""

import asyncio
import threading
import time
from concurrent.futures import Future

import pytest

from rlloop.loop.environments import EnvironmentSteps, Reply
from rlloop.rewards.runner import RewardFailure
from tests.support.waiting import until

EVER, PATIENCE = 60.0, 3.0  # seconds


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


def wait_for(steps: EnvironmentSteps, *futures: Future) -> None:
    until(lambda: steps.check() or all(each.done() for each in futures), seconds=EVER)


@pytest.mark.parametrize("blocks", ["step", "close"])
def test_an_environment_s_end_is_left_behind_with_a_blocked_loop(blocks):
    steps, waits = EnvironmentSteps(timeout=PATIENCE), Ends("close" if blocks == "close" else "")
    ended = steps.end(waits)
    assert waits.begun.wait(EVER)
    stepped = [steps.submit(Ends(), ""), *([steps.submit(Ends("step"), "")] if blocks == "step" else [])]
    wait_for(steps, ended, *stepped)
    if blocks == "step":
        assert isinstance(stepped[0].result(0), Reply)  # begun again, and not to blame
    steps.close()


def test_a_step_in_a_thread_does_not_begin_again_when_an_end_blocks_the_loop(caplog):
    steps, ended = EnvironmentSteps(timeout=PATIENCE), Ends("close")
    began, go_on = list[str](), threading.Event()

    class Threaded:
        def step(self, message: str) -> Reply:
            began.append(message)
            ended.begun.set()
            go_on.wait(EVER)
            return Reply(done=True)

    stepped = steps.submit(Threaded(), "once")
    assert ended.begun.wait(EVER)
    wait_for(steps, stepped, steps.end(ended))
    go_on.set()
    assert stepped.result(0) == RewardFailure("timeout", f"blocked its event loop for longer than {PATIENCE:g} s")
    assert began == ["once"]
    assert "whose end was not awaited, on a blocked event loop: 1" in caplog.text
    steps.close()


def test_a_run_that_ends_leaves_behind_what_is_being_closed():
    steps = EnvironmentSteps(timeout=EVER)
    waits = Ends()
    ended = steps.end(waits)
    assert waits.begun.wait(EVER)
    steps.close()
    assert ended.result(0) is None
