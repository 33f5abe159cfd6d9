"""`rlloop serve engine --layout`: one engine over two processes, which follows a store as one process would, and whose
requests name adapters."""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rlloop import Engine, SamplingParams, load_adapter
from rlloop.cli import serve
from rlloop.cli.main import main
from rlloop.cli.serve_ranks import check_layout, layout_of
from rlloop.errors import ConfigError, RlloopError
from rlloop.models import load_model, weights
from rlloop.parallel.layout import Layout
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
from tests.support.waiting import until

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}  # fmt: skip
PROMPTS = [[5, 6, 7], list(range(10, 40)), [9]]
SAMPLING = [
    SamplingParams(max_tokens=12, seed=1),
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=12, seed=2, top_k=9),
]


def bits(made: list[Completion]) -> list[tuple]:
    return [(each.token_ids, each.logprobs.tobytes(), each.raw_logprobs.tobytes()) for each in made]


@pytest.mark.slow
@pytest.mark.parametrize(("own", "layout"), [({}, ["tp=2"]), (MIXTURE, ["tp=2", "ep=2"]), (MIXTURE, ["pp=2"])])
def test_two_processes_serve_one_engine_and_follow_a_store(
    tmp_path: Path, own: dict[str, Any], layout: list[str]
) -> None:
    make_model(tmp_path, **own)
    private = new_key(tmp_path / "key")
    model, publisher = load_model(tmp_path / "model"), Publisher(FolderStore(tmp_path / "weights"), private, "run")
    load_adapter(model, adapter_folder(tmp_path / "poet", model, 1, targets=("all-linear", "lm_head")), "poet")
    named = ["poet", None, "poet"]
    server = Server(
        tmp_path, "engine", "--model", "model", "--layout", *layout, "--threads", "1", "--store", "weights",
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
def test_a_signal_to_all_ranks_ends_them_in_order(tmp_path: Path) -> None:
    """As `systemctl stop` sends it."""
    make_model(tmp_path)
    server = Server(tmp_path, "engine", "--model", "model", "--layout", "tp=2", "--threads", "1")
    try:
        with RemoteEngine(server.url, token=TOKEN) as remote:
            remote.generate(PROMPTS, SAMPLING)
        for pid in (*spawned_by(server.process.pid), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        said, _ = server.process.communicate(timeout=60)
        assert (server.process.returncode, said) == (128 + signal.SIGTERM, "")
    finally:
        server.kill()


def spawned_by(pid: int) -> list[int]:
    """Processes that Python started there."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True], ids=["another", "the first"])
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path, first: bool) -> None:
    make_model(tmp_path)
    server = Server(tmp_path, "engine", "--model", "model", "--layout", "tp=2", "--threads", "1")
    try:
        assert server.url
        [rank] = spawned_by(server.process.pid)
        os.kill(server.process.pid if first else rank, signal.SIGKILL)
        said, _ = server.process.communicate(timeout=60)
        assert server.process.returncode == (-signal.SIGKILL if first else 1)
        assert first or "rlloop: rank 1 of 2 ended by signal 9, and with it this engine" in said
        until(lambda: not Path(f"/proc/{rank}").exists())
    finally:
        server.kill()


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_and_ends_the_others(tmp_path: Path) -> None:
    """Not so an engine that is idle, or paused, mostly with a request in flight; or that was stopped as a whole."""
    make_model(tmp_path, max_position_embeddings=4096)
    options = ["--model", "model", "--layout", "tp=2", "--threads", "1"]
    server = Server(tmp_path, "engine", *options)
    try:
        with RemoteEngine(server.url, token=TOKEN) as remote:  # compiles what is not compiled yet
            remote.generate(PROMPTS, SAMPLING)
    finally:
        server.kill()
    server = Server(tmp_path, "engine", *options, "--rank-timeout", "8")
    try:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with RemoteEngine(server.url, token=TOKEN) as remote, ThreadPoolExecutor(1) as pool:
            made = bits(remote.generate(PROMPTS, SAMPLING))
            [rank] = spawned_by(server.process.pid)
            long = [SamplingParams(max_tokens=900, seed=1, ignore_eos=True)]
            waits = pool.submit(remote.generate, [[5, 6, 7]], long)
            time.sleep(0.3)
            httpx.post(f"{server.url}/rlloop/pause?mode=keep", headers=headers, timeout=60).raise_for_status()
            time.sleep(10)
            httpx.post(f"{server.url}/rlloop/resume", headers=headers).raise_for_status()
            time.sleep(0.3)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in (server.process.pid, rank):
                    os.kill(pid, number)
                time.sleep(10 if number == signal.SIGSTOP else 0)
            waits.result(120)
            assert bits(remote.generate(PROMPTS, SAMPLING)) == made
            os.kill(rank, signal.SIGSTOP)
            with pytest.raises(RlloopError):
                remote.generate(PROMPTS, SAMPLING)
        said, _ = server.process.communicate(timeout=60)
        assert server.process.returncode == 1
        assert "rlloop: rank 1 of 2: no progress for 8 s (--rank-timeout). Of all ranks: rank 0 waits in" in said
        until(lambda: not Path(f"/proc/{rank}").exists())
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


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            "cp=2",
            r"--layout is 'cp=2'; it must be .*: tp=N \(each product\), ep=N \(the experts\), pp=N \(the layers\)",
        ),
        ("tp", "it must be"),
        ("pp=two", "it must be"),
        ("tp=0", "it must be"),
        ("ep=3", "--layout has ep=3 and tp=1, and .* give it tp=3 ep=3$"),
        ("tp=4 ep=3 pp=2", "give it tp=4 pp=2 ep=2$"),
    ],
)
def test_other_layouts_are_refused(layout: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layout_of(layout.split())


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "2"])
def test_other_times_without_progress_are_refused_before_ranks_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], seconds: str
) -> None:
    make_model(tmp_path)
    command = ["serve", "engine", "--model", str(tmp_path / "model"), "--layout", "tp=2", f"--rank-timeout={seconds}"]
    assert main(command) == 2
    assert f"--rank-timeout is {seconds}; it must be seconds, at least 5" in capfd.readouterr().err


def test_degrees_of_a_layout() -> None:
    assert layout_of(["tp=4", "ep=2", "pp=3"]) == Layout(tp=4, ep=2, pp=3)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("tp=99", "--layout tp=99 does not fit: tp is 99, and ranks split layers of 2 heads; give it tp=2"),
        ("tp=7 pp=2", "tp is 7, and ranks split layers of 2 heads; give it tp=2 pp=2"),
        ("pp=4", "pp is 4, and there are 2 layers; give it pp=2"),
        ("tp=2 ep=2", "ep is 2, and there are no experts; give it tp=2"),
    ],
)
def test_what_the_model_does_not_have_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], layout: str, said: str
) -> None:
    make_model(tmp_path)
    monkeypatch.setattr(serve, "engine_over", lambda *_: pytest.fail("ranks were started"))
    command = ["serve", "engine", "--model", str(tmp_path / "model"), "--layout"]
    assert main([*command, *layout.split()]) == 2
    error = capfd.readouterr().err
    assert f"{said}\n" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("layout", "gpus", "said"),
    [
        ("tp=2", 1, "--layout tp=2 does not fit: there are 2 ranks, more than this machine's GPUs (1); leave it out"),
        ("tp=2 pp=2", 3, "there are 4 ranks, more than this machine's GPUs (3); give it tp=2"),
        ("tp=4 ep=4", 2, "(2); give it tp=2 ep=2"),
    ],
)
def test_more_ranks_than_gpus_are_refused_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, gpus: int, said: str
) -> None:
    make_model(tmp_path, num_attention_heads=4, **MIXTURE)
    monkeypatch.setattr(weights, "usable_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError) as refused:
        check_layout(layout_of(layout.split()), Namespace(model=tmp_path / "model", device="cuda"))
    assert str(refused.value).endswith(said)
