"""A listener of an engine's service: what it hears, and what it may end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rlloop import Engine, SamplingParams, token_logprobs
from rlloop.errors import ConfigError
from rlloop.models import new_model
from rlloop.rollout.engine.service import EngineService
from rlloop.types import Completion, Part, PromptScores
from tests.support.doctored import MIXTURE

PROMPTS = [[5, 6, 7], [9], list(range(10, 40))]
SAMPLING = [SamplingParams(max_tokens=length, seed=length, ignore_eos=True) for length in (12, 3, 20)]


class Ear:
    def __init__(self, stops: dict[int, int] | None = None, fails: str = "") -> None:
        """`stops`: after how many tokens a request is to end. `fails`: in which call."""
        self.stops, self.fails = stops or {}, fails
        self.ids: dict[int, list[int]] = {}
        self.scores: dict[int, PromptScores] = {}
        self.done: dict[int, Completion] = {}
        self.begun = threading.Event()

    def scored(self, index: int, scores: PromptScores) -> None:
        assert not self.ids
        assert self.fails != "scored", "on purpose"
        self.scores[index] = scores
        self.begun.set()

    def made(self, index: int, part: Part) -> int | None:
        assert self.fails != "made", "on purpose"
        self.ids[index] = self.ids.get(index, []) + part.token_ids
        stop = self.stops.get(index)
        return stop if stop is not None and len(self.ids[index]) >= stop else None

    def finished(self, index: int, completion: Completion) -> None:
        assert self.fails != "finished", "on purpose"
        self.done[index] = completion


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(new_model({**MIXTURE, "vocab_size": 64, "max_position_embeddings": 256}, seed=0))


@pytest.fixture
def service(engine) -> Iterator[EngineService]:
    service = EngineService(engine)
    yield service
    service.close()
    assert service.load == 0
    assert not engine.has_work


def test_it_hears_every_token_once_and_may_end_a_request_early(engine, service):
    whole = Engine(engine.model).generate(PROMPTS, SAMPLING)
    ear = Ear({0: 5, 1: 3})
    made = service.submit(PROMPTS, SAMPLING, listener=ear).result(60)
    assert [len(each.token_ids) for each in made] == [5, 3, 20]
    assert [each.finish_reason for each in made] == ["stop", "stop", "length"]
    for index, (part, expected) in enumerate(zip(made, whole, strict=True)):
        count = len(part.token_ids)
        assert ear.ids[index] == part.token_ids == expected.token_ids[:count]
        assert ear.done[index] is part
        assert part.logprobs.tobytes() == expected.logprobs[:count].tobytes()
        assert part.routed_experts is not None
        assert expected.routed_experts is not None
        read = len(PROMPTS[index]) + count - 1
        assert part.routed_experts.tobytes() == expected.routed_experts[:read].tobytes()


def test_prompts_are_scored_first_by_the_same_weights(engine, service):
    ear = Ear()
    prompts = [PROMPTS[2], PROMPTS[2], PROMPTS[1]]
    answer = service.submit(prompts, SAMPLING, listener=ear, score=3)
    assert ear.begun.wait(60)
    service.change_weights(lambda: engine.set_version(engine.policy_version + 1))  # waits for both
    assert {made.policy_version for made in answer.result(0)} == {engine.policy_version - 1}
    [expected] = token_logprobs(engine.model, [(PROMPTS[2][:1], PROMPTS[2][1:])])
    assert ear.scores[0] is ear.scores[1]
    assert ear.scores[0].logprobs.tobytes() == expected.detach().numpy().tobytes()
    beside = ear.scores[0].alternatives
    assert beside is not None
    assert beside.token_ids.shape == (len(PROMPTS[2]) - 1, 3)
    assert beside.logprobs.tobytes() == beside.raw_logprobs.tobytes()
    for id, found in zip(beside.token_ids[4], beside.logprobs[4], strict=True):
        [trained] = token_logprobs(engine.model, [(PROMPTS[2][:5], [int(id)])])
        assert np.float32(trained.item()).tobytes() == found.tobytes()
    assert len(ear.scores[2].logprobs) == 0


def test_scores_alone_make_no_token(engine, service):
    before, ear = engine.stats(), Ear()
    made = service.submit(PROMPTS, SAMPLING, listener=ear, score=0, only_score=True).result(60)
    assert [each.token_ids for each in made] == [[], [], []]
    assert [len(ear.scores[index].logprobs) for index in range(3)] == [2, 0, 29]
    assert engine.stats() == before
    for wrong, message in (([64], "ids are 0 to 63"), ([], "a prompt is empty"), ([5] * 5000, "the model has")):
        with pytest.raises(ConfigError, match=message):
            service.submit([wrong], SAMPLING[:1], listener=ear, score=0, only_score=True).result(60)


@pytest.mark.parametrize("call", ["scored", "made", "finished"])
def test_its_own_error_ends_its_call_alone(service, call):
    others = service.submit(PROMPTS, SAMPLING)
    broken = service.submit(PROMPTS, SAMPLING, listener=Ear(fails=call), score=0)
    with pytest.raises(AssertionError, match="on purpose"):
        broken.result(60)
    assert len(others.result(60)) == 3


def test_a_pause_that_aborts_ends_what_is_to_be_scored_too(engine, service):
    service.pause()
    scoring = service.submit(
        [PROMPTS[2]] + [[id] * 9 for id in range(5, 25)], [SAMPLING[0]] * 21, listener=Ear(), score=0
    )
    service.resume()
    service.pause("abort")
    service.resume()
    error = scoring.exception(60)
    assert error is None or "ended in a pause" in str(error)
    assert len(service.submit(PROMPTS, SAMPLING).result(60)) == 3
