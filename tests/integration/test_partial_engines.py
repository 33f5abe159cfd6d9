"""Partial rollouts of single turns with engines elsewhere: cut into pieces that go on with new weights, at zero KL."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from rlloop.audit import Extent, verify
from rlloop.cli.main import main
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from tests.support.fleet_run import TOKEN, Fleet

SIZES = [
    "data.path=rows.jsonl", "data.eval_path=rows.jsonl", "reward._target_=learnable.reward", "model.path=model",
    "rollout.num_prompts=3", "rollout.group_size=2", "rollout.max_tokens=24", "trainer.num_steps=3", "trainer.lr=1e-2",
    "eval.every=0", "eval.num_draws=2", "algorithm.anchor=rollout",
]  # fmt: skip
PARTIAL = ["rollout.partial.prompts=3", "rollout.partial.slice_tokens=3"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of Ray's workers
    prepare(tmp_path)
    return tmp_path


def prepare(folder: Path) -> None:
    write_tiny(folder / "model", [*map(str, range(12))], hidden_size=32, num_layers=1)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n} {n % 5}"}) + "\n" for n in range(12)))
    (folder / "learnable.py").write_text("def reward(prompt, completion, example):\n    return len(completion) % 7\n")


def check(run: Path) -> None:
    """Completions of several versions were trained, each token under its own, and every check of the run passes."""
    rows = [row for file in rollout_files(run) for row in read_rollouts(file)]
    mixed = [row for row in rows if "versions" in row]
    assert {row["outcome"] for row in rows} == {"trained"}
    assert len({row["uid"] for row in rows}) == len(rows) == 18
    assert mixed
    for row in mixed:
        spans = row["version_spans"]
        assert len(spans) == len(row["versions"]) > 1
        assert (spans[0][0], spans[-1][1]) == (0, len(row["token_ids"]))
        assert all(end == begin for (_, end), (begin, _) in pairwise(spans))
        assert row["sampling"]["max_tokens"] == 24
    for record in list(read_records(run / "metrics.jsonl"))[1:]:
        assert record["parity/tokens_different"] == record["parity/redrawn_different"] == 0
        assert record["rollout/version_lag_max"] <= 2
    assert [problem for each in verify(run, Extent(None)) for problem in each.problems] == []


def train(*more: str) -> int:
    return main(["train", "--config-name", "custom", "run.dir=run", *SIZES, *more])


def test_an_engine_in_this_process(place, capsys):
    assert train("rollout.partial.prompts=3") == 2
    assert "single turns, which end in their step unless they are cut" in capsys.readouterr().err
    assert train(*PARTIAL, "rollout.min_tokens=5", "rollout.temperature=0.9", "checkpoint.every=1") == 0
    check(place / "run")


def test_ranks_and_a_further_engine_under_ray(place):
    pytest.importorskip("ray")
    assert train(*PARTIAL, "launch=ray", "ray.replicas=1", "trainer.layout.dp_shard=2") == 0
    check(place / "run")


def test_engines_of_a_fleet(place, monkeypatch):
    monkeypatch.setenv("RLLOOP_TOKEN", TOKEN)
    fleet = Fleet(place)
    prepare(place)
    try:
        fleet.engine("eu", None)
        assert train(*PARTIAL, *fleet.settings()) == 0
    finally:
        fleet.close()
    check(place / "run")
