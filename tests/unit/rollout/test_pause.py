"""Pausing an engine behind a service: what is in flight is finished, ended or kept, and nothing else is computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from rlloop import Engine, SamplingParams
from rlloop.rollout.service import EngineService
from rlloop.types import Completion
from tests.parity.models import tiny_qwen3

PROMPTS = [[5, 6, 7], [9], list(range(10, 40))]
SAMPLING = [SamplingParams(max_tokens=length, seed=length, ignore_eos=True) for length in (30, 3, 40)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_qwen3(64))


@pytest.fixture
def service(engine) -> Iterator[EngineService]:
    service = EngineService(engine)
    yield service
    service.close()


def bits(completions: list[Completion]) -> list[tuple[list[int], bytes]]:
    return [(each.token_ids, each.logprobs.tobytes()) for each in completions]


def started(engine: Engine, service: EngineService) -> Future[list[Completion]]:
    """Requests of which the shortest is finished and the others are not."""
    before = engine.stats().made_tokens
    service.pause()
    answer = service.submit(PROMPTS, SAMPLING)
    service.resume()
    while engine.stats().made_tokens < before + 9:
        time.sleep(0.001)
    return answer


def is_still(engine: Engine) -> bool:
    before = engine.stats()
    time.sleep(0.05)
    return engine.stats() == before


def test_kept_requests_go_on_as_if_nothing_had_been(engine, service):
    expected = bits(service.submit(PROMPTS, SAMPLING).result(60))
    answer = started(engine, service)
    service.pause("keep")
    assert is_still(engine)
    later = service.submit(PROMPTS[:1], SAMPLING[:1])
    assert is_still(engine)
    assert not answer.done()
    service.resume()
    assert bits(answer.result(60)) == expected
    assert bits(later.result(60)) == expected[:1]


def test_aborted_requests_leave_what_there_is(engine, service):
    expected = service.submit(PROMPTS, SAMPLING).result(60)
    answer = started(engine, service)
    service.pause("abort")
    made = answer.result(0)
    assert [each.finish_reason for each in made] == ["abort", "length", "abort"]
    for part, whole in zip(made, expected, strict=True):
        assert 0 < len(part.token_ids) <= len(whole.token_ids)
        assert part.token_ids == whole.token_ids[: len(part.token_ids)]
    service.change_weights(lambda: engine.set_version(engine.policy_version + 1))  # nothing is in flight
    service.resume()
    assert bits(service.submit(PROMPTS, SAMPLING).result(60)) == bits(expected)


def test_waiting_finishes_what_is_in_flight_and_admits_nothing(engine, service):
    answer = started(engine, service)
    service.pause("keep")
    service.pause("wait")  # kept ones, too
    assert [each.finish_reason for each in answer.result(0)] == ["length"] * 3
    later = service.submit(PROMPTS, SAMPLING)
    assert is_still(engine)
    assert not later.done()
    service.resume()
    assert len(later.result(60)) == 3
