"""fleet=regions with everything going wrong: the run is the local one, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from rlloop.audit import Extent, verify
from rlloop.rollout.fleet.client import RemoteEngine
from rlloop.rollout.fleet.wire import EngineState
from rlloop.runs.folder import read_rollouts, rollout_files
from rlloop.sync.manifest import Head
from rlloop.sync.store import FolderStore
from rlloop.types import SamplingParams
from tests.support.fleet_run import TOKEN, Fleet, Server, events, outcome
from tests.support.tiny_run import held, steps, train
from tests.support.waiting import until

STEPS = ["trainer.num_steps=9", "scoring.timeout=240"]


def finish(process) -> str:
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return output


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.setenv("RLLOOP_TOKEN", TOKEN)
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def flip_bits(cache: Path) -> int:
    """One bit of everything that the relay keeps."""
    files = list(cache.glob("blobs/??/*"))
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 16
        file.write_bytes(content)
    return len(files)


def cut_short(run: Path, *engines: Server) -> bool:
    """End what is in flight, if anything is: a step samples for a tenth of a second. Whether that was seen."""
    token = {"Authorization": f"Bearer {TOKEN}"}
    for engine in engines:
        with httpx.Client(base_url=f"{engine.url}/rlloop/", headers=token, timeout=60, trust_env=False) as client:
            for _ in range(100):
                state = msgspec.msgpack.decode(client.get("state").content, type=EngineState)
                if state.load:
                    client.post("pause?mode=abort").raise_for_status()
                    client.post("resume").raise_for_status()
                    break
    return any("cut short" in event["why"] or "a pause" in event["why"] for event in events(run, "reissued"))


def test_killed_stopped_damaged_and_restarted_it_is_the_run_without_faults(fleet, tmp_path):
    local = train(tmp_path / "local", *STEPS)
    relays = {region: fleet.relay(region) for region in ("eu", "us")}
    slow = ["--max-batch-tokens", "1"]  # so that something is in flight long enough to be ended
    eu, us = (fleet.engine(region, relay, *slow) for region, relay in relays.items())
    finish(local)

    run = tmp_path / "run"
    hold = tmp_path / "hold"
    hold.touch()  # until both engines are there
    process = train(run, *STEPS, *fleet.settings())
    until(lambda: len(events(run, "joined")) == 2, process)
    hold.write_text("run 6")  # it is not over before all of this has happened
    until(lambda: steps(run) >= 1, process)
    until(lambda: cut_short(run, eu, us), process)  # somebody ends what is in flight
    until(lambda: steps(run) >= 3, process)
    eu.signal(signal.SIGKILL)  # an engine dies
    until(lambda: steps(run) >= 4, process)
    hold.write_text("")
    assert flip_bits(tmp_path / "cache_eu") > 2  # its region's cache is damaged,
    late = fleet.engine("eu", relays["eu"])  # and an engine joins through it
    until(lambda: late.url and len({event["engine"] for event in events(run, "serving")}) == 3, process)
    relays["us"].signal(signal.SIGSTOP)  # a relay hangs
    us.signal(signal.SIGSTOP)  # and an engine
    hold.write_text("run 8")
    until(lambda: any("us/" in event["engine"] for event in events(run, "lost")), process)
    os.kill(process.pid, signal.SIGKILL)  # the trainer dies
    process.communicate()
    hold.unlink()
    us.signal(signal.SIGCONT)
    process = train(run, *STEPS, *fleet.settings())  # and comes back
    relays["us"].signal(signal.SIGCONT)
    finish(process)

    assert outcome(run) == outcome(tmp_path / "local")
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [folder / "checkpoints/step_9" / name for folder in (run, tmp_path / "local")]
        assert files[0].read_bytes() == files[1].read_bytes()
    checks = {check.name: check for check in verify(run, Extent(rescored=32))}
    assert all(not check.problems for check in checks.values()), checks
    assert checks["re-scored"].summary.startswith("16 completions")
    rows = [row for file in rollout_files(run) for row in read_rollouts(file)]
    assert {row["finish_reason"] for row in rows if row["outcome"] == "trained"} <= {"stop", "length"}
    assert events(run, "quarantined") == []
    made = {origin for event in events(run, "serving") if (origin := event["engine"])}
    assert len(made) == 3
    assert Head.decode((run / "weights" / "latest").read_bytes()).term == 2


def test_a_second_interrupt_ends_a_run_that_waits_for_engines(fleet, tmp_path):
    process = train(tmp_path / "run", *STEPS, *fleet.settings(), "fleet.patience=250")
    until(lambda: FolderStore(tmp_path / "run" / "weights").latest(), process)  # published, and nobody has come
    process.signal(signal.SIGINT)
    assert any("press Ctrl-C again" in line for line in iter(process.stdout.readline, ""))
    process.signal(signal.SIGINT)
    assert process.wait(240) == 130
    assert "To resume:" in process.communicate()[0]


def test_one_step_ahead_it_repeats_itself_after_a_crash(fleet, tmp_path):
    ahead = [*fleet.settings(), "fleet.max_version_lag=1", "algorithm.anchor=rollout"]
    run = tmp_path / "run"
    fleet.engine("eu", None)
    with held(run, 4):
        process = train(run, *ahead)
        until(lambda: steps(run) == 4, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    finish(train(run, *ahead))
    lags = [json.loads(line)["rollout/version_lag"] for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
    assert lags == [0, 1, 1, 1, 1, 1]
    checks = {check.name: check for check in verify(run, Extent(rescored=32))}
    assert all(not check.problems for check in checks.values()), checks
    assert not checks["orphaned"].summary.startswith("0 ")
    assert checks["re-scored"].summary.startswith("16 completions")


def test_a_server_that_stands_alone_and_who_may_ask_it(fleet, tmp_path):
    """`rlloop serve engine` without a store: OpenAI's client, the token, and what it does not do."""
    options = ["--model", "model", "--threads", "1", "--max-body", "4096", "--logprobs-mode", "raw_logprobs"]
    server = Server(tmp_path, "engine", *options)
    fleet.servers.append(server)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as client:
        made = client.completions.create(model="rlloop", prompt=[3, 4, 5], max_tokens=4, seed=1, logprobs=0)
        extra = made.choices[0].model_extra
        assert extra is not None
        with RemoteEngine(server.url, token=TOKEN) as engine:
            [exact] = engine.generate([[3, 4, 5]], SamplingParams(max_tokens=4, seed=1))
        assert exact.token_ids == extra["token_ids"]
        assert exact.raw_logprobs.astype(float).tolist() == extra["raw_logprobs"]
        stream = client.completions.create(
            model="rlloop", prompt=[3, 4, 5], max_tokens=4, seed=1, logprobs=0, temperature=0.5, stream=True
        )
        streamed = [value for event in stream for value in event.choices[0].logprobs.token_logprobs]
        with RemoteEngine(server.url, token=TOKEN) as engine:
            [cold] = engine.generate([[3, 4, 5]], SamplingParams(max_tokens=4, seed=1, temperature=0.5))
        assert streamed == cold.raw_logprobs.astype(float).tolist() != cold.logprobs.astype(float).tolist()
        for path in ("/health", "/metrics", "/rlloop/weights", "/rlloop/weights/wake", "/v1/models", "/nothing"):
            assert httpx.get(server.url + path, trust_env=False).status_code == 401
        with pytest.raises(openai.APIStatusError) as large:
            client.completions.create(model="rlloop", prompt=[3] * 4096)
        assert large.value.status_code == 413
    server.signal(signal.SIGTERM)
    server.process.wait(240)


def test_a_run_says_where_engines_join(tmp_path):
    process = train(tmp_path / "run", "fleet=regions", "fleet.patience=0.5")
    said, _ = process.communicate(timeout=120)
    assert f"engines join at {(tmp_path / 'run/fleet_address').read_text()}" in said
    assert "no engine came to serve version 0 within fleet.patience=0.5 s" in said
    assert process.returncode == 1


def test_what_cannot_work_is_said_before_anything_starts(fleet, tmp_path, monkeypatch):
    for arguments, message in (
        (["relay", "--upstream", "x", "--cache", "c", "--cache-bytes", "5"], "the relay's cache is limited to 5 bytes"),
        (["engine", "--model", "model", "--store", "x"], "--store and --public-key belong together"),
        (["engine", "--model", "nowhere"], "has no config.json"),
        (["relay", "--upstream", "x", "--cache", "c", "--host", "0.0.0.0", "--token-file", "no"], "cannot be read"),
        (["relay", "--upstream", "x", "--cache", "c", "--key", "k"], "TLS needs both"),
    ):
        server = Server(tmp_path, *arguments)
        fleet.servers.append(server)
        assert message in server.process.communicate(timeout=60)[0]
        assert server.process.returncode == 2
    assert FolderStore(tmp_path / "c").latest() is None


def test_a_trainer_that_is_not_ours_publishes_and_samples(fleet, tmp_path):
    from examples.foreign_trainer import main

    trainer = Server(
        tmp_path, "trainer", "--store", "weights", "--signing-key", "key", "--run-id", "theirs",
        "--port", str(fleet.port),
    )  # fmt: skip
    fleet.servers.append(trainer)
    fleet.engine("eu", None)
    rewards = main(str(tmp_path / "model"), trainer.url, steps=6, lr=2e-2)
    assert rewards[-1] > rewards[0] + 0.1
    reply = httpx.post(f"{trainer.url}/fleet/publish?step=9", content=b"x", trust_env=False)
    assert reply.status_code == 401
    token = {"Authorization": f"Bearer {TOKEN}"}
    for path in ("/fleet/publish?step=9", "/fleet/publish"):
        assert httpx.post(trainer.url + path, content=b"no tensors", headers=token, trust_env=False).status_code == 400
