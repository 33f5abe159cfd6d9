"""Reading a run that grows, is rewound, is damaged; and that reading leaves no trace."""

import json
import math
import os
import threading
import time

import numpy as np
import pytest

from rlloop.dashboard.runs import Run, Runs
from rlloop.dashboard.server import _gauges
from rlloop.runs.find import find_runs
from rlloop.runs.folder import RunFolder
from tests.support.dashboard_runs import Writer, write_run


def column(run: Run, name: str) -> list[float]:
    with run.metrics() as metrics:
        return metrics.column(name).tolist()


def test_runs_are_found_at_any_depth_and_nothing_else_is(tmp_path):
    write_run(tmp_path / "a", 1)
    write_run(tmp_path / "study" / "seed=0,1", 1)
    (tmp_path / "a" / "orphaned" / "1").mkdir(parents=True)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "config.yaml").write_text("seed: 0\n")
    assert find_runs(tmp_path) == ["a", "study/seed=0,1"]
    assert find_runs(tmp_path / "a") == ["."]


def test_runs_behind_links_are_found_once(tmp_path):
    root, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    write_run(root / "b", 1)
    write_run(elsewhere / "one", 1)
    write_run(elsewhere / "study" / "late" / "seed=0", 1)
    write_run(elsewhere / "study" / "late" / "deeper" / "run", 1)
    (root / "a").symlink_to(root / "b")  # the same run: found under its own name
    (root / "one").symlink_to(elsewhere / "one")
    (root / "study").symlink_to(elsewhere / "study")
    assert find_runs(root) == ["b", "one", "study/late/seed=0"]
    runs = Runs(root)
    assert [run.overview()["step"] for run in runs.find()] == [1, 1, 1]
    (tmp_path / "all").symlink_to(root)
    assert find_runs(tmp_path / "all") == ["b", "one", "study/late/seed=0"]


def test_a_folder_that_two_links_lead_to_is_searched_as_deep_as_the_nearer_one_allows(tmp_path):
    write_run(tmp_path / "all" / "x" / "y" / "recipe" / "time", 1)
    write_run(tmp_path / "all" / "near", 1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "all")
    (tmp_path / "runs" / "b").symlink_to(tmp_path / "all" / "x" / "y")
    assert find_runs(tmp_path / "runs") == ["a/near", "b/recipe/time"]
    (tmp_path / "runs" / "c").symlink_to(tmp_path / "all" / "x")  # searches y again, and finds nothing new
    assert find_runs(tmp_path / "runs") == ["a/near", "b/recipe/time"]


def test_links_that_lead_nowhere_or_back_end(tmp_path):
    write_run(tmp_path / "runs" / "below" / "a", 1)
    (tmp_path / "runs" / "below" / "up").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "self").symlink_to("self")
    (tmp_path / "runs" / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "y").symlink_to(tmp_path / "runs" / "z")
    (tmp_path / "runs" / "z").symlink_to(tmp_path / "x")
    assert find_runs(tmp_path / "runs") == ["below/a"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives links to another user")
def test_a_link_of_another_user_shows_only_what_is_theirs(tmp_path):
    root, stranger = tmp_path / "runs", 54321
    root.mkdir()
    for name in ("mine", "theirs"):
        write_run(tmp_path / name, 1)
        (root / name).symlink_to(tmp_path / name)
        os.lchown(root / name, stranger, stranger)
    os.chown(tmp_path / "theirs", stranger, stranger)
    assert find_runs(root) == ["theirs"]


def test_an_older_listing_does_not_replace_a_newer_one(tmp_path, monkeypatch):
    listed, newer = threading.Event(), threading.Event()

    def slow(root):
        ids = find_runs(root)
        if not listed.is_set():
            listed.set()
            newer.wait(0.2)  # time for the other listing
        return ids

    write_run(tmp_path / "a", 1)
    runs = Runs(tmp_path)
    monkeypatch.setattr("rlloop.dashboard.runs.find_runs", slow)
    older = threading.Thread(target=runs.find)
    older.start()
    assert listed.wait(60)
    write_run(tmp_path / "b", 1)
    runs.find()
    newer.set()
    older.join()
    assert [run.id for run in runs.known()] == ["a", "b"]


def test_an_id_is_no_path(tmp_path):
    write_run(tmp_path / "runs" / "a", 1)
    write_run(tmp_path / "secret", 1)
    runs = Runs(tmp_path / "runs")
    runs.find()
    assert runs.get("a") is not None
    assert runs.get("../secret") is None


def test_columns_grow_with_the_file(tmp_path):
    writer = write_run(tmp_path / "a", 2, finished=False)
    run = Run(tmp_path / "a", "a")
    assert column(run, "step") == [0, 1, 2]
    assert np.isnan(column(run, "parity/k3")[0])
    assert column(run, "parity/k3")[1:] == [0, 0]
    writer.write(extra={"late": 7, "lost": None})
    assert column(run, "late")[-1] == 7
    assert all(math.isnan(value) for value in column(run, "late")[:-1])
    assert column(run, "lost")[-1] == math.inf  # recorded as not finite, which is not the same as absent
    assert column(run, "eval/solved")[0] == 0.25
    assert len(column(run, "eval/solved")) == 4
    with run.metrics() as metrics:
        assert "is/log_ratio_histogram" in metrics.names
        record = metrics.record(3)
        assert record is not None
        assert sum(record["is/log_ratio_histogram"]["counts"]) == record["parity/tokens"]
        assert metrics.record(9) is None


def test_a_torn_line_waits_for_its_end(tmp_path):
    write_run(tmp_path / "a", 1)
    file = tmp_path / "a" / "metrics.jsonl"
    run = Run(tmp_path / "a", "a")
    line = json.dumps({"step": 2, "parity/k3": 0.5}) + "\n"
    with file.open("a") as handle:
        handle.write(line[:9])
    assert column(run, "step") == [0, 1]
    with file.open("a") as handle:
        handle.write(line[9:])
    assert column(run, "parity/k3")[-1] == 0.5
    assert run.problems == []


def test_a_damaged_line_is_told_and_the_rest_is_shown(tmp_path):
    write_run(tmp_path / "a", 3)
    file = tmp_path / "a" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + lines[1] + '{"step": 2, "parity\n' + '["no object"]\n' + lines[1] + lines[3])
    run = Run(tmp_path / "a", "a")
    assert column(run, "step") == [0, 1, 3]
    assert [problem.partition(",")[2].split(":")[0] for problem in run.problems] == [
        " line 3, is damaged and left out",
        " line 4, is left out",
        " line 5, is left out",
    ]


def test_a_resume_that_rewinds_is_noticed_even_when_the_file_is_longer_again(tmp_path):
    write_run(tmp_path / "a", 4, finished=False)
    run = Run(tmp_path / "a", "a")
    assert column(run, "step") == [0, 1, 2, 3, 4]
    assert len(run.certificate()) == 4
    with RunFolder(tmp_path / "a") as folder:
        folder.rewind(1)
    writer = Writer(tmp_path / "a", drift=0.1, seed=5)
    writer.step = 1
    for _ in range(5):
        writer.write()
    assert column(run, "step") == [0, 1, 2, 3, 4, 5, 6]
    assert column(run, "parity/k3")[2] > 0
    assert run.breaks() == []
    with run.metrics() as metrics:
        assert metrics.tail.generation == 1


def test_status(tmp_path):
    writer = write_run(tmp_path / "a", 2, finished=False)
    run = Run(tmp_path / "a", "a")
    assert (run.overview()["status"], run.overview()["step"]) == ("live", 2)
    for file in (tmp_path / "a").iterdir():
        os.utime(file, (time.time() - 3600,) * 2)
    assert run.overview()["status"] == "stopped"
    (tmp_path / "a" / "parity_report.json").write_text("{}")
    assert run.overview()["status"] == "parity broken"
    writer.finish()
    assert run.overview()["status"] == "finished"
    writer.write()  # it was resumed for more steps
    (tmp_path / "a" / "parity_report.json").unlink()
    assert run.overview()["status"] == "live"
    assert run.overview()["num_steps"] == 6


def test_overview_of_a_broken_run(tmp_path):
    write_run(tmp_path / "a", 2)
    (tmp_path / "a" / "config.yaml").write_text("a: [1\n")
    (tmp_path / "a" / "summary.json").write_text("{")
    with (tmp_path / "a" / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    overview = Run(tmp_path / "a", "a").overview()
    assert overview["step"] == 2
    assert len(overview["problems"]) == 1  # the newest of two: each is told once it is read


@pytest.mark.parametrize("value", ["soon", [1], {"count": 1}, pytest.param(10**400, id="large")])
def test_odd_values_are_left_out(tmp_path, value):
    writer = write_run(tmp_path / "a", 1, finished=False)
    writer.write(extra={"time/step": value})
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"status": "failed", "step": "two"}))
    run = Run(tmp_path / "a", "a")
    assert (run.overview()["status"], run.overview()["step"]) == ("live", 2)
    assert run.totals()["seconds"] == 1
    assert b"rlloop_reward_mean" in _gauges([run])


def test_totals_are_those_of_the_records(tmp_path):
    write_run(tmp_path / "a", 3, drift=0.1)
    totals = Run(tmp_path / "a", "a").totals()
    records = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()][1:]
    assert totals["tokens"] == sum(record["parity/tokens"] for record in records)
    assert totals["different"] == round(
        sum(record["parity/tokens_different"] * record["parity/tokens"] for record in records)
    )
    assert totals["k3_max"] == pytest.approx(max(record["parity/k3"] for record in records))
    assert totals["pass"] == {"first": 0.25, "last": 0.25, "best": 0.25}
    assert totals["passes"]
    assert totals["seconds"] == 3


def test_a_changed_certificate_is_told(tmp_path):
    write_run(tmp_path / "a", 3)
    file = tmp_path / "a" / "parity.jsonl"
    file.write_text(file.read_text().replace('"tokens":40', '"tokens":41', 1))
    assert Run(tmp_path / "a", "a").breaks() == ["step 1 was changed: its hash is of other content"]


def test_reading_leaves_no_trace(tmp_path):
    write_run(tmp_path / "a", 2)

    def state() -> dict[str, tuple[int, int]]:
        return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in (tmp_path / "a").rglob("*")}

    before = state()
    run = Runs(tmp_path).find()[0]
    run.overview(), run.totals(), run.breaks(), run.log()
    assert state() == before
