"""Turns of an engine that is closed while another thread's batch waits for it."""

from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from rlloop.loop.turns import OverlappedTurns
from rlloop.types import SamplingParams


class Overlapping:
    def __init__(self):
        self.answers = list[Future[Any]]()

    def begin(self, prompts, sampling):
        self.answers.append(Future())
        return self.answers[-1]


def test_turns_that_their_engine_cancels_end_with_that_error():
    engine: Any = Overlapping()
    turns = OverlappedTurns(engine)
    turn = turns.submit([1, 2], SamplingParams(max_tokens=1))
    turns.work()
    engine.answers[0].cancel()
    with pytest.raises(CancelledError):
        turn.result(0)


def test_turns_that_are_closed_end_without_an_outcome():
    engine: Any = Overlapping()
    turns = OverlappedTurns(engine)
    turn = turns.submit([1, 2], SamplingParams(max_tokens=1))
    turns.work()
    turns.close()
    assert engine.answers[0].cancelled()
    assert not turn.done()
