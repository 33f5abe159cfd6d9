"""The server over HTTP, without a browser and without a socket."""

import asyncio
import csv
import io
import json
from contextlib import aclosing

import httpx
import numpy as np
import pytest

from rlloop.dashboard.live import Dashboard
from rlloop.dashboard.server import make_app
from rlloop.dashboard.training_api import TrainingApi
from rlloop.errors import ConfigError
from rlloop.web.server import Guard, Listen
from tests.support.dashboard_runs import CONFIG, write_run

TOKEN = "a-token-of-some-length"


@pytest.fixture
def root(tmp_path):
    write_run(tmp_path / "zero", 4)
    write_run(tmp_path / "drift", 3, drift=0.01, config={"seed": 0, "trainer": {"num_steps": 3}, "extra": [1, 2]})
    return tmp_path


@pytest.fixture
def dashboard(root):
    made = Dashboard(root, note="a note")
    yield made
    made.close()


@pytest.fixture
def ask(dashboard):
    """ask(path, key=value, ...) -> the response, with the token unless `headers` say otherwise."""
    app = Guard(make_app(dashboard), Listen(port=1, token=TOKEN, browser=True))

    def send(path, method="GET", headers=None, cookies=None, content=None, **parameters) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost:1", cookies=cookies) as client:
                given = {"authorization": f"Bearer {TOKEN}"} if headers is None else headers
                return await client.request(method, path, params=parameters or None, headers=given, content=content)

        return asyncio.run(go())

    return send


# ------------------------------------------------------------------------------------------------ the door


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/events", "/metrics", "/static/app.js", "/nowhere"])
def test_nothing_without_the_token(ask, path):
    for headers in ({}, {"authorization": "Bearer another"}, {"authorization": TOKEN}):
        answer = ask(path, headers=headers)
        assert answer.status_code == 401
        assert "needs its token" in answer.text
    assert ask(path, headers={}, cookies={"rlloop_1": "another"}).status_code == 401
    assert ask(path, headers={}, cookies={"rlloop_2": TOKEN}).status_code == 401  # another port's


def test_the_token_becomes_a_cookie_and_leaves_the_address(ask):
    answer = ask("/", headers={}, token=TOKEN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert ask("/", headers={}, cookies={"rlloop_1": TOKEN}).status_code == 200
    assert ask("/", headers={}, token="wrong").status_code == 401


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:1", "[::1]:1"])
def test_this_machines_own_names(ask, host):
    assert ask("/", headers={"authorization": f"Bearer {TOKEN}", "host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:1", "localhost.evil.example", "", "[::2]:1"])
def test_no_page_of_another_name(ask, host):
    """DNS rebinding: a page's own name points to this machine all at once."""
    answer = ask("/api/runs", headers={"authorization": f"Bearer {TOKEN}", "host": host})
    assert answer.status_code == 403
    assert "--allow-host" in answer.text


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:2", "http://localhost:1.evil"])
def test_no_page_of_another_site(ask, origin):
    answer = ask("/api/runs", headers={"authorization": f"Bearer {TOKEN}", "origin": origin})
    assert answer.status_code == 403
    own = {"authorization": f"Bearer {TOKEN}", "origin": "http://localhost:1"}
    assert ask("/api/runs", headers=own).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_only_reading(ask, method):
    assert ask("/api/runs", method=method).status_code == 405


def test_the_page_loads_nothing_from_elsewhere(ask):
    page = ask("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http-equiv", "")
    for file in ("app.js", "style.css", "chart.js", "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"):
        answer = ask(f"/static/{file}")
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "Permission is hereby granted" in ask("/static/vendor/uPlot.LICENSE.txt").text


def test_files_beside_the_static_ones_are_not_served(ask):
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py"):
        assert ask(path).status_code == 404


# ------------------------------------------------------------------------------------------------ data


def test_runs(ask):
    found = ask("/api/runs").json()
    assert found["note"] == "a note"
    assert [(run["id"], run["status"], run["step"]) for run in found["runs"]] == [
        ("drift", "finished", 3),
        ("zero", "finished", 4),
    ]


@pytest.mark.parametrize("path", ["totals", "series", "record", "certificate", "config", "rollouts", "rollout", "log"])
@pytest.mark.parametrize("run", ["", "nobody", "../zero", "/etc", "."])
def test_only_runs_that_were_found(ask, path, run):
    answer = ask(f"/api/{path}", run=run, step=1, line=0)
    assert answer.status_code == 404
    assert "there is no run" in answer.json()["error"]


def columns(answer) -> np.ndarray:
    return np.frombuffer(answer.content, "<f8").reshape(int(answer.headers["x-columns"]), -1)


def test_series_whole_and_from_where_one_is(ask, root, tmp_path):
    whole = ask("/api/series", run="zero", name=["parity/k3", "eval/solved", "absent"])
    step, k3, solved, absent = columns(whole)
    assert step.tolist() == [0, 1, 2, 3, 4]
    assert np.isnan(k3[0])
    assert k3[1:].tolist() == [0, 0, 0, 0]
    assert solved[0] == 0.25
    assert np.isnan(solved[1:]).all()
    assert np.isnan(absent).all()
    with (root / "zero" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "parity/k3": None}) + "\n")
    generation = whole.headers["x-generation"]
    more = ask("/api/series", run="zero", name="parity/k3", after=5, generation=generation)
    assert more.headers["x-start"] == "5"
    assert columns(more).tolist() == [[5], [np.inf]]
    other = ask("/api/series", run="zero", name="parity/k3", after=5, generation="99")
    assert other.headers["x-start"] == "0"
    assert columns(other).shape == (2, 6)


def test_csv(ask):
    answer = ask("/api/series.csv", run=["zero", "drift"], name=["parity/k3", "eval/solved"])
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert len(rows) == 5 + 4
    assert rows[0] == {"run": "zero", "step": "0", "parity/k3": "", "eval/solved": "0.25"}
    assert float(rows[-1]["parity/k3"]) > 0
    assert "attachment" in answer.headers["content-disposition"]


def test_panels_of_several_runs(ask):
    titles = [section["title"] for section in ask("/api/panels", run=["zero", "drift"]).json()]
    assert titles == ["Learning", "Parity", "Time", "Ledger"]
    assert ask("/api/panels").json() == []


def test_totals(ask):
    assert ask("/api/totals", run="zero").json()["different"] == 0
    drift = ask("/api/totals", run="drift").json()
    assert 0 < drift["different"] <= drift["tokens"] == 3 * 8 * 5


@pytest.mark.parametrize("kind", ["demonstrations", "verdicts"])
def test_a_run_on_given_completions_has_its_loss_in_place_of_rewards(root, ask, kind):
    task = {"_target_": "rlloop.recipes.offline.task.Given", "kind": kind}
    writer = write_run(root / "given", 1, config={**CONFIG, "task": task})
    constants = {"reward/solved": 1.0, "reward/std": 0.0, "reward/groups_without_signal": 1.0, "reward/logprob": -0.5}
    writer.write(extra={**constants, "reward/mean": 1.0, "loss/total": 0.5, "eval/reward": 1.7, "eval/solved": 0.4})
    totals = ask("/api/totals", run="given").json()
    assert (totals["offline"], totals["reward"], totals["loss"]["last"]) == (kind, None, 0.5)
    assert totals["passes"] == (kind == "verdicts")  # the margins of pairs have no bound
    drawn = [panel for section in ask("/api/panels", run="given").json() for panel in section["panels"]]
    titles = [panel["title"] for panel in drawn if not {"eval/reward", "eval/solved"}.isdisjoint(panel["metrics"])]
    assert titles == (["Held-out preference accuracy", "Margin"] if kind == "verdicts" else ["Reward"])
    shown = {metric for panel in drawn for metric in panel["metrics"]}
    assert {"reward/logprob", "loss/total"} <= shown
    assert not shown & {"reward/mean", "reward/solved", "reward/std", "reward/groups_without_signal"}
    assert ask("/api/totals", run="zero").json()["reward"] is not None


def test_rewards_that_are_not_pass_or_fail_have_no_panel_of_pass_at_1(root, ask):
    write_run(root / "graded", 0).write(extra={"reward/solved": 0.0, "eval/solved": 0.0, "eval/reward": 0.4})
    assert ask("/api/totals", run="graded").json()["passes"] is False
    alone, beside = (
        [panel["title"] for section in ask("/api/panels", run=runs).json() for panel in section["panels"]]
        for runs in (["graded"], ["graded", "zero"])
    )
    assert "Held-out pass@1" not in alone
    assert "Reward" in alone
    assert "Held-out pass@1" in beside


def test_record_and_certificate_of_a_step(ask):
    found = ask("/api/record", run="zero", step=2).json()
    assert found["record"]["step"] == found["certificate"]["step"] == 2
    assert found["bounds"] == {"first": 0, "last": 4}
    assert ask("/api/record", run="zero", step=77).json()["record"] is None
    whole = ask("/api/certificate", run="drift", last=2).json()
    assert (whole["steps"], whole["breaks"], len(whole["lines"])) == (3, [], 2)
    assert whole["rungs"] == [{"step": 1, "rung": "bitwise"}]
    assert len(whole["fingerprints"]) == 1
    assert ask("/api/record", run="zero", step="x").status_code == 400


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("metrics.jsonl", "step", "1" + "0" * 400),
        ("metrics.jsonl", "parity/tokens", "1e308"),
        ("metrics.jsonl", "parity/tokens_different", "-1e308"),
        ("metrics.jsonl", "ledger/trained", "1e308"),
        ("parity.jsonl", "tokens", '"many"'),
        ("parity.jsonl", "tokens_different", "null"),
    ],
)
def test_odd_values_in_records_end_no_page(root, ask, file, key, value):
    *lines, before, last = (json.loads(line) for line in (root / "zero" / file).read_text().splitlines())
    odd = [before if key == "step" else {**before, key: "odd"}, {**last, key: "odd"}]
    text = "".join(f"{json.dumps(line)}\n" for line in [*lines, *odd])
    (root / "zero" / file).write_text(text.replace('"odd"', value))
    for page in ("runs", "panels", "totals", "series", "series.csv", "record", "certificate"):
        assert ask(f"/api/{page}", run="zero", name="reward/mean", step=2, last=3).status_code == 200, page
    assert ask("/metrics").status_code == 200
    totals = ask("/api/totals", run="zero").json()
    left = [problem for problem in totals["problems"] if file in problem]
    assert bool(left) == (key == "step" or file == "parity.jsonl")
    assert totals["steps"] == (3 if key == "step" else 4)


def test_configurations_side_by_side(ask):
    found = ask("/api/config", run="zero", other="drift").json()
    differing = {row["key"]: row["values"] for row in found["rows"] if row["differ"]}
    assert differing["trainer.num_steps"] == ["6", "3"]
    assert differing["extra"] == [None, "[1, 2]"]
    assert "seed" not in differing
    alone = ask("/api/config", run="zero").json()
    assert not any(row["differ"] for row in alone["rows"])


def test_what_one_section_takes_from_another_differs_once(ask, root):
    for name, split in (("zero", "a"), ("drift", "b")):
        with (root / name / "config.yaml").open("a") as file:
            file.write(f"data: {{split: {split}}}\ntask: {{data: {{split: {split}}}}}\n")
    rows = {row["key"]: row for row in ask("/api/config", run="zero", other="drift").json()["rows"]}
    assert rows["data.split"]["differ"]
    assert rows["task.data.split"]["values"] == ["a", "b"]
    assert not rows["task.data.split"]["differ"]


def test_a_broken_configuration_is_told(ask, root):
    (root / "zero" / "config.yaml").write_text("a: [\n")
    assert "cannot be read" in ask("/api/config", run="zero").json()["problems"][0]
    assert "cannot be read" in ask("/api/totals", run="zero").json()["problems"][0]


def test_rollouts_of_a_step_and_one_of_them(ask):
    found = ask("/api/rollouts", run="drift", step=2, limit=3).json()
    assert found["total"] == 12
    worst = found["rows"][0]
    assert [row["diff"] for row in found["rows"]] == sorted((row["diff"] for row in found["rows"]), reverse=True)
    full = ask("/api/rollout", run="drift", step=2, line=worst["line"]).json()
    assert full["uid"] == worst["uid"]
    assert max(abs(token["d"]) for token in full["tokens"]) == pytest.approx(worst["diff"])
    assert full["components"] == {"correct": full["reward"], "form": 0.5}
    assert not full["has_text"]
    assert ask("/api/rollout", run="drift", step=2, line=99).status_code == 404
    table = list(csv.DictReader(io.StringIO(ask("/api/rollouts", run="drift", step=2, format="csv").text)))
    assert len(table) == 12
    assert ask("/api/rollouts", run="drift", order="DROP TABLE").status_code == 400


def test_damaged_rollouts_are_told(ask, root):
    (root / "drift" / "rollouts" / "step_00000002.jsonl.zst").write_bytes(b"no zstd")
    found = ask("/api/rollouts", run="drift", step=2).json()
    assert found["rows"] == []
    assert "step_00000002.jsonl.zst is damaged" in found["index"]["problems"][0]
    assert ask("/api/rollout", run="drift", step=2, line=0).status_code == 422


def test_a_run_with_a_damaged_segment_is_told_and_the_others_are_as_usual(ask, root):
    (root / "drift" / "rotated").mkdir()
    (root / "drift" / "rotated" / "metrics_00000000.jsonl.zst").touch()
    runs = {run["id"]: run for run in ask("/api/runs").json()["runs"]}
    assert "metrics_00000000.jsonl.zst is damaged" in runs["drift"]["problems"][0]
    assert (runs["zero"]["step"], runs["zero"]["problems"]) == (4, [])
    text = ask("/metrics").text
    assert 'rlloop_step{run="zero"} 4.0' in text
    assert 'rlloop_live{run="drift"} 0.0' in text
    failed = ask("/api/totals", run="drift")
    assert (failed.status_code, "is damaged" in failed.json()["error"]) == (400, True)


def test_prometheus(ask):
    text = ask("/metrics").text
    assert 'rlloop_parity_k3{run="zero"} 0.0' in text
    assert 'rlloop_live{run="drift"} 0.0' in text
    assert 'rlloop_step{run="zero"} 4.0' in text


def test_log(ask):
    assert ask("/api/log", run="zero").json()["lines"][0].endswith("starting")


# ------------------------------------------------------------------------------------------------ live


def test_events_tell_of_new_steps_and_new_runs(dashboard, root):
    """All runs at first; then the one that grew, and the one that is new."""

    async def listen() -> list[tuple[str, dict]]:
        heard = []
        async with aclosing(dashboard.events()) as events:
            async for text in events:
                if text.startswith(":"):
                    continue
                name, data = text.splitlines()[:2]
                heard.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
                if len(heard) == 2:  # what is there has been told: now something happens
                    with (root / "zero" / "metrics.jsonl").open("a") as file:
                        file.write('{"step": 5}\n')
                    write_run(root / "young", 1, finished=False)
                told = {run["id"]: run for name, content in heard[2:] for run in content["runs"]}
                if {"zero", "young"} <= told.keys():
                    assert told["zero"]["step"] == 5
                    assert told["young"]["status"] == "live"
                    return heard
        return heard

    heard = asyncio.run(asyncio.wait_for(listen(), timeout=60))
    assert heard[0][0] == "runs"
    assert [run["id"] for run in heard[0][1]] == ["drift", "zero"]
    assert heard[-1][1]["ids"] == ["drift", "young", "zero"]


# ------------------------------------------------------------------------------------------------ notes


def test_notes_are_kept_in_the_runs_folder(ask, root):
    answer = ask("/api/notes", "POST", content=b'{"note": "a note ", "tags": ["x", " y", "x", ""]}', run="zero")
    assert answer.json() == {"note": "a note", "tags": ["x", "y"]}
    assert json.loads((root / "zero" / "notes.json").read_text()) == answer.json()
    [run] = [run for run in ask("/api/runs").json()["runs"] if run["id"] == "zero"]
    assert (run["note"], run["tags"]) == ("a note", ["x", "y"])
    assert ask("/api/runs").json()["runs"][0]["tags"] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "must be JSON"),
        (b'{"note": 1}', "a note must be text of at most 20,000 characters"),
        (b'{"tags": "x"}', "tags must be a list of texts"),
        (b'{"tags": ["' + b"x" * 61 + b'"]}', "of at most 60 characters"),
    ],
)
def test_what_is_no_note_is_refused(ask, root, content, message):
    answer = ask("/api/notes", "POST", content=content, run="zero")
    assert answer.status_code == 400
    assert message in answer.json()["error"]
    assert not (root / "zero" / "notes.json").exists()
    assert ask("/api/notes", "POST", content=b"{}", run="../x").status_code == 404
    foreign = {"authorization": f"Bearer {TOKEN}", "origin": "http://elsewhere"}
    assert ask("/api/notes", "POST", content=b"{}", headers=foreign, run="zero").status_code == 403


# ------------------------------------------------------------------------------------------------ a training API


def test_a_training_api_that_does_not_answer_is_told(ask, dashboard):
    assert ask("/api/training").status_code == 404
    dashboard.api = TrainingApi("http://127.0.0.1:9")
    assert "http://127.0.0.1:9 does not answer" in ask("/api/training").json()["problem"]
    for url in ("127.0.0.1:9", "ftp://x", ""):
        with pytest.raises(ConfigError, match="must be the address of `rlloop serve api`"):
            TrainingApi(url)
