"""`rlloop serve engine --layout tp=2`: one engine over two processes, which follows a store as one process would,
and whose requests name adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlloop import Engine, SamplingParams, load_adapter
from rlloop.cli import serve
from rlloop.cli.main import main
from rlloop.cli.serve_ranks import layout_of
from rlloop.errors import ConfigError
from rlloop.models import load_model, weights
from rlloop.rollout.engine.leader import LeadingEngine
from rlloop.rollout.fleet.client import RemoteEngine
from rlloop.sync.live import named_weights, tensors_of
from rlloop.sync.manifest import new_key
from rlloop.sync.publisher import Publisher
from rlloop.sync.store import FolderStore
from rlloop.types import Completion
from tests.support.adapters import adapter_folder
from tests.support.fleet_run import TOKEN, Server
from tests.support.tiny_run import make_model

PROMPTS = [[5, 6, 7], list(range(10, 40)), [9]]
SAMPLING = [
    SamplingParams(max_tokens=12, seed=1),
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=12, seed=2, top_k=9),
]


def bits(made: list[Completion]) -> list[tuple]:
    return [(each.token_ids, each.logprobs.tobytes(), each.raw_logprobs.tobytes()) for each in made]


@pytest.mark.slow
def test_two_processes_serve_one_engine_and_follow_a_store(tmp_path: Path) -> None:
    make_model(tmp_path)
    private = new_key(tmp_path / "key")
    model, publisher = load_model(tmp_path / "model"), Publisher(FolderStore(tmp_path / "weights"), private, "run")
    load_adapter(model, adapter_folder(tmp_path / "poet", model, 1, targets=("all-linear", "lm_head")), "poet")
    named = ["poet", None, "poet"]
    server = Server(
        tmp_path, "engine", "--model", "model", "--layout", "tp=2", "--threads", "1", "--store", "weights",
        "--public-key", "key.pub", "--interval", "0.2", "--adapter", "poet=poet",
    )  # fmt: skip
    try:
        with RemoteEngine(server.url, token=TOKEN) as remote:
            for version, scale in enumerate((1.0, 1.25)):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(scale)
                tensors, aliases = tensors_of(named_weights(model).items())
                publisher.publish(tensors, version, aliases=aliases)
                remote.set_version(version)
                expected = bits(Engine(model).generate(PROMPTS, SAMPLING))
                assert bits(remote.generate(PROMPTS, SAMPLING)) == expected
                assert bits(remote.generate(PROMPTS[1:], SAMPLING[1:])) == expected[1:]  # from the prefix cache
                adapted = bits(Engine(model).generate(PROMPTS, SAMPLING, adapters=named))
                assert bits(remote.generate(PROMPTS, SAMPLING, adapters=named)) == adapted != expected
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--no-warm-up"], ["--layout", "tp=2"]], ids=" ".join)
def test_the_usual_steps_are_recorded_before_a_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    make_model(tmp_path)
    kind, said = LeadingEngine if "--layout" in options else Engine, list[str]()
    monkeypatch.setattr(kind, "prepare", lambda engine: 7)  # on a CPU there are none
    monkeypatch.setattr(serve, "_serve_member", lambda *_: said.append(capsys.readouterr().out))
    assert main(["serve", "engine", "--model", str(tmp_path / "model"), "--threads", "1", *options]) == 0
    assert said == ["" if "--no-warm-up" in options else "rlloop engine: 7 steps recorded as CUDA graphs\n"]


def test_other_layouts_are_refused() -> None:
    for text in ("pp=2", "tp", "tp=two"):
        with pytest.raises(ConfigError, match="tp=N"):
            layout_of([text])
    assert layout_of(["tp=3"]).tp == 3


def test_more_ranks_than_heads_or_gpus_are_refused_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path)
    monkeypatch.setattr(serve, "engine_over", lambda *_: pytest.fail("ranks were started"))
    command = ["serve", "engine", "--model", str(tmp_path / "model")]
    assert main([*command, "--layout", "tp=99"]) == 2
    said = capfd.readouterr().err
    assert "--layout is tp=99, more than the model's heads in a layer (" in said
    assert "Traceback" not in said
    monkeypatch.setattr(weights, "usable_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main([*command, "--layout", "tp=2"]) == 2
    assert "tp=2, more than this machine's GPUs (1); give it tp=1 at most" in capfd.readouterr().err
