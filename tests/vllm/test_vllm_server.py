"""vLLM's own server around rlloop's model, behind the proxy: the trainer's bits over OpenAI's protocol, and, where it
follows a store of weights, as an engine of a fleet."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
import torch

from rlloop import Engine, Model, SamplingParams
from rlloop.cli.main import main
from rlloop.models import load_model, new_model, save_model
from rlloop.rollout.fleet.client import EngineClient, LoopThread, RemoteEngine
from rlloop.rollout.vllm.proxy import proxy_app
from rlloop.runs.folder import read_records
from rlloop.sync.live import named_weights, tensors_of
from rlloop.sync.manifest import load_or_make_key
from rlloop.sync.publisher import Publisher
from rlloop.sync.store import FolderStore
from rlloop.types import Completion
from tests.support.checkpoints import RECURRENT, make_checkpoint
from tests.support.fleet_run import TOKEN, outcome
from tests.support.tiny_run import make_model
from tests.support.vllm_families import FAMILIES, SMALL
from tests.support.vllm_server import KEY, proxy_of, vllm_of


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """Address and folder."""
    folder = tmp_path_factory.mktemp("served")
    make_model(folder)
    shutil.rmtree(folder / "model")
    save_model(new_model({**SMALL, **FAMILIES["mixture"]}, seed=0), folder / "model")
    with vllm_of(folder, "--config-format", "rlloop", "--load-format", "rlloop", "--dtype", "float32") as url:
        yield url, folder


def ask(url: str, path: str, **body: object) -> httpx.Response:
    """Through the proxy, which alone has vLLM's key."""

    async def asked() -> httpx.Response:
        upstream = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=120)
        async with (
            upstream,
            httpx.AsyncClient(transport=httpx.ASGITransport(proxy_app(upstream)), base_url="http://proxy") as client,
        ):
            return await client.post(path, json=body)

    return asyncio.run(asked())


def complete(url: str, **more: object) -> httpx.Response:
    shared = {"model": "policy", "max_tokens": 24, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    return ask(url, "/v1/completions", **(shared | more))


def test_completions_have_the_trainers_bits(served):
    url, folder = served
    engine = Engine(load_model(folder / "model"))
    for seed, (prompt, sampling) in enumerate(
        [([5, 6, 7], {"temperature": 1.0}), (list(range(10, 40)), {"temperature": 0.7, "top_p": 0.9, "top_k": 40})]
    ):
        answer = complete(url, prompt=prompt, seed=seed, **sampling)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        params = SamplingParams(max_tokens=24, ignore_eos=True, seed=seed, **sampling)
        [expected] = engine.generate([prompt], params)
        assert choice["token_ids"] == expected.token_ids
        made = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        assert made.tobytes() == expected.logprobs.tobytes()


def test_what_the_trainer_does_not_know_and_what_changes_a_server_is_refused(served):
    url, _ = served
    refused = complete(url, prompt=[5, 6], presence_penalty=0.5)
    assert refused.status_code == 400
    assert "presence_penalty" in refused.text
    for path in ("/collective_rpc", "/reset_prefix_cache", "/sleep", "/pause", "/init_weight_transfer_engine"):
        assert ask(url, path).status_code == 404


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_have_the_trainers_bits(tmp_path, family):
    """Their states are in vLLM's worker, whoever asks; requests overlap and come after others that have ended."""
    make_checkpoint(tmp_path / "model", family)
    options = ["--config-format", "rlloop", "--load-format", "rlloop", "--dtype", "float32"]
    prompts = [list(range(3 + at, 3 + at + length)) for at, length in enumerate((1, 30, 12, 40, 5, 9))]
    sampling = [SamplingParams(max_tokens=24, ignore_eos=True, seed=at) for at in range(len(prompts))]
    expected = Engine(load_model(tmp_path / "model")).generate(prompts, sampling)
    options += ["--no-enable-prefix-caching", "--max-num-batched-tokens", "32"]
    with vllm_of(tmp_path, *options) as url, ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda at: complete(url, prompt=prompts[at], seed=at, temperature=1.0), range(len(prompts)))
        for answer, whole in zip(answers, expected, strict=True):
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            assert choice["token_ids"] == whole.token_ids
            made = np.array(choice["logprobs"]["token_logprobs"], np.float32)
            assert made.tobytes() == whole.logprobs.tobytes()


class Line(NamedTuple):
    """A trainer's end, and an engine of its fleet that is a vLLM server."""

    folder: Path
    url: str
    upstream: str
    remote: RemoteEngine
    client: httpx.Client

    def publish(self, model: Model) -> int:
        """The model's weights, as the next version."""
        publisher = Publisher(FolderStore(self.folder / "weights"), load_or_make_key(self.folder / "key"), "run")
        step = 0 if publisher.last is None else publisher.last.step + 1
        tensors, aliases = tensors_of(named_weights(model).items())
        publisher.publish(tensors, step, aliases=aliases)
        return step


@pytest.fixture(scope="module")
def line(served) -> Iterator[Line]:
    url, folder = served
    proxy = proxy_of(folder, url)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        with (
            RemoteEngine(proxy.url, token=TOKEN, timeout=240) as remote,
            httpx.Client(base_url=proxy.url, headers=headers, timeout=240, trust_env=False) as client,
        ):
            yield Line(folder, proxy.url, url, remote, client)
    finally:
        proxy.kill()


def traffic() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[5, 6, 7], list(range(10, 40)), [*range(10, 40), 50], [9]]
    kinds = ({"temperature": 0.7, "top_k": 20}, {}, {"temperature": 0.0}, {"min_tokens": 9, "stop_token_ids": (7, 8)})
    return prompts, [SamplingParams(max_tokens=20, seed=seed, **kind) for seed, kind in enumerate(kinds)]


def bits(completions: list[Completion]) -> list[tuple]:
    return [
        (
            each.token_ids,
            each.logprobs.tobytes(),
            each.raw_logprobs.tobytes(),
            each.finish_reason,
            None if each.routed_experts is None else (each.routed_experts.dtype, each.routed_experts.tobytes()),
        )
        for each in completions
    ]


def changed(folder: Path, scale: float) -> Model:
    model = load_model(folder / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def test_versions_reach_its_live_weights_and_caches_go(line):
    prompts, sampling = traffic()
    for scale in (1.0, 1.25, 0.8):
        model = changed(line.folder, scale)
        version = line.publish(model)
        line.remote.set_version(version)
        expected = bits(Engine(model).generate(prompts, sampling))
        for _ in range(2):  # once more, from the prefix cache
            made = line.remote.generate(prompts, sampling)
            assert bits(made) == expected
            assert {each.policy_version for each in made} == {version}
    assert line.remote.fingerprint() == Engine(model).fingerprint()
    assert line.client.get("/health").json() == {"status": "ready", "version": version, "error": "", "paused": False}
    last = line.client.get("/rlloop/weights").json()["last"]
    assert (last["version"], last["wire_bytes"] > 0, last["pause_seconds"] > 0) == (version, True, True)

    body = {"model": "policy", "prompt": "w5 w6 w7", "max_tokens": 4, "seed": 1, "logprobs": 0}
    [choice] = line.client.post("/v1/completions", json=body | {"min_version": version}).json()["choices"]
    [expected] = Engine(model).generate([[5, 6, 7]], SamplingParams(max_tokens=4, seed=1))
    assert (choice["token_ids"], choice["policy_version"]) == (expected.token_ids, version)
    assert line.client.post("/v1/completions", json=body | {"min_version": version + 1}).status_code == 409


def test_nothing_of_vllms_own_is_reached_and_nothing_without_the_token(line):
    for path in ("/collective_rpc", "/pause", "/resume", "/update_weights", "/reset_prefix_cache", "/abort_requests",
                 "/update_weight_version", "/sleep"):  # fmt: skip
        assert line.client.post(path, json={}).status_code == 404, path
    assert line.client.post("/tokenize", json={"model": "policy", "prompt": "w5 w6"}).json()["tokens"] == [5, 6]
    for path in ("/rlloop/pause", "/rlloop/generate", "/v1/completions", "/v1/chat/completions", "/tokenize",
                 "/inference/v1/generate"):  # fmt: skip
        assert httpx.post(line.url + path, trust_env=False).status_code == 401


def test_weights_that_changed_behind_its_back_are_refused_and_brought_again(line):
    model = changed(line.folder, 1.1)
    line.remote.set_version(line.publish(model))
    prompts, sampling = traffic()
    expected = bits(line.remote.generate(prompts, sampling))
    other = httpx.post(f"{line.upstream}/update_weight_version", json={"new_version": "another"}, trust_env=False)
    assert other.status_code == 200
    thread = LoopThread("another client")
    client = EngineClient(line.url, token=TOKEN)
    with pytest.raises(Exception, match="has version -1") as refused:
        thread.run(client.generate(prompts, sampling))
    assert not refused.value.passed
    thread.run(client.close())
    thread.close()
    assert bits(line.remote.generate(prompts, sampling)) == expected


def waiting(line: Line) -> float:
    lines = line.client.get("/metrics").text.splitlines()
    return next(float(each.split()[1]) for each in lines if each.startswith("rlloop_requests_waiting "))


def test_it_pauses(line):
    line.remote.set_version(line.publish(changed(line.folder, 1.05)))
    prompts = [[5, 6, 7], [9], [11, 12]] * 12  # more than run at once, so that a slow machine's pause comes in time
    lengths = enumerate((60, 2, 61) * 12)
    sampling = [SamplingParams(max_tokens=length, seed=seed, ignore_eos=True) for seed, length in lengths]
    expected = line.remote.generate(prompts, sampling)

    def post(path: str) -> dict:
        reply = line.client.post(path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    with ThreadPoolExecutor(1) as pool:
        for mode in ("keep", "abort"):
            answer = pool.submit(line.remote.generate, prompts, sampling)
            while waiting(line) < 3:
                assert not answer.done(), "all were made before the first look at what waits"
                time.sleep(0.001)
            assert post(f"/rlloop/pause?mode={mode}")["paused"]
            if mode == "keep":
                time.sleep(0.1)
                held = httpx.get(f"{line.upstream}/is_paused", trust_env=False).json()
                assert held == {"is_paused": True}
                assert not answer.done()
            post("/rlloop/resume")
            made = answer.result(60)
            for part, whole in zip(made, expected, strict=True):
                count = len(part.token_ids)
                assert part.finish_reason == ("abort" if count < len(whole.token_ids) else "length")
                assert part.token_ids == whole.token_ids[:count]
                assert part.raw_logprobs.tobytes() == whole.raw_logprobs[:count].tobytes()
                rows = None if part.routed_experts is None else len(part.routed_experts)
                assert rows == (len(part.prompt_ids) + count - 1 if count else None)
            if mode == "keep":
                assert bits(made) == bits(expected)
    assert bits(line.remote.generate(prompts, sampling)) == bits(expected)


def test_a_run_over_regions_is_the_local_run_bit_for_bit(line, monkeypatch):
    monkeypatch.chdir(line.folder)
    monkeypatch.syspath_prepend(line.folder)
    monkeypatch.setenv("RLLOOP_TOKEN", TOKEN)
    shared = ["model.path=model", "reward._target_=learnable.reward", "trainer.num_steps=2", "trainer.lr=1e-2",
              "rollout.num_prompts=4", "rollout.group_size=4", "eval.num_draws=8"]  # fmt: skip
    fleet = ["fleet=regions", "fleet.store=weights", "fleet.signing_key=key", "fleet.heartbeat=0.2",
             f'+fleet.engines.eu=["{line.url}"]']  # fmt: skip
    Path("regions").mkdir()
    Path("regions/fleet.json").write_text('{"run_id": "run"}')  # whose versions the engine follows since it began
    for run, more in (("local", []), ("regions", fleet)):
        assert main(["train", "--config-name", "countdown", f"run.dir={run}", *shared, *more]) == 0
    assert outcome(line.folder / "regions") == outcome(line.folder / "local")
    for record in list(read_records(Path("regions/metrics.jsonl")))[1:]:
        assert record["parity/tokens_different"] == record["parity/k3"] == record["parity/router_different"] == 0
