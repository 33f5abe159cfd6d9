"""Token ids both ways over HTTP, as verifiers' training client asks for them: an engine's server, and a fleet's."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rlloop import Engine, SamplingParams, load_model
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.trainer_server import trainer_app
from rlloop.sync.store import FolderStore
from rlloop.web.server import BackgroundServer, Listen
from tests.support.checkpoints import make_checkpoint
from tests.support.router_fleet import OneEngine, fleet
from tests.support.tiny_models import tiny_qwen3

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    make_checkpoint(folder, "qwen3_moe")
    return load_model(folder)


@pytest.fixture(scope="module")
def http(model):
    service = EngineService(Engine(model))
    background = BackgroundServer(EngineServer(service, name="one").app, Listen())
    with httpx.Client(base_url=background.url, trust_env=False, timeout=60) as client:
        yield client
    background.close()
    service.close()


def ask(http: httpx.Client, prompt: list[int] = PROMPT, headers: Any = None, **sampling: Any) -> dict[str, Any]:
    answer = http.post(
        "/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling}, headers=headers
    )
    answer.raise_for_status()
    return answer.json()


def test_tokens_logprobs_and_experts_are_the_engines_own(http, model):
    made = ask(http, max_tokens=9, seed=5, logprobs=1, ignore_eos=True)
    local = Engine(model).generate([PROMPT], SamplingParams(max_tokens=9, seed=5, ignore_eos=True))[0]
    [choice] = made["choices"]
    assert choice["token_ids"] == local.token_ids
    assert choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{id}" for id in local.token_ids]
    assert np.array([each["logprob"] for each in content], np.float32).tobytes() == local.logprobs.tobytes()
    experts = choice["routed_experts"]
    rows = np.frombuffer(base64.b64decode(experts["data"]), experts["dtype"]).reshape(experts["shape"])
    assert (rows == local.routed_experts).all()
    assert made["request_id"]


def test_experts_begin_where_the_caller_has_none_yet(http):
    whole, rest = (
        ask(http, max_tokens=3, seed=1, routed_experts_prompt_start=start)["choices"][0]["routed_experts"]
        for start in (0, 4)
    )
    assert (rest["start"], rest["shape"][0]) == (4, whole["shape"][0] - 4)
    assert base64.b64decode(whole["data"]).endswith(base64.b64decode(rest["data"]))


def test_a_turn_goes_on_from_the_ids_of_the_last(http):
    first = ask(http, max_tokens=4, seed=2, ignore_eos=True)["choices"][0]["token_ids"]
    longer = [*PROMPT, *first, 7, 8]
    again = ask(http, longer, max_tokens=4, seed=2, ignore_eos=True, return_token_ids=True)
    assert again["prompt_token_ids"] == longer


def test_without_a_limit_it_has_the_room_that_there_is_and_models_say_how_much(http):
    longest = http.get("/v1/models").json()["data"][0]["max_model_len"]
    made = ask(http, [3] * (longest - 6), ignore_eos=True)
    assert len(made["choices"][0]["token_ids"]) == 6


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"token_ids": [3]}, "sampling_params is None; it must be an object"),
        ({"token_ids": [3], "sampling_params": {}, "features": {"image": 1}}, "features is given"),
        ({"token_ids": [3], "sampling_params": {"presence_penalty": 1.0}}, "presence_penalty is 1.0"),
        ({"token_ids": [3], "sampling_params": {"temprature": 1.0}}, "temprature"),
        ({"token_ids": [3], "sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
        ({"token_ids": "text", "sampling_params": {}}, "token_ids"),
        ({"token_ids": [3], "sampling_params": {"routed_experts_prompt_start": 1}}, "it must be from 0 to 0"),
        ({"token_ids": [3] * 5000, "sampling_params": {"max_tokens": 4}}, "has room for"),
        ({"token_ids": [3], "sampling_params": {"seed": 1}, "seed": 2}, "seed stands beside sampling_params and in it"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(http, body, says):
    answer = http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_a_fleet_keeps_a_session_at_the_engine_that_has_its_prefix(tmp_path: Path):
    engines = OneEngine(), OneEngine(), OneEngine()
    local = Engine(tiny_qwen3(64))
    with fleet(*engines) as (pool, _):
        pool.serve_version(0, None)
        app = trainer_app(FolderStore(tmp_path), pool, lambda version: True, publish=lambda content, step: {})
        server = BackgroundServer(app, Listen())
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
            assert http.get("/v1/models").json()["data"][0]["max_model_len"] == local.longest
            for session in range(4):
                ids, before = [3 + session, 7, 9], [engine.made() for engine in engines]
                for _ in range(5):
                    made = ask(
                        http, ids, {"X-Session-ID": f"talk {session}"}, max_tokens=4, seed=session, ignore_eos=True
                    )
                    again = local.generate([ids], SamplingParams(max_tokens=4, seed=session, ignore_eos=True))[0]
                    assert made["choices"][0]["token_ids"] == again.token_ids
                    ids = [*ids, *again.token_ids, 5]
                served = [engine.made() - count for engine, count in zip(engines, before, strict=True)]
                assert sorted(served) == [0, 0, 5]
            refused = http.post(
                "/inference/v1/generate", json={"token_ids": [1], "sampling_params": {}, "stream": True}
            )
            assert refused.status_code == 400
        server.close()
