"""`profile=true`: a Chrome trace of three steps, which changes nothing of the run."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

from tests.support.tiny_run import history, train


def traced(folder: Path) -> Counter[str]:
    """How often each phase and operation stands in the trace."""
    with gzip.open(folder / "timeline.json.gz") as file:
        return Counter(event["name"] for event in json.load(file)["traceEvents"] if event["ph"] == "X")


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


def test_rays_actors_are_refused(tmp_path):
    process = train(tmp_path / "run", "profile=true", "launch=ray")
    output, _ = process.communicate()
    assert process.returncode == 2
    assert "profile=true traces this process, and under launch=ray others work: set launch=local\n" in output
    process = train(tmp_path / "run", "profile=true", "launch=ray", "trainer.layout.dp_shard=2")
    output, _ = process.communicate()
    assert "set launch=local and start it by torchrun --nproc-per-node 2\n" in output
