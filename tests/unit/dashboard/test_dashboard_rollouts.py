"""The index against what the records say, read plainly."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import zstandard

from rlloop.dashboard.live import Dashboard
from rlloop.dashboard.rollouts import ORDERS, RolloutIndex, page_query
from rlloop.dashboard.runs import Run
from rlloop.runs.folder import read_rollouts, rollout_bytes, rollout_files
from rlloop.runs.journal import pack, unpack
from tests.support.dashboard_runs import write_run


def plain(run) -> list[dict]:
    """Every completion with its largest |d|, without the index; None where it was not compared."""
    found = []
    for file in rollout_files(run):
        for line, row in enumerate(read_rollouts(file)):
            d = np.array(row.get("trainer_logprobs", row["logprobs"])) - np.array(row["logprobs"])
            compared = row["outcome"] == "trained"
            found.append({**row, "line": line, "diff": float(abs(d).max()) if compared else None, "d": d})
    return found


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "a", 5, drift=0.01)
    return tmp_path / "a"


@pytest.fixture
def index(run):
    made = RolloutIndex(run)
    made.update()
    yield made
    made.close()


def test_worst_first_over_the_whole_run(run, index):
    expected = sorted((row for row in plain(run) if row["diff"] is not None), key=lambda row: -row["diff"])
    page = index.page(limit=7)
    assert page["total"] == len(plain(run))
    assert [row["uid"] for row in page["rows"]] == [row["uid"] for row in expected[:7]]
    assert page["rows"][0]["diff"] == pytest.approx(expected[0]["diff"], rel=1e-6)
    k3 = float(np.mean(np.expm1(expected[0]["d"]) - expected[0]["d"]))
    assert page["rows"][0]["k3"] == pytest.approx(k3, rel=1e-3)
    assert page["rows"][0]["different"] == np.count_nonzero(expected[0]["d"])
    rest = index.page(offset=7, limit=1000)["rows"]
    assert len(rest) == len(plain(run)) - 7
    assert all(row["diff"] is None for row in rest[-20:])  # what was not compared comes last


def test_filters_and_orders(run, index):
    rows = plain(run)
    page = index.page(step=3, kind="dropped")
    assert page["total"] == sum(row["uid"].startswith("3/") and row["outcome"] != "trained" for row in rows)
    assert {row["outcome"] for row in page["rows"]} == {"dropped: no signal in its group"}
    solved = index.page(solved=True, order="newest", limit=1000)
    assert solved["total"] == sum(row["solved"] for row in rows)
    assert [row["step"] for row in solved["rows"]] == sorted((row["step"] for row in solved["rows"]), reverse=True)
    assert {row["grp"] for row in index.page(step=2, group=1)["rows"]} == {1}
    rewards = [row["reward"] for row in index.page(order="reward_low", limit=1000)["rows"]]
    assert rewards == sorted(rewards)
    surprise = [-float(np.mean(row["logprobs"])) for row in rows]
    page = index.page(order="surprising", limit=1000)["rows"]
    assert [row["surprise"] for row in page] == pytest.approx(sorted(surprise, reverse=True))


def test_completions_are_searched_whole(run, index):
    file = rollout_files(run)[2]
    rows = read_rollouts(file)
    rows[5]["text"] = "x" * 5000 + " Needle 100%"
    file.write_bytes(zstandard.compress(b"".join(msgspec.json.encode(row) + b"\n" for row in rows)))
    index.update()
    for text in ("needle", "NEEDLE 100%"):
        page = index.page(search=text, order="reward_high")
        assert [(row["step"], row["line"]) for row in page["rows"]] == [(3, 5)]
        assert page["total"] == 1
    assert index.page(search="needle 100_")["total"] == 0  # no pattern, but the text
    assert index.page(search="needle", step=2)["total"] == 0


def test_the_order_that_says_most(tmp_path, index):
    assert index.page()["order"] == "worst"
    write_run(tmp_path / "zero", 2)
    equal = RolloutIndex(tmp_path / "zero")
    equal.update()
    page = equal.page()
    assert (page["order"], page["rows"][0]["step"]) == ("newest", 2)


def test_only_what_is_new_is_read_again(run, index, monkeypatch):
    read = []
    plainly = RolloutIndex._read
    monkeypatch.setattr(RolloutIndex, "_read", lambda self, file: (read.append(file.name), plainly(self, file)))
    index.update()
    assert read == []
    file = rollout_files(run)[1]
    rows = read_rollouts(file)[:2]
    file.write_bytes(zstandard.compress(b"".join(msgspec.json.encode(row) + b"\n" for row in rows)))
    again = RolloutIndex(run)  # another dashboard, or this one tomorrow: the index is a file
    again.update()
    assert read == [file.name]
    assert again.page(step=2)["total"] == 2


def test_steps_that_a_resume_set_aside_leave_the_index(run, index):
    rollout_files(run)[4].unlink()
    index.update()
    assert index.page(step=5)["total"] == 0
    assert index.progress()["files"] == index.progress()["of"] == 4


def test_a_step_is_there_at_once_though_the_index_is_not(run):
    fresh = RolloutIndex(run)
    assert fresh.page(step=4)["total"] == 12
    assert fresh.progress()["files"] == 1


def test_in_the_background(run):
    fresh = RolloutIndex(run)
    fresh.keep_up()
    assert fresh._worker is not None
    fresh._worker.join(timeout=60)
    assert fresh.progress() == {"files": 5, "of": 5, "rollouts": 60, "problems": []}


def test_a_closed_index_begins_no_update(run):
    closed = RolloutIndex(run)
    closed.close()
    closed.keep_up()
    assert closed._worker is None


def test_threads_that_ask_at_once_share_a_runs_index(run, monkeypatch):
    class Slow(RolloutIndex):
        def __init__(self, *arguments):
            time.sleep(0.05)  # time for the others
            super().__init__(*arguments)

    monkeypatch.setattr("rlloop.dashboard.live.RolloutIndex", Slow)
    dashboard = Dashboard(run)
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(dashboard.index, [Run(run, ".")] * 4))) == 1
    dashboard.close()


def test_a_file_that_is_moved_since_it_was_listed_is_left_for_the_next_time(run, index, monkeypatch):
    gone = run / "rollouts" / "step_00000009.jsonl.zst"
    monkeypatch.setattr("rlloop.dashboard.rollouts.rollout_files", lambda path: [*rollout_files(path), gone])
    monkeypatch.setattr("rlloop.dashboard.rollouts.rollout_file", lambda path, step: gone)
    index.update()
    assert index.page(step=1)["total"] == 12
    assert index.page(step=9)["total"] == 0


def test_files_that_are_packed_while_they_are_read_are_read(run, monkeypatch):
    rows, index, archive = plain(run), RolloutIndex(run), run / "rollouts" / "step_00000005.zip"

    def packed(file):
        if not archive.exists():
            pack(sorted(archive.parent.iterdir()), archive)
        return rollout_bytes(file)

    monkeypatch.setattr("rlloop.dashboard.rollouts.rollout_bytes", packed)
    assert index.row(2, 5)["uid"] == rows[17]["uid"]
    unpack(archive)
    assert index.page(step=2, order="order")["rows"][5]["uid"] == rows[17]["uid"]
    unpack(archive)
    index.update()  # of the first file it reads; the others are packed then
    index.update()
    assert index.page()["total"] == len(rows)
    assert index.pending() == ([], [])
    index.close()


def test_a_damaged_file_is_told_and_the_rest_is_there(run):
    bad = rollout_files(run)[2]
    bad.write_bytes(bad.read_bytes()[:60])
    rollout_files(run)[3].write_bytes(zstandard.compress(b'{"uid": 4}\n'))
    index = RolloutIndex(run)
    index.update()
    problems = sorted(index.progress()["problems"])
    assert [problem.split(" ")[0] for problem in problems] == ["step_00000003.jsonl.zst", "step_00000004.jsonl.zst"]
    assert index.page()["total"] == 36


def test_not_finite_is_the_worst_of_all(run):
    file = rollout_files(run)[0]
    rows = read_rollouts(file)
    rows[3]["trainer_logprobs"] = [None, *rows[3]["logprobs"][1:]]
    file.write_bytes(zstandard.compress(b"".join(msgspec.json.encode(row) + b"\n" for row in rows)))
    index = RolloutIndex(run)
    [worst] = index.page(step=1, limit=1)["rows"]
    assert (worst["line"], worst["diff"], worst["different"]) == (3, math.inf, 1)


def test_one_completion_whole(run, index):
    assert index.row(2, 5) == read_rollouts(rollout_files(run)[1])[5]
    assert index.row(2, 99) is None
    assert index.row(99, 0) is None


def test_the_index_lies_outside_the_run(run, index, own_cache):
    assert index.file.parent == own_cache
    assert not list(run.rglob("*.sqlite*"))


@pytest.mark.parametrize("given", [[], ["kind"], ["solved"], ["kind", "solved"]])
@pytest.mark.parametrize("order", ORDERS)
def test_a_page_is_no_scan(index, order, given):
    with index._open() as database:
        plan = [
            line[3]
            for line in database.execute(
                f"EXPLAIN QUERY PLAN {page_query(given, order)} LIMIT 9", dict.fromkeys(given, 0)
            )
        ]
    assert "USING" in plan[0] or order in ("newest", "order")  # these two are the table's own order
    assert not any("TEMP B-TREE FOR ORDER BY" in line for line in plan)


@pytest.mark.parametrize("order", ORDERS)
def test_a_steps_page_reads_that_step_only(index, order):
    given = ["step", "kind", "solved"]
    with index._open() as database:
        [plan, *_] = database.execute(f"EXPLAIN QUERY PLAN {page_query(given, order)}", dict.fromkeys(given, 0))
    assert "PRIMARY KEY (step=?)" in plan[3]
