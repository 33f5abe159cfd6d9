"""Interrupts that wait for the end of a context, and waits that an interrupt ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import FrameType

import pytest

from rlloop.parallel.interrupts import LOOKS, held_back, result_of


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt, as in a program, and do so after the test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_the_first_is_raised_at_the_end_of_the_outer_context() -> None:
    done = []

    def work() -> None:
        with held_back() as outer:
            with held_back() as inner:
                signal.raise_signal(signal.SIGINT)
                done.append(inner.asked)
            done.append(outer.asked)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True, True]


def test_the_second_is_raised_at_once() -> None:
    done = []

    def work() -> None:
        with held_back():
            for count in range(3):
                signal.raise_signal(signal.SIGINT)
                done.append(count)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [0]


def test_a_process_that_ignores_them_goes_on_doing_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_back() as held:
            signal.raise_signal(signal.SIGINT)
        assert not held.asked
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_get_none() -> None:
    asked = []

    def work() -> None:
        with held_back() as held:
            asked.append(held.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]


class _Noted(Exception):
    pass


def test_a_signal_that_does_not_wake_the_main_thread_ends_its_wait() -> None:
    def noted(number: int, frame: FrameType | None) -> None:
        raise _Noted

    def another_threads() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        if not ended.wait(10 * LOOKS):
            future.set_result("late")

    future, ended = Future[str](), threading.Event()
    before = signal.signal(signal.SIGUSR1, noted)
    thread = threading.Timer(0.2, another_threads)
    try:
        thread.start()
        with pytest.raises(_Noted):
            result_of(future)
        assert not future.done()
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_results_and_errors_come_as_they_are() -> None:
    made, failed = Future[int](), Future[int]()
    made.set_result(3)
    failed.set_exception(KeyError("x"))
    assert result_of(made) == 3
    with pytest.raises(KeyError):
        result_of(failed)
