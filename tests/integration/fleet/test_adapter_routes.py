"""Adapters over HTTP: named as models by OpenAI's client, by rlloop's own, and loaded by vLLM's routes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from rlloop import Engine, SamplingParams, load_adapter, load_model, token_logprobs
from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.models import Model
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.client import RemoteEngine
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.text import tokenizer_of
from rlloop.web.server import BackgroundServer, Listen
from tests.support.adapters import adapter_folder
from tests.support.openai_model import write_model
from tests.support.traffic import bits

PROMPT = [3, 4, 5]
SAMPLING = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)


@dataclass
class Running:
    model: Model  # of another process, as it were: it has the adapters too
    root: Path
    service: EngineService
    url: str
    client: openai.OpenAI
    http: httpx.Client

    def alone(self, name: str | None, prompt: list[int] = PROMPT) -> Any:
        return Engine(self.model).generate([prompt], SAMPLING, adapters=name)[0]

    def served(self, name: str, **more: Any) -> Any:
        return self.client.completions.create(
            model=name, prompt=PROMPT, max_tokens=8, seed=3, logprobs=0, **more,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip

    def load(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/load_lora_adapter", json=body)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapters")
    folder, root = write_model(place / "model"), place / "root"
    model = load_model(folder)
    for seed, name in enumerate(("poet", "cook")):
        load_adapter(model, adapter_folder(root / name, model, seed), name)
    adapter_folder(root / "wide", model, 2, rank=40)
    service = EngineService(Engine(load_model(folder), adapter_rank=32), max_waiting=64)
    service.load_adapter("poet", root / "poet")
    server = EngineServer(service, name="one", tokenizer=tokenizer_of(folder), adapter_root=root)
    background = BackgroundServer(server.app, Listen())
    client = openai.OpenAI(base_url=f"{background.url}/v1", api_key="none", max_retries=0)
    http = httpx.Client(base_url=background.url, trust_env=False)
    yield Running(model, root, service, background.url, client, http)
    client.close()
    http.close()
    background.close()
    service.close()


def test_a_model_field_names_an_adapter_and_gets_its_bits(running):
    for name in ("poet", "rlloop"):
        [choice] = running.served(name).choices
        alone = running.alone(None if name == "rlloop" else name)
        assert choice.token_ids == alone.token_ids
        assert np.array(choice.logprobs.token_logprobs, np.float32).tobytes() == alone.logprobs.tobytes()
    assert running.alone("poet").logprobs.tobytes() != running.alone(None).logprobs.tobytes()
    reply = running.http.post(
        "/inference/v1/generate",
        json={
            "model": "poet",
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 8, "seed": 3, "ignore_eos": True},
        },
    )
    assert reply.json()["choices"][0]["token_ids"] == running.alone("poet").token_ids


def test_a_prompt_is_scored_by_the_adapter(running):
    [choice] = running.client.completions.create(
        model="poet", prompt=[3, 4, 5, 6], max_tokens=0, echo=True, logprobs=0
    ).choices
    [expected] = token_logprobs(running.model, [([3], [4, 5, 6])], adapter="poet")
    assert np.array(choice.logprobs.token_logprobs[1:], np.float32).tobytes() == expected.detach().numpy().tobytes()


def test_the_exact_wire_has_an_adapter_for_each_prompt(running):
    running.load(lora_name="cook", lora_path="cook").raise_for_status()
    names = ["cook", None, "poet", "cook"]
    prompts = [[3, 4, 5 + index] for index in range(4)]
    with RemoteEngine(running.url) as engine:
        made = engine.generate(prompts, SAMPLING, adapters=names)
        alone = [running.alone(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
        assert [bits(each) for each in made] == [bits(each) for each in alone]
        with pytest.raises(ConfigError, match="no adapter is named 'baker'"):
            engine.generate([PROMPT], SAMPLING, adapters="baker")
    running.http.post("/v1/unload_lora_adapter", json={"lora_name": "cook"}).raise_for_status()


def test_adapters_are_listed_loaded_replaced_and_dropped(running):
    def names() -> list[str]:
        return [card.id for card in running.client.models.list()]

    assert names() == ["rlloop", "poet"]
    assert running.client.models.retrieve("poet").parent == "rlloop"
    with pytest.raises(openai.NotFoundError, match=r"model 'cook' is not served here; 'rlloop', 'poet' are"):
        running.served("cook")
    assert running.load(lora_name="cook", lora_path="cook").text.startswith(
        "Success: adapter 'cook' is loaded, version "
    )
    assert names() == ["rlloop", "cook", "poet"]
    before = running.client.models.retrieve("cook").version
    assert running.served("cook").choices[0].token_ids == running.alone("cook").token_ids
    assert running.load(lora_name="cook", lora_path="poet").status_code == 400
    running.load(lora_name="cook", lora_path="poet", load_inplace=True).raise_for_status()
    assert running.client.models.retrieve("cook").version == before + 1
    assert running.served("cook").choices[0].token_ids == running.alone("poet").token_ids
    running.http.post("/v1/unload_lora_adapter", json={"lora_name": "cook"}).raise_for_status()
    assert running.http.post("/v1/unload_lora_adapter", json={"lora_name": "cook"}).status_code == 404
    assert names() == ["rlloop", "poet"]


def test_an_adapter_comes_and_goes_while_requests_run_or_the_engine_is_paused(running):
    stream = running.client.completions.create(
        model="poet", prompt=PROMPT, max_tokens=300, seed=3, stream=True, extra_body={"ignore_eos": True}
    )
    events = iter(stream)
    next(events)
    running.load(lora_name="cook", lora_path="cook").raise_for_status()
    assert len(list(events)) > 1
    running.http.post("/rlloop/pause").raise_for_status()
    running.http.post("/v1/unload_lora_adapter", json={"lora_name": "cook"}).raise_for_status()
    running.http.post("/rlloop/resume").raise_for_status()


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"lora_name": "x", "lora_path": "../model"}, 404, "under the server's --adapter-root"),
        ({"lora_name": "x", "lora_path": "/etc"}, 404, "under the server's --adapter-root"),
        ({"lora_name": "x", "lora_path": "nowhere"}, 404, "under the server's --adapter-root"),
        ({"lora_name": "rlloop", "lora_path": "cook"}, 400, "the base model's own name"),
        ({"lora_name": "x", "lora_path": "wide"}, 400, "rank 40"),
        ({"lora_name": "x", "lora_path": "."}, 400, "adapter_config.json"),
        ({"lora_name": "x"}, 400, "lora_path"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(running, body, status, text):
    reply = running.load(**body)
    assert reply.status_code == status
    assert text in reply.json()["error"]["message"]
    assert running.service.adapters == {"poet": 1}


def test_no_client_may_load_where_no_folder_was_named(running):
    server = EngineServer(running.service, name="two")
    background = BackgroundServer(server.app, Listen())
    body = {"lora_name": "cook", "lora_path": str(running.root / "cook")}
    reply = httpx.post(f"{background.url}/v1/load_lora_adapter", json=body, trust_env=False)
    background.close()
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "adapters_not_loadable")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--adapter", "poet"], "--adapter is 'poet'; it must be NAME=FOLDER"),
        (["--adapter", "rlloop=x"], "of another name than the base's"),
        (["--adapter-root", "nowhere"], "--adapter-root nowhere is not a folder"),
    ],
)
def test_odd_options_of_the_server(running, option, message, capsys):
    assert main(["serve", "engine", "--model", str(running.root.parent / "model"), *option]) == 2
    assert message in capsys.readouterr().err
