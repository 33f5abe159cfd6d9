"""The recorded runs are runs: their records check out, before, while and after one is replayed."""

import threading

import pytest

from rlloop.audit import verify
from rlloop.dashboard.demo import BEGIN, LIVE, Replay, recorded_runs, unpack
from rlloop.dashboard.runs import Run
from rlloop.runs.find import find_runs
from rlloop.runs.folder import read_records


def problems(run) -> list[str]:
    return [problem for check in verify(run) for problem in check.problems]


@pytest.mark.slow
def test_the_demo_lays_out_runs_and_replays_one():
    with recorded_runs(pace=0.01) as (root, note):
        assert LIVE in find_runs(root)
        assert len(find_runs(root)) > 1
        assert "recorded" in note
        first = Run(root / LIVE, LIVE).overview()
        assert first["status"] == "live"
        waiting = threading.Event()
        while Run(root / LIVE, LIVE).overview()["step"] <= first["step"]:
            waiting.wait(0.02)
        finished = [run for run in find_runs(root) if run != LIVE]
        assert all(Run(root / run, run).overview()["status"] == "finished" for run in finished)
        assert all(problems(root / run) == [] for run in finished)
    assert not root.exists()


@pytest.mark.slow
def test_a_replay_ends_as_the_run_did(tmp_path):
    files = {path: content for path, content in unpack().items() if path.parts[0] == LIVE}
    replay = Replay(tmp_path, files)
    replay.advance(BEGIN)
    assert problems(tmp_path / LIVE) == []
    assert len(list(read_records(tmp_path / LIVE / "metrics.jsonl"))) == BEGIN + 1
    replay.run(threading.Event(), pace=0)
    assert problems(tmp_path / LIVE) == []
    for path, content in files.items():
        if path.suffix == ".jsonl" and path.parent.name != "rollouts":
            assert (tmp_path / path).read_bytes() == content
    assert Run(tmp_path / LIVE, LIVE).overview()["status"] == "finished"
