"""The server for other frameworks' trainers, over a pool that is not there."""

import asyncio
import json
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save
from starlette.testclient import TestClient

from rlloop.errors import ConfigError
from rlloop.rollout.fleet import wire
from rlloop.rollout.fleet.external_trainer import Publishing
from rlloop.rollout.fleet.trainer_server import trainer_app
from rlloop.sync.bundle import MemoryStore
from rlloop.types import Completion, SamplingParams
from tests.support.weight_history import KEY

ONE = SamplingParams(max_tokens=1, seed=1)


class Pool:
    version, longest = 3, 100

    def __init__(self, answers: bool = True) -> None:
        self.begun: list[Future] = []
        self.answers = answers

    def begin(self, prompts, sampling, version, session=None):
        self.begun.append(Future())
        none = np.zeros(1, np.float32)
        if self.answers:
            made = [Completion(list(prompt), [7], none, none, version, "length", ONE) for prompt in prompts]
            self.begun[-1].set_result(made)
        return self.begun[-1]

    def serve_version(self, version, _):
        return {}

    def take_metrics(self):
        return {}


def app_of(pool):
    return trainer_app(MemoryStore(), pool, lambda sequence: False, publish=lambda content, step: {})


@pytest.mark.parametrize(
    ("params", "model", "status", "kind"),
    [
        ({}, "rlloop", 200, None),
        ({"policy_version": 3}, "rlloop", 200, None),
        ({"min_version": 2}, "rlloop", 200, None),
        ({"policy_version": 99}, "rlloop", 409, "version_behind"),
        ({"min_version": 4}, "rlloop", 409, "version_behind"),
        ({"policy_version": 2}, "rlloop", 409, "version_passed"),
        ({}, "poet", 404, "model_not_found"),
    ],
)
def test_samples_are_of_the_version_and_the_model_that_are_asked_for(params, model, status, kind):
    body = {"model": model, "token_ids": [1, 2], "sampling_params": {"max_tokens": 1, **params}}
    answer = TestClient(app_of(Pool())).post("/inference/v1/generate", json=body)
    assert answer.status_code == status
    assert kind is None or answer.json()["error"]["code"] == kind


def test_an_adapter_is_refused():
    ask = wire.Ask(prompts=[[1, 2]], sampling=[ONE], adapters=["poet"])
    answer = TestClient(app_of(Pool())).post("/fleet/generate", content=msgspec.msgpack.encode(ask))
    assert (answer.status_code, "adapter" in answer.text) == (400, True)


def test_a_client_that_leaves_stops_its_generation():
    pool, came = Pool(answers=False), iter([])
    body = json.dumps({"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}).encode()
    came = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])
    sent = []

    async def receive():
        return next(came)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/inference/v1/generate", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    asyncio.run(asyncio.wait_for(app_of(pool)(scope, receive, send), 20))
    assert [future.cancelled() for future in pool.begun] == [True]
    assert sent[0]["status"] == 499


def test_other_weights_under_the_same_step_are_refused():
    publish = Publishing(MemoryStore(), KEY, "run", 100).bound_to(Pool())
    one, other = (save({"w": np.full(4, value, np.float32)}) for value in (1, 2))
    publish(one, 0)
    publish(one, 0)
    with pytest.raises(ConfigError, match=r"step 0 was published with other weights.*larger one"):
        publish(other, 0)
    publish(other, 1)
