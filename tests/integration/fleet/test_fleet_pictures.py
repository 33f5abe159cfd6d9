"""Prompts with pictures to engines over HTTP: a local engine's bits, every refusal by name, and a run over a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from rlloop import Engine, ModelInput, SamplingParams, load_model
from rlloop.audit import Extent, verify
from rlloop.dashboard.live import Dashboard
from rlloop.dashboard.server import make_app
from rlloop.errors import ConfigError
from rlloop.inputs import Image
from rlloop.models.vision_processor import ImageProcessor
from rlloop.recipes.images.warm_start import warm_started
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet import wire
from rlloop.rollout.fleet.client import EngineClient, RemoteEngine
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.membership import Canary, PoolSettings
from rlloop.rollout.fleet.pool import http_pool
from rlloop.rollout.fleet.trainer_server import trainer_app
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from rlloop.sync.store import FolderStore
from rlloop.types import Completion
from rlloop.web.server import BackgroundServer, Listen
from tests.support.command import Command
from tests.support.fleet_run import TOKEN, Fleet, Server, events, outcome
from tests.support.image_models import image, prompt_with
from tests.support.latent_model import longest, same
from tests.support.pictures import make_reading_model, picture
from tests.support.tiny_run import make_model
from tests.support.waiting import until

TEXT = [20, 21, 22]
FAST = PoolSettings(heartbeat=0.1, timeout=2.0, patience=60.0, settle=20.0, calls=2, chunk=4, hedge=0.01)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    make_reading_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def servers(place: Path) -> Iterator[list[Server]]:
    """Two engines in processes of their own; the second steps by few tokens, so that it is slow."""
    started = [Server(place, "engine", "--model", "model", "--threads", "1", *more)
               for more in ([], ["--max-batch-tokens", "4"])]  # fmt: skip
    yield started
    for server in started:
        server.kill()


def prompts_of(folder: Path) -> list[ModelInput | list[int]]:
    """Of files, of numbers, two at once, in a reply, and text; a group has one picture."""
    processor = ImageProcessor.of_folder(folder)
    first, second, third = processor.images([picture(seed=1), picture(16, 24, 2), picture(seed=3)])
    numbers = Image(third.patches, third.height, third.width)
    group = [prompt_with(TEXT, first, [place]) for place in (5, 6, 7)]
    talk = prompt_with(TEXT, first).followed_by([5, 6]).followed_by(prompt_with([7], second, [8]))
    return [*group, talk, prompt_with(numbers, TEXT, second), TEXT, prompt_with(second)]


def check(mine: list[Completion], theirs: list[Completion]) -> None:
    for here, there in zip(mine, theirs, strict=True):
        assert same(here, there)
        assert (here.prompt_ids, here.sampling) == (there.prompt_ids, there.sampling)
        mine_, theirs_ = here.model_input, there.model_input
        assert (mine_ is None) == (theirs_ is None)
        if mine_ is not None and theirs_ is not None:
            assert (mine_.contents, mine_.images) == (theirs_.contents, theirs_.images)  # with what people look at


def seeded(count: int) -> list[SamplingParams]:
    return [longest(seed=seed, temperature=0.7, top_p=0.9) for seed in range(count)]


def test_a_process_elsewhere_has_a_local_engines_bits(place: Path, servers: list[Server], monkeypatch) -> None:
    prompts = prompts_of(place / "model")
    local = Engine(load_model(place / "model")).generate(prompts, seeded(len(prompts)))
    [other] = ImageProcessor.of_folder(place / "model").images([picture(seed=9)])
    blind = Engine(load_model(place / "model")).generate([prompt_with(TEXT, other, [5])], seeded(1))
    assert not same(local[0], blind[0])  # a picture changes the bits
    with RemoteEngine(servers[0].url, token=TOKEN) as remote:
        check(local, remote.generate(prompts, seeded(len(prompts))))
        monkeypatch.setattr(wire, "MOST_PICTURES", 1)
        check(local, remote.generate(prompts, seeded(len(prompts))))


def test_a_pool_repeats_prompts_with_pictures_on_other_engines(
    place: Path, servers: list[Server], tmp_path: Path
) -> None:
    prompts = prompts_of(place / "model") * 4
    local = Engine(load_model(place / "model")).generate(prompts, seeded(len(prompts)))
    noted: list[Any] = []
    pool = http_pool(FAST, noted.append, token=TOKEN)
    with contextlib.closing(pool):
        for index, server in enumerate(servers):
            pool.join(server.url, f"r{index}")
        pool.serve_version(0, Canary(prompts[:2], seeded(2)))
        check(local, pool.generate(prompts, seeded(len(prompts)), 0))
        trainer = TestClient(trainer_app(FolderStore(tmp_path), pool, lambda _: False, lambda content, step: {}))
        ask = wire.Ask(sampling=seeded(len(prompts)), **wire.pack_prompts(prompts))  # as another trainer sends it
        answer = trainer.post("/fleet/generate", content=msgspec.msgpack.encode(ask)).content
        for here, there in zip(local, wire.unpack(ask, wire.decode(answer, wire.Answer, "it")), strict=True):
            assert same(here, there)
    assert [event for event in noted if event["event"] == "hedged"]
    for server in servers:
        until(lambda url=server.url: state(url).load == 0)


def state(url: str) -> wire.EngineState:
    answer = httpx.get(f"{url}/rlloop/state", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False)
    return msgspec.msgpack.decode(answer.content, type=wire.EngineState)


def test_a_request_that_is_cancelled_ends_in_all_its_parts(place: Path, servers: list[Server], monkeypatch) -> None:
    monkeypatch.setattr(wire, "MOST_PICTURES", 1)
    url, prompts = servers[1].url, prompts_of(place / "model")

    async def ask() -> None:
        client = EngineClient(url, token=TOKEN)
        call = asyncio.create_task(client.generate(prompts, [longest(max_tokens=200)] * len(prompts)))
        while not call.done() and (await client.state()).load < len(prompts):
            await asyncio.sleep(0.001)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.close()

    before = tokens_of(url)
    asyncio.run(ask())
    until(lambda: state(url).load == 0)
    assert tokens_of(url) - before < len(prompts) * 100


def tokens_of(url: str) -> float:
    text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False).text
    return float(next(line for line in text.splitlines() if line.startswith("rlloop_made_tokens_total")).split()[1])


def test_prompts_with_one_picture_stay_together(place: Path) -> None:
    processor = ImageProcessor.of_folder(place / "model")
    one, other = processor.images([picture(seed=1), picture(seed=2)])
    pool = http_pool(replace(FAST, chunk=2), lambda event: None)
    with contextlib.closing(pool):
        prompts = [prompt_with(each, TEXT * 4, [end]) for end in (5, 6) for each in (one, other)]
        assert prompts[0].token_ids == prompts[1].token_ids != prompts[2].token_ids
        batch: Any = type("Batch", (), {"prompts": prompts})()
        chunks = pool._cut(batch)
        assert [chunk.indices for chunk in chunks] == [[0, 2], [1, 3]]
        assert chunks[0].prefix != chunks[1].prefix


def test_an_engine_refuses_pictures_that_it_cannot_read(place: Path, tmp_path: Path, servers: list[Server]) -> None:
    processor = ImageProcessor.of_folder(place / "model")
    [own] = processor.images([picture()])
    [foreign] = replace(processor, mean=(0.1, 0.2, 0.3)).images([picture()])
    prompt = prompt_with(TEXT, own)
    with RemoteEngine(servers[0].url, token=TOKEN) as remote:
        for bad, message in (
            (prompt_with(TEXT, foreign), "It was made by another model's processor"),
            (prompt_with(TEXT, image(4, 6, numbers=24)), "another model's processor|patches of 24 numbers"),
            (ModelInput.with_images([7] * len(prompt), range(4, 10), [own]), "token 7 is inside an image's span"),
            (ModelInput(prompt.token_ids), "no image stands there"),
        ):
            with pytest.raises(ConfigError, match=message):
                remote.generate([bad], longest())
    ask = wire.Ask(sampling=[longest()], **wire.pack_prompts([prompt]))
    ask.pictures[0].digest, ask.contents = "0" * 64, [[(4, 10, "0" * 64)]]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"{servers[0].url}/rlloop/generate", content=msgspec.msgpack.encode(ask), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")
    assert "picture 000000000000 is another one" in answer.json()["error"]["message"]

    make_model(tmp_path)
    noted: list[Any] = []
    service = EngineService(Engine(load_model(tmp_path / "model")))
    server = BackgroundServer(EngineServer(service, name="text", images=None).app, Listen())
    pool = http_pool(FAST, noted.append)
    pool.join(server.url, "eu")
    pool.serve_version(0, None)
    with pytest.raises(ConfigError, match="a prompt has an image, and Qwen3ForCausalLM reads text only"):
        pool.generate([TEXT, prompt], [longest(max_tokens=2)] * 2, 0)
    assert len(pool.generate([TEXT], [longest(max_tokens=2)], 0)) == 1  # the engine still serves
    assert [event["event"] for event in noted].count("reissued") == 1
    pool.close()
    server.close()
    service.close()


def test_answers_are_kept_without_their_pictures(place: Path) -> None:
    service = EngineService(Engine(load_model(place / "model")))
    server = EngineServer(service, name="one")
    background = BackgroundServer(server.app, Listen())
    with RemoteEngine(background.url) as remote:
        [made] = remote.generate([prompts_of(place / "model")[0]], longest())
    assert made.model_input is not None
    [(_, future)] = server._remembered.values()
    assert [completion.model_input for completion in future.result()] == [None]

    service.pause()
    server._remembered.clear()
    asyncio.run(leave(server, background.url, prompts_of(place / "model")[:2]))
    [(_, future)] = server._remembered.values()
    service.resume()
    until(lambda: [completion.model_input for completion in future.result()] == [None, None])
    background.close()
    service.close()


async def leave(server: EngineServer, url: str, prompts: list[ModelInput | list[int]]) -> None:
    """Asks, and is gone before the answer, without cancelling it."""
    ask = wire.Ask(sampling=seeded(len(prompts)), **wire.pack_prompts(prompts))
    async with httpx.AsyncClient(base_url=url, headers={"Idempotency-Key": "left"}, trust_env=False) as client:
        call = asyncio.create_task(client.post("/rlloop/generate", content=msgspec.msgpack.encode(ask)))
        while not server._remembered:
            await asyncio.sleep(0.001)
        call.cancel()


def test_of_a_client_that_leaves_while_its_request_is_read_nothing_is_begun() -> None:
    service: Any = Mock(fingerprint=dict, longest=64, version=0)
    server = EngineServer(service, name="one")
    body = msgspec.msgpack.encode(wire.Ask([TEXT], seeded(1)))
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        return messages.pop()

    headers = [(b"idempotency-key", b"left")]
    asked = Request({"type": "http", "method": "POST", "path": "/rlloop/generate", "headers": headers}, receive)
    assert asyncio.run(server._generate(asked)).status_code == 499
    service.submit.assert_not_called()


def test_a_part_that_fails_ends_the_others_before_its_error_is_raised(monkeypatch) -> None:
    """Their keys, too: the engine is told before the client closes."""
    monkeypatch.setattr(wire, "MOST_PICTURES", 1)
    monkeypatch.setattr("rlloop.rollout.fleet.client.PROMPTS_PER_CALL", 2)
    begun, ended, told = list[str](), list[str](), list[str]()

    async def send(method: str, path: str, **request: Any) -> bytes:
        begun.append(request["headers"]["Idempotency-Key"])
        if len(begun) == 4:
            raise ConfigError("the last is refused")
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            await asyncio.sleep(0.01)  # a connection is being closed
            ended.append(begun[len(ended)])

    async def forget(key: str) -> None:
        told.append(key)

    with RemoteEngine("http://engine") as remote:
        monkeypatch.setattr(remote._client, "_send", send)
        monkeypatch.setattr(remote._client, "_forget", forget)
        with pytest.raises(ConfigError, match="the last is refused"):
            remote.generate([prompt_with(TEXT, image(2, 2, seed)) for seed in range(4)], longest())
        assert len(ended) == 3
    assert sorted(told) == sorted(begun[:3])


# ---------------------------------------------------------------------------------------------- runs


SMALL = [
    "rollout.num_prompts=2", "rollout.group_size=3", "trainer.num_steps=2", "eval.num_draws=2", "checkpoint.every=1",
    "model.path=model", "parity.mode=require",
]  # fmt: skip


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Its engines' model is the recipe's, after a few steps of supervised training."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("run")
        patch.setenv("RLLOOP_TOKEN", TOKEN)
        patch.setattr("rlloop.cache.cache_root", lambda: folder)
        fleet = Fleet(folder)
        shutil.rmtree(folder / "model")
        shutil.copytree(warm_started(4, 2), folder / "model")
        yield fleet
        fleet.close()


TALKS = ["task._target_=tests.support.picture_talk.PicturedTalks", "seed=3"]
TALKS += ["reward._target_=rlloop.rewards.episode.episode_reward"]


@pytest.mark.parametrize(("name", "own"), [("prompts", []), ("talks", TALKS)])
def test_a_run_over_a_fleet_is_the_local_one(fleet: Fleet, tmp_path: Path, name: str, own: list[str]) -> None:
    def train(folder: str, *more: str) -> Path:
        command = ["train", "--config-name", "images", f"run.dir={folder}", *SMALL, *own, *more]
        process = Command(*command, cwd=fleet.place)
        if more:
            engines = [fleet.engine(region, None, "--any-run") for region in ("eu", "us")]
            until(lambda: len(events(fleet.place / folder, "serving")) >= len(engines), process)
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output
        return fleet.place / folder

    local, run = train(f"{name}-local"), train(name, *fleet.settings())
    assert outcome(run) == outcome(local)
    for record in list(read_records(run / "metrics.jsonl"))[1:]:
        assert record["parity/tokens"] > 0
        for key in ("tokens_different", "k3", "prompt_tokens_different", "k3_text", "k3_image", "redrawn_different"):
            assert record[f"parity/{key}"] == 0, key
    assert events(run, "quarantined") == events(run, "reissued") == []
    rows = [row for file in rollout_files(run) for row in read_rollouts(file)]
    assert all(row["images"] and row["outcome"] == "trained" for row in rows)
    assert {row["origin"].partition("/")[0] for row in rows} <= {"eu", "us"}
    files = [{file.name: file.read_bytes() for file in (each / "images").glob("*.png")} for each in (run, local)]
    assert files[0] == files[1] != {}
    checks = verify(run, Extent(rescored=8))
    assert all(not check.problems for check in checks), checks
    with contextlib.closing(Dashboard(fleet.place, cache=tmp_path)) as dashboard:
        client = TestClient(make_app(dashboard))
        shown = client.get("/api/rollout", params={"run": name, "step": 1, "line": 0}).json()["images"]
        drawn = client.get("/api/image", params={"run": name, "digest": shown[0]["digest"]})
        assert drawn.headers["content-type"] == "image/png"
