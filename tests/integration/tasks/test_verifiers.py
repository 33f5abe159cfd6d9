"""The library verifiers, unchanged: its loop, its null harness and its training client over our engine.

Runs where verifiers and uv are installed (`make test-environments`); its harness is a program in a process of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlloop.audit import Extent, verify
from rlloop.cli.main import main
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from tests.support.openenv_server import counting_server

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the library's own
    pytest.mark.skipif(find_spec("verifiers") is None, reason="needs verifiers: make test-environments"),
    pytest.mark.skipif(shutil.which("uv") is None, reason="the null harness of verifiers is started by uv"),
]
SIZES = ["rollout.num_prompts=1", "rollout.group_size=2", "rollout.max_tokens=6"]
SMALL = [*SIZES, "trainer.num_steps=1", "trainer.lr=1e-2"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent / "tasksets")])
    write_tiny(tmp_path / "model", hidden_size=32, num_layers=1)
    return tmp_path


def train(*more: str) -> int:
    command = ["train", "--config-name", "agent", "model.path=model", "task=verifiers", "run.dir=run"]
    return main([*command, *SMALL, "eval.num_draws=1", "task.held_out=4", *more])


def test_conversations_of_its_loop_are_trained_without_a_difference(place):
    assert train("task.name=talk_twice") == 0
    [record] = [each for each in read_records(place / "run/metrics.jsonl") if each["step"] == 1]
    assert record["parity/tokens"] > 4
    assert record["parity/tokens_different"] == 0
    assert record["ledger/trained"] == 2
    rows = [row for file in rollout_files(place / "run") for row in read_rollouts(file)]
    for row in rows:
        (_, end), (begin, last) = row["turns"]
        between = row["token_ids"][end:begin]
        assert between, "the user's turn"
        assert last == len(row["token_ids"])
        assert row["components"]["length"] == row["reward"]
    problems = [problem for check in verify(place / "run", Extent(None, run_code=True)) for problem in check.problems]
    assert problems == []


def test_a_harness_that_needs_a_container_is_refused_before_anything_starts(place, capsys):
    assert train("task.name=talk_twice", "task.environment.player.harness.id=terminus_2") == 2
    assert "needs a container" in capsys.readouterr().err
    assert train("task.name=nothing_here") == 2
    assert "verifiers cannot load it" in capsys.readouterr().err


def test_episodes_go_on_with_new_weights_at_zero_difference(place):
    """`late` waits in its environment until the first step is trained."""
    partial = ["rollout.partial.prompts=1", "rollout.partial.slice_tokens=2", "algorithm.anchor=rollout"]
    assert train("task.name=talk_late", *partial, "trainer.num_steps=3", "checkpoint.every=1", "trainer.lr=1e-2") == 0
    records = [each for each in read_records(place / "run/metrics.jsonl") if each["step"]]
    assert all(record["parity/tokens_different"] == 0 for record in records)
    assert records[0]["rollout/groups_carried"] == 1
    assert max(record["rollout/version_lag_max"] for record in records) >= 1
    rows = [row for file in rollout_files(place / "run") for row in read_rollouts(file)]
    assert len({row["uid"] for row in rows}) == len(rows) == 6
    assert any(len(set(row.get("versions", ()))) > 1 for row in rows)
    problems = [problem for check in verify(place / "run", Extent(None, run_code=True)) for problem in check.problems]
    assert problems == []


@pytest.mark.skipif(find_spec("openenv") is None, reason="needs openenv")
def test_a_taskset_and_harness_that_it_ships_unchanged(place):
    """Its taskset `openenv` against a server of that library, in its null harness."""
    config = json.loads((place / "model/config.json").read_text())
    (place / "model/config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    with counting_server() as (url, environment):
        resets = ", ".join(f"{{seed: {seed}}}" for seed in range(8))
        assert train("task.name=openenv", f"task.taskset={{base_url: '{url}', resets: [{resets}]}}") == 0
        assert environment.open == 0
    [record] = [each for each in read_records(place / "run/metrics.jsonl") if each["step"] == 1]
    assert record["parity/tokens"] >= 6
    assert record["parity/tokens_different"] == 0
    assert record["ledger/trained"] == 2
    rows = [row for file in rollout_files(place / "run") for row in read_rollouts(file)]
    for row in rows:
        assert len(row["turns"]) == len(row["conversation"]) == 3
        assert row["reward"] == row["components"]["openenv_reward"] == 1.5
