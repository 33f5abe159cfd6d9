"""Episodes of a client that knows HTTP alone, over the engine of a step."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest

from rlloop import Engine, SamplingParams
from rlloop.rollout.errors import EngineLost
from rlloop.tasks.episodes import EpisodeServer
from rlloop.tasks.verifiers_tasks import not_a_chain
from rlloop.types import Completion
from tests.support.tiny_models import tiny_qwen3


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_qwen3(64))


@pytest.fixture
def server():
    server = EpisodeServer("rlloop", 128, eos_token_ids=(2,))
    yield server
    server.close()


def body(prompt: list[int], seed: int) -> dict:
    sampling = {"max_tokens": 4, "seed": seed, "ignore_eos": True, "logprobs": 1, "stop_token_ids": [2]}
    return {"model": "rlloop", "token_ids": prompt, "sampling_params": sampling}


async def talk(server: EpisodeServer, name: str, seed: int, turns: int, pause: float = 0.0) -> list[int]:
    headers = {"Authorization": f"Bearer {server.key}", "X-Session-ID": name}
    ids = [3, 4, seed % 7]
    async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=60) as http:
        for _ in range(turns):
            answer = await http.post("/inference/v1/generate", json=body(ids, seed))
            answer.raise_for_status()
            ids = [*ids, *answer.json()["choices"][0]["token_ids"], 9]
            await asyncio.sleep(pause)
    return ids


def test_every_turn_is_the_engines_and_is_kept_by_its_session(server, engine):
    played = server.play(engine, [talk(server, f"s{n}", n, 1 + n % 3, 0.01 * n) for n in range(5)])
    for n, ids in enumerate(played):
        turns = server.turns(f"s{n}")
        assert len(turns) == 1 + n % 3
        assert not_a_chain(turns) is None
        assert [*turns[-1].prompt_ids, *turns[-1].token_ids, 9] == ids
        for turn in turns:
            params = SamplingParams(max_tokens=4, seed=n, ignore_eos=True)
            [alone] = Engine(tiny_qwen3(64)).generate([turn.prompt_ids], params)
            assert turn.sampling == params, "the model's own end was named again"
            assert alone.token_ids == turn.token_ids
            assert (alone.logprobs.view("i4") == turn.logprobs.view("i4")).all()
    assert server.turns("nobody") == []


def test_an_episode_that_fails_is_its_exception_and_the_others_go_on(server, engine):
    async def wrong() -> list[int]:
        raise ValueError("no such tool")

    one, other = server.play(engine, [wrong(), talk(server, "b", 1, 2)])
    assert isinstance(one, ValueError)
    assert isinstance(other, list)


def test_a_request_that_the_engine_cannot_take_fails_its_caller_alone(server, engine):
    async def large() -> int:
        headers = {"Authorization": f"Bearer {server.key}", "X-Session-ID": "a"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=60) as http:
            refused = await http.post("/inference/v1/generate", json=body([3] * 200, 1))
            unknown = await http.post("/inference/v1/generate", json=body([3], 1), headers={"X-Session-ID": ""})
            return refused.status_code + unknown.status_code

    codes, other = server.play(engine, [large(), talk(server, "b", 1, 1)])
    assert codes == 800
    assert isinstance(other, list)


def test_an_engine_that_fails_ends_the_step(server):
    class Broken:
        policy_version = 0

        def generate(self, prompts, sampling):
            raise EngineLost("it is gone")

    with pytest.raises(EngineLost, match="it is gone"):
        server.play(Broken(), [talk(server, "a", 1, 1)])  # pyright: ignore[reportArgumentType]


def turn(prompt: list[int], made: list[int]) -> Completion:
    values = np.zeros(len(made), np.float32)
    return Completion(prompt, made, values, values, 0, "stop", SamplingParams(max_tokens=8))


def test_what_is_no_chain_of_prefixes_is_told_by_turn_and_token():
    assert not_a_chain([turn([1, 2], [3]), turn([1, 2, 3, 4], [5]), turn([1, 2, 3, 4, 5, 6], [7])]) is None
    said = not_a_chain([turn([1, 2], [3, 4]), turn([1, 2, 3, 9, 5], [6])])
    assert said == ("turn 2 does not go on from the tokens of turn 1: token 3 is 9 and was 4; no chain of prefixes")
    assert "it is not longer" in (not_a_chain([turn([1, 2], [3]), turn([1, 2, 3], [4])]) or "")
