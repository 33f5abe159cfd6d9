"""`profile=true`: a Chrome trace of three steps, which changes nothing of the run."""

from __future__ import annotations

import gzip
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranked_run import SMALL, finish, same, start
from tests.support.tiny_run import held, history, steps, train
from tests.support.waiting import until

RANKS = ("launch=ray", "trainer.layout.dp_shard=2")


def events(folder: Path) -> list[dict[str, Any]]:
    """Phases and operations."""
    with gzip.open(folder / "timeline.json.gz") as file:
        return [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]


def traced(folder: Path) -> Counter[str]:
    """How often each phase and operation stands in the trace."""
    return Counter(event["name"] for event in events(folder))


def test_three_steps_are_traced_and_the_run_is_the_same(tmp_path):
    for name, profile in (("plain", "profile=false"), ("traced", "profile=true")):
        process = train(tmp_path / name, profile)
        output, _ = process.communicate()
        assert process.returncode == 0, output
    assert "the second to fourth step are traced" in output
    assert "profiler_start" not in output  # torch's own lines
    assert history(tmp_path / "traced") == history(tmp_path / "plain")
    assert not (tmp_path / "plain" / "timeline.json.gz").exists()
    found = traced(tmp_path / "traced")
    assert {name: found[f"rlloop: {name}"] for name in ("rollout", "reward", "advantage", "update")} == {
        "rollout": 3, "reward": 3, "advantage": 3, "update": 3,
    }  # fmt: skip
    assert found["rlloop::attention"] > 0
    assert found["rlloop::attention_backward"] > 0


def test_a_run_of_fewer_steps_writes_what_there_is(tmp_path):
    process = train(tmp_path / "run", "profile=true", "trainer.num_steps=2")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert traced(tmp_path / "run")["rlloop: update"] == 1


def test_under_ray_rank_0s_operations_stand_beside_the_loops_phases(tmp_path):
    pytest.importorskip("ray")
    process = train(tmp_path / "ranks", SMALL, "profile=true", *RANKS)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    found, updates = events(tmp_path / "ranks"), Counter[tuple[str, bool]]()
    spans = [(each["ts"], each["ts"] + each["dur"]) for each in found if each["name"] == "rlloop: update"]
    assert len(spans) == 3
    for each in found:
        if each["name"] in ("rlloop::attention", "rlloop::attention_backward"):
            inside = any(began <= each["ts"] and each["ts"] + each["dur"] <= ended for began, ended in spans)
            updates[each["name"], inside] += 1
    assert updates["rlloop::attention_backward", True] > 0
    assert updates["rlloop::attention_backward", False] == 0, "both processes have one clock"
    assert updates["rlloop::attention", False] > 0, "the rollouts"
    finish(start(tmp_path / "plain", 1))
    same(tmp_path / "ranks", tmp_path / "plain")


def test_under_ray_an_interrupted_run_has_its_trace_and_goes_on(tmp_path):
    pytest.importorskip("ray")
    run = tmp_path / "run"
    with held(run, 3):  # within the third step, or just before it
        process = train(run, SMALL, "profile=true", *RANKS)
        until(lambda: steps(run) == 3, process)
        process.signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    found = traced(run)
    assert found["rlloop: update"] == steps(run) - 2 > 0  # those after step 0 and the first
    assert found["rlloop::attention_backward"] > 0
    process = train(run, SMALL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert steps(run) == 7
