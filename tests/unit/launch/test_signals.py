"""Interrupts of a run."""

import os
import signal

import pytest

from rlloop.launch.signals import Interrupts


def interrupt(number: int) -> None:
    os.kill(os.getpid(), number)
    sum(range(10))  # by here the handler has run


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_whose_error_python_drops_still_ends_the_run():
    class Interrupted:
        def __del__(self) -> None:
            interrupt(signal.SIGINT)  # what is raised in `__del__` goes nowhere

    said = list[str]()
    with Interrupts(said.append) as interrupts:
        assert not interrupts.asked()
        Interrupted()
        assert interrupts.asked()
        with interrupts.held_back(), pytest.raises(KeyboardInterrupt):
            interrupt(signal.SIGINT)
    assert said == []


@pytest.mark.usefixtures("heard_hangups")
def test_the_first_interrupt_waits_and_the_second_does_not():
    said = list[str]()
    with Interrupts(said.append) as interrupts, interrupts.held_back():
        interrupt(signal.SIGHUP)
        assert interrupts.asked()
        with pytest.raises(KeyboardInterrupt):
            interrupt(signal.SIGTERM)
    assert said == ["Stopping after this step; press Ctrl-C again to stop at once"]
