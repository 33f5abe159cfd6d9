"""Episodes of a client that knows HTTP alone, over the engine of a step."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import httpx
import numpy as np
import pytest

from rlloop import Engine, SamplingParams
from rlloop.errors import RlloopError
from rlloop.loop.joining import joined
from rlloop.rollout.errors import EngineLost
from rlloop.tasks.episodes import Episodes, EpisodeServer
from rlloop.tasks.verifiers_tasks import not_a_chain
from rlloop.types import Completion
from tests.support.tiny_models import tiny_qwen3
from tests.support.waiting import until


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_qwen3(64))


@pytest.fixture(scope="module")
def server():
    server = EpisodeServer("rlloop", 128, eos_token_ids=(2,))
    yield server
    server.close()


@pytest.fixture
def episodes(server):
    return server.episodes()


def client(episodes: Episodes, server: EpisodeServer, session: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {server.key}", "X-Session-ID": session}
    return httpx.AsyncClient(base_url=episodes.url, headers=headers, trust_env=False, timeout=60)


def body(prompt: list[int], seed: int) -> dict:
    sampling = {"max_tokens": 4, "seed": seed, "ignore_eos": True, "logprobs": 1, "stop_token_ids": [2]}
    return {"model": "rlloop", "token_ids": prompt, "sampling_params": sampling}


def play(episodes: Episodes, engine, *work):
    running = [episodes.begin(each) for each in work]
    episodes.advance(engine)
    return [each.exception() or each.result() for each in running]


async def talk(
    episodes: Episodes, server: EpisodeServer, name: str, seed: int, turns: int, pause: float = 0.0
) -> list[int]:
    ids = [3, 4, seed % 7]
    async with client(episodes, server, name) as http:
        for _ in range(turns):
            answer = await http.post("inference/v1/generate", json=body(ids, seed))
            answer.raise_for_status()
            ids = [*ids, *answer.json()["choices"][0]["token_ids"], 9]
            await asyncio.sleep(pause)
    return ids


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_every_turn_is_the_engines_and_is_kept_by_its_session(server, engine, pieces):
    episodes = server.episodes(pieces)
    played = play(episodes, engine, *[talk(episodes, server, f"s{n}", n, 1 + n % 3, 0.01 * n) for n in range(5)])
    for n, ids in enumerate(played):
        turns = episodes.turns(f"s{n}")
        assert len(turns) == 1 + n % 3
        assert not_a_chain(turns) is None
        assert [*turns[-1].prompt_ids, *turns[-1].token_ids, 9] == ids
        for turn in turns:
            params = SamplingParams(max_tokens=4, seed=n, ignore_eos=True)
            [alone] = Engine(tiny_qwen3(64)).generate([turn.prompt_ids], params)
            assert turn.sampling == params, "the model's own end was named again"
            assert alone.token_ids == turn.token_ids
            assert (alone.logprobs.view("i4") == turn.logprobs.view("i4")).all()
    assert episodes.turns("nobody") == []


def test_episodes_go_on_with_other_weights_from_where_they_were_cut(server):
    """The first episode ends before its turn is whole: the second one's is cut, and goes on with the next version."""
    episodes, over = server.episodes(1), threading.Event()

    class Waiting(Engine):
        def step(self):
            assert not episodes.versions("long") or over.wait(60)  # for the first episode to see the second one's token
            return super().step()

    async def short() -> None:
        while not episodes.versions("long"):
            await asyncio.sleep(0.001)

    async def limited() -> list[int]:
        async with episodes.limit(30.0):
            return await talk(episodes, server, "long", 3, 2)

    engine, ended, going = Waiting(tiny_qwen3(64)), episodes.begin(short()), episodes.begin(limited())
    ended.add_done_callback(lambda _: over.set())  # behind the callback that tells `advance`
    episodes.advance(engine, ended.done)
    assert not going.done()
    cut = len(episodes.versions("long"))
    assert 1 <= cut < 4
    engine.set_version(7)
    episodes.advance(engine)
    first, second = episodes.turns("long")
    assert first.version_spans == ((0, cut), (cut, 4))
    assert first.versions == (0, 7)
    assert first.token_versions.tolist() == [0] * cut + [7] * (4 - cut)
    assert second.versions is None
    assert second.policy_version == 7
    whole = joined([first, second], "stop")
    assert whole.turns == ((0, 4), (5, 9))
    assert whole.versions == (0, 7, 7)
    assert whole.token_versions.tolist() == [0] * cut + [7] * (8 - cut)
    assert going.result()[3:] == [*first.token_ids, 9, *second.token_ids, 9]


def test_a_time_limit_stands_still_while_nothing_advances(server, engine):
    episodes = server.episodes()

    async def limited() -> None:
        async with episodes.limit(60.0):
            await asyncio.Event().wait()

    done = episodes.begin(asyncio.sleep(0))
    waiting = episodes.begin(limited())
    episodes.advance(engine, done.done)
    until(lambda: [limit.when() for limit in list(episodes._limits)] == [None])
    [limit] = episodes._limits
    assert 0.0 < episodes._limits[limit] <= 60.0
    episodes._limits[limit] = 0.01  # nearly over
    episodes.advance(engine)
    assert isinstance(waiting.exception(), TimeoutError)


def test_an_episode_that_fails_is_its_exception_and_the_others_go_on(server, episodes, engine):
    async def wrong() -> list[int]:
        raise ValueError("no such tool")

    one, other = play(episodes, engine, wrong(), talk(episodes, server, "b", 1, 2))
    assert isinstance(one, ValueError)
    assert isinstance(other, list)


def test_a_request_that_the_engine_cannot_take_fails_its_caller_alone(server, episodes, engine):
    async def large() -> int:
        async with client(episodes, server, "a") as http:
            refused = await http.post("inference/v1/generate", json=body([3] * 200, 1))
            unknown = await http.post("inference/v1/generate", json=body([3], 1), headers={"X-Session-ID": ""})
            return refused.status_code + unknown.status_code

    codes, other = play(episodes, engine, large(), talk(episodes, server, "b", 1, 1))
    assert codes == 800
    assert isinstance(other, list)


def test_an_engine_that_fails_ends_the_step(server, episodes):
    class Broken:
        policy_version = 0

        def generate(self, prompts, sampling):
            raise EngineLost("it is gone")

    with pytest.raises(EngineLost, match="it is gone"):
        play(episodes, Broken(), talk(episodes, server, "a", 1, 1))


def test_the_end_of_the_server_ends_a_batch_that_waits_for_its_tools(engine):
    server, begun = EpisodeServer("rlloop", 128), threading.Event()
    episodes = server.episodes()

    async def endless() -> None:
        begun.set()
        await asyncio.Event().wait()

    def advance() -> None:
        with suppress(RlloopError):
            episodes.advance(engine)

    running, batch = episodes.begin(endless()), threading.Thread(target=advance, daemon=True)
    batch.start()
    assert begun.wait(60)
    server.close()
    batch.join(60)
    assert not batch.is_alive()
    assert running.cancelled()


def turn(prompt: list[int], made: list[int]) -> Completion:
    values = np.zeros(len(made), np.float32)
    return Completion(prompt, made, values, values, 0, "stop", SamplingParams(max_tokens=8))


def test_what_is_no_chain_of_prefixes_is_told_by_turn_and_token():
    assert not_a_chain([turn([1, 2], [3]), turn([1, 2, 3, 4], [5]), turn([1, 2, 3, 4, 5, 6], [7])]) is None
    said = not_a_chain([turn([1, 2], [3, 4]), turn([1, 2, 3, 9, 5], [6])])
    assert said == ("turn 2 does not go on from the tokens of turn 1: token 3 is 9 and was 4; no chain of prefixes")
    assert "it is not longer" in (not_a_chain([turn([1, 2], [3]), turn([1, 2, 3], [4])]) or "")
