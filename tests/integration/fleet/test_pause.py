"""Pausing an engine behind a service: what is in flight is finished, ended or kept, and nothing else is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import httpx
import pytest

from rlloop import Engine, SamplingParams
from rlloop.rollout.engine.service import Busy, EngineService
from rlloop.rollout.fleet import wire
from rlloop.rollout.fleet.client import RemoteEngine
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.types import Completion
from rlloop.web.server import BackgroundServer, Listen
from tests.support.stepper import Stepper
from tests.support.tiny_models import tiny_qwen3
from tests.support.waiting import until

T = TypeVar("T")

PROMPTS = [[5, 6, 7], [9], list(range(10, 40))]
SAMPLING = [SamplingParams(max_tokens=length, seed=length, ignore_eos=True) for length in (30, 3, 40)]


@pytest.fixture(scope="module")
def engine() -> Stepper:
    return Stepper(Engine(tiny_qwen3(64)))


@pytest.fixture
def service(engine) -> Iterator[EngineService]:
    engine.may()
    service = EngineService(engine)
    yield service
    service.close()


def bits(completions: list[Completion]) -> list[tuple[list[int], bytes]]:
    return [(each.token_ids, each.logprobs.tobytes()) for each in completions]


def started(engine: Stepper, submit: Callable[[], T]) -> T:
    """What `submit` returns: requests of which the shortest is finished and the others are not, until more steps are
    allowed."""
    before = engine.stats().made_tokens
    engine.may(3)
    answer = submit()
    until(lambda: engine.stats().made_tokens == before + 9)
    return answer


def is_still(engine: Stepper) -> bool:
    before = engine.stats()
    time.sleep(0.05)
    return engine.stats() == before


def test_kept_requests_go_on_as_if_nothing_had_been(engine, service):
    expected = bits(service.submit(PROMPTS, SAMPLING).result(60))
    answer = started(engine, lambda: service.submit(PROMPTS, SAMPLING))
    service.pause("keep")
    engine.may()
    assert is_still(engine)
    later = service.submit(PROMPTS[:1], SAMPLING[:1])
    assert is_still(engine)
    assert not answer.done()
    service.resume()
    assert bits(answer.result(60)) == expected
    assert bits(later.result(60)) == expected[:1]


def test_aborted_requests_leave_what_there_is(engine, service):
    expected = service.submit(PROMPTS, SAMPLING).result(60)
    answer = started(engine, lambda: service.submit(PROMPTS, SAMPLING))
    service.pause("abort")
    engine.may()
    made = answer.result(0)
    assert [each.finish_reason for each in made] == ["abort", "length", "abort"]
    for part, whole in zip(made, expected, strict=True):
        assert 0 < len(part.token_ids) <= len(whole.token_ids)
        assert part.token_ids == whole.token_ids[: len(part.token_ids)]
    service.change_weights(lambda: engine.set_version(engine.policy_version + 1))  # nothing is in flight
    service.resume()
    assert bits(service.submit(PROMPTS, SAMPLING).result(60)) == bits(expected)


def test_waiting_finishes_what_is_in_flight_and_admits_nothing(engine, service):
    answer = started(engine, lambda: service.submit(PROMPTS, SAMPLING))
    service.pause("keep")
    engine.may()
    service.pause("wait")  # kept ones, too
    assert [each.finish_reason for each in answer.result(0)] == ["length"] * 3
    later = service.submit(PROMPTS, SAMPLING)
    assert is_still(engine)
    assert not later.done()
    service.resume()
    assert len(later.result(60)) == 3


def test_over_http(engine, service):
    token = "a token of some length"
    expected = bits(service.submit(PROMPTS, SAMPLING).result(240))
    engine_server = EngineServer(service, name="one")
    server = BackgroundServer(engine_server.app, Listen(token=token))
    headers = {"Authorization": f"Bearer {token}"}
    with (
        RemoteEngine(server.url, token=token) as remote,
        httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client,
        ThreadPoolExecutor(2) as pool,
    ):

        def begun() -> Future[list[Completion]]:
            return started(engine, lambda: pool.submit(remote.generate, PROMPTS, SAMPLING))

        def post(path: str) -> tuple[int, dict]:
            reply = client.post(path)
            return reply.status_code, reply.json()

        kept = begun()
        assert post("/rlloop/pause?mode=keep") == (200, {"paused": True, "load": 3})
        engine.may()
        assert is_still(engine)
        engine.may(0)
        assert client.get("/health").json()["paused"]
        assert "rlloop_paused 1.0" in client.get("/metrics").text
        waiting = pool.submit(post, "/rlloop/pause")  # the default: until what is in flight is finished
        until(lambda: engine_server._pausing)
        status, refused = post("/rlloop/pause?mode=abort")
        assert (status, refused["error"]["code"]) == (409, "pausing")
        assert post("/rlloop/resume")[0] == 409
        engine.may()
        assert waiting.result(60) == (200, {"paused": True, "load": 0})
        assert bits(kept.result(60)) == expected
        assert post("/rlloop/resume") == (200, {"paused": False, "load": 0})
        ended = begun()
        assert post("/rlloop/pause?mode=abort") == (200, {"paused": True, "load": 0})
        engine.may()
        assert [each.finish_reason for each in ended.result(60)] == ["abort", "length", "abort"]
        assert post("/rlloop/resume")[0] == 200
        assert bits(remote.generate(PROMPTS, SAMPLING)) == expected
        assert post("/rlloop/pause?mode=soon")[0] == 400
    server.close()


def test_an_aborted_request_without_a_token_crosses_the_wire(engine):
    id = engine.add_request([5, 6], SamplingParams(max_tokens=4, seed=1))
    [made] = [wire.pack(engine.abort(id))]
    ask = wire.Ask([[5, 6]], [SamplingParams(max_tokens=4, seed=1)])
    [back] = wire.unpack(ask, wire.Answer([made], "boot"))
    assert (back.token_ids, len(back.logprobs), back.finish_reason) == ([], 0, "abort")
    made.finish_reason = "length"
    with pytest.raises(wire.BadAnswer, match="0 tokens"):
        wire.unpack(ask, wire.Answer([made], "boot"))


class Broken:
    """An engine that cannot end what it began, or begin what it does not know."""

    def __init__(self, engine: Stepper) -> None:
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def add_request(self, prompt_ids, sampling, **more):
        if prompt_ids == [1]:
            raise TypeError("odd")
        return self.engine.add_request(prompt_ids, sampling, **more)

    def abort(self, request_id):
        raise RuntimeError("its core is gone")


def test_an_engine_that_breaks_tells_everybody_who_waits(caplog):
    engine = Stepper(Engine(tiny_qwen3(64)))
    service = EngineService(Broken(engine))
    with pytest.raises(TypeError, match="odd"):  # one caller's alone
        service.submit([[1]], SAMPLING[:1]).result(240)
    answer = started(engine, lambda: service.submit(PROMPTS, SAMPLING))
    with pytest.raises(Busy, match="RuntimeError its core is gone"):
        service.pause("abort")
    with pytest.raises(Busy, match="its core is gone"):
        answer.result(240)
    with pytest.raises(Busy, match="its core is gone"):
        service.submit(PROMPTS, SAMPLING)
    assert service.version == -1
    assert "the engine failed" in caplog.text
    service.close()


def test_an_engine_that_breaks_has_answered_the_calls_of_the_same_round():
    engine = Stepper(Engine(tiny_qwen3(64)))
    service = EngineService(Broken(engine))
    answer, call = started(engine, lambda: service.submit(PROMPTS, SAMPLING)), Future()
    with service._changed:
        service.cancel(answer)
        service._calls.append((lambda: "loaded", call))
    assert call.result(240) == "loaded"
    service.close()
