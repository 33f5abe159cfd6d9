"""fleet=regions with a trainer over ranks: the run is one rank's, bit for bit, and so are its versions."""

from __future__ import annotations

import json
import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlloop.audit import Extent, verify
from rlloop.sync.manifest import MAGIC, Head, load_key
from rlloop.sync.publisher import state_at
from rlloop.sync.store import FolderStore
from tests.support.fleet_run import TOKEN, Fleet, events, outcome
from tests.support.ranked_run import SMALL, finish, start
from tests.support.ray_processes import left_behind, ranks_of
from tests.support.tiny_run import held, make_model, steps, train
from tests.support.waiting import until

LARGE = {"vocab_size": 1 << 14, "hidden_size": 64, "tie_word_embeddings": False}  # two tensors of a million elements
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
STEPS = ["trainer.num_steps=4", "scoring.timeout=240"]


@pytest.fixture
def fleet(tmp_path, monkeypatch) -> Iterator[Fleet]:
    monkeypatch.setenv("RLLOOP_TOKEN", TOKEN)
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def begin(fleet: Fleet, run: Path, size: int, *layout: str):
    """Starts the ranks of a run in the fleet, whose versions have one name wherever it is."""
    run.mkdir(exist_ok=True)
    (run / "fleet.json").write_text(json.dumps({"run_id": "run"}))
    return start(run, size, *STEPS, *fleet.settings(), "fleet.anchor_every=2", *layout)


def newest(run: Path) -> dict[str, bytes]:
    """Digests of the newest version in a run's store, whose manifests are verified."""
    store = FolderStore(run / "weights")
    content = store.latest()
    assert content is not None
    head = Head.decode(content)
    return state_at(store, load_key(run.parent / "key"), head, head.newest.sequence)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "layout", "engine"),
    [
        (LARGE, ["trainer.layout.dp_shard=2"], ["--layout", "tp=2"]),
        (LARGE, ["trainer.layout.tp=2", "rollout.layout.tp=2"], []),
        (MIXTURE, ["trainer.layout.dp_shard=2", "trainer.layout.ep=2"], ["--layout", "pp=2"]),
    ],
    ids=["dp_shard", "tp", "ep"],
)
def test_ranks_publish_what_one_does_and_an_engine_of_any_size_serves_it(
    fleet, tmp_path, monkeypatch, own, layout, engine
):
    make_model(tmp_path, **own)
    fleet.engine("eu", None, *engine)
    run = tmp_path / "run"
    with held(run, 2):
        ranks = begin(fleet, run, 2, *layout)
        until(lambda: steps(run) == 2, ranks[0])
        os.kill(ranks[1].pid, signal.SIGKILL)  # it goes on from the store on one rank, then on two
    for rank in ranks:
        rank.communicate(timeout=240)
    finish(begin(fleet, run, 1, "trainer.num_steps=3"))
    finish(begin(fleet, run, 2, *layout))
    made = {event["engine"] for event in events(run, "serving")}
    assert len(made) == 1
    assert events(run, "quarantined") == []
    fleet.close()
    fleet.engine("eu", None)
    finish(begin(fleet, tmp_path / "alone", 1))
    assert outcome(run) == outcome(tmp_path / "alone")
    assert newest(run) == newest(tmp_path / "alone")
    monkeypatch.chdir(tmp_path)  # where the configuration's key is
    checks = {check.name: check for check in verify(run, Extent(rescored=32))}
    assert all(not check.problems for check in checks.values()), checks
    assert "signed manifests" in checks["versions"].summary
    [manifest] = [each for each in (run / "weights/blobs").glob("??/*") if each.read_bytes().startswith(MAGIC)][:1]
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"x")
    [damaged] = [check for check in verify(run) if check.problems]
    assert damaged.name == "versions"


@pytest.mark.slow
def test_rays_ranks_publish_what_one_does_and_a_killed_one_is_named(fleet, tmp_path):
    pytest.importorskip("ray")
    fleet.engine("eu", None)
    owner, run, ahead = uuid.uuid4().hex, tmp_path / "run", ["fleet.max_version_lag=1", "algorithm.anchor=rollout"]

    def train_by_ray():
        run.mkdir(exist_ok=True)
        (run / "fleet.json").write_text(json.dumps({"run_id": "run"}))
        overrides = [*STEPS, *fleet.settings(), "fleet.anchor_every=2", *ahead]
        layout = ["launch=ray", "trainer.layout.dp_shard=2"]
        return train(run, SMALL, *overrides, *layout, env={**os.environ, "RLLOOP_TEST_RUN": owner})

    with held(run, 3):
        process = train_by_ray()
        until(lambda: steps(run) == 3, process)
        ranks = ranks_of(owner)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert re.search(r"rlloop: rank [01] of 2: ", output), output
    assert not left_behind(owner), "processes were left behind"
    finish([train_by_ray()])
    assert not left_behind(owner), "processes were left behind"
    assert events(run, "quarantined") == []
    fleet.close()
    fleet.engine("eu", None)
    finish(begin(fleet, tmp_path / "alone", 1, *ahead))
    assert outcome(run) == outcome(tmp_path / "alone")
    assert newest(run) == newest(tmp_path / "alone")
    assert Head.decode((run / "weights/latest").read_bytes()).shortcuts, "an anchor"


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_ranks_one_step_ahead(fleet, tmp_path, shard):
    """Whole versions are stored by a thread, between the calls of the loop."""
    fleet.engine("eu", None)
    ahead = [
        "fleet.max_version_lag=1",
        "algorithm.anchor=rollout",
        "trainer.layout.dp_shard=2",
        f"trainer.shard={shard}",
    ]
    run = tmp_path / "run"
    finish(begin(fleet, run, 2, *ahead))
    lags = [json.loads(line)["rollout/version_lag"] for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
    assert lags == [0, 1, 1, 1]
    head = Head.decode((run / "weights/latest").read_bytes())
    assert head.shortcuts, "an anchor"
    checks = {check.name: check for check in verify(run, Extent(rescored=32))}
    assert all(not check.problems for check in checks.values()), checks
