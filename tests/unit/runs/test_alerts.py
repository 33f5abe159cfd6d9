"""Conditions of alerts, and what reaches a webhook."""

import http.server
import json
import shutil
import threading
import time

import pytest

from rlloop.dashboard.runs import Runs
from rlloop.dashboard.watch import Watch
from rlloop.errors import ConfigError, RunError
from rlloop.runs.alerts import Alarm, Condition
from rlloop.runs.sinks import check_sinks, make_sinks
from tests.support.dashboard_runs import Writer
from tests.support.waiting import until


def alarm(*texts: str) -> Alarm:
    return Alarm("run", [Condition.parse(text) for text in texts])


def test_an_alert_is_raised_once_until_it_is_over():
    each = alarm("eval/solved < 0.1")
    found = [each.record(step, {"eval/solved": value}) for step, value in enumerate([0.2, 0.05, 0.05, 0.3, 0.01])]
    assert [bool(texts) for texts in found] == [False, True, False, False, True]
    assert found[1] == ["run, step 1: eval/solved is 0.05 (eval/solved < 0.1)"]
    assert each.record(5, {"other": 1}) == []


def test_records_in_a_row_and_numbers_that_are_not_finite():
    each = alarm("reward/mean <= 0.5 for 3")
    values = [0.5, 0.4, 0.9, 0.1, None, 0.2, 0.3]
    assert [bool(each.record(step, {"reward/mean": value})) for step, value in enumerate(values)].index(True) == 5
    assert alarm("loss/grad_norm > 10").record(1, {"loss/grad_norm": None})


def test_silence_and_the_end():
    each = alarm("silent 10", "failed")
    assert [bool(each.quiet(minutes)) for minutes in (9, 10, 11)] == [False, True, False]
    each.record(4, {})
    assert each.quiet(10)
    assert [bool(each.ended(status, "why")) for status in ("live", "stopped", "failed")] == [False, True, False]
    assert alarm("failed").ended("failed", "why") == ["run: failed: why"]
    assert alarm("failed").ended("finished", None) == []


@pytest.mark.parametrize("text", ["", "eval/solved", "eval/solved < x", "silent", "silent 0", "< 3", "a < 1 for x", 3])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ConfigError, match="is no condition of an alert; write"):
        Condition.parse(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when": ["failed"]}, "the webhook of alerts is ''; it must be an address"),
        ({"webhook": "ftp://x", "when": ["failed"]}, "it must be an address"),
        ({"webhook": "http://x:port/", "when": ["failed"]}, "it must be an address"),
        ({"webhook": "http://x:65536/", "when": ["failed"]}, "it must be an address"),
        ({"webhook": "http://x/\udcff", "when": ["failed"]}, "it must be an address"),
        ({"webhook": "http://x"}, "when is empty"),
        ({"webhook": "http://x", "when": ["nothing"]}, "no condition"),
        ({"webhook": "http://x", "when": ["failed"]}, "let the dashboard send it"),
    ],
)
def test_alerts_that_cannot_be_sent_are_refused_before_a_run(options, message):
    with pytest.raises(ConfigError, match=message):
        check_sinks({"alerts": options})


def test_an_address_that_is_a_secret_stays_in_the_environment(webhook, tmp_path, monkeypatch):
    address, posted = webhook
    monkeypatch.setenv("HOOK", f"{address}/good")
    monkeypatch.setenv("ODD", "me:s3cret")
    monkeypatch.setenv("NO_PORT", "http://me:s3cret/x@hooks")
    when = ["reward/mean < 0.1"]
    [sink] = make_sinks({"alerts": {"webhook_env": "HOOK", "when": when}}, tmp_path, {})
    sink.log(1, {"reward/mean": 0.05})
    sink.close()
    assert len(posted) == 1
    for options, message in (
        ({"webhook": "https://me:s3cret@hooks/x"}, "sinks.alerts.webhook has a login .*webhook_env=NAME"),
        ({"webhook": "http://x", "webhook_env": "HOOK"}, "give one of them"),
        ({"webhook_env": "NONE"}, "sinks.alerts.webhook_env names 'NONE'"),
        ({"webhook_env": 5}, "sinks.alerts.webhook_env names 5"),
        ({"webhook_env": "ODD"}, "is what ODD holds; it must be an address"),
        ({"webhook_env": "NO_PORT"}, "is what NO_PORT holds; it must be an address"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            check_sinks({"alerts": {**options, "when": when}})
        assert "s3cret" not in str(refused.value)


@pytest.fixture
def webhook():
    """(its address, what was posted to it)"""
    posted: list[dict] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200 if self.path == "/good" else 500)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", posted
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_runs_own_alerts(webhook, tmp_path):
    address, posted = webhook
    [sink] = make_sinks({"alerts": {"webhook": f"{address}/good", "when": ["reward/mean < 0.1"]}}, tmp_path, {})
    sink.log(1, {"reward/mean": 0.05})
    sink.close()
    assert [each["text"] for each in posted] == [
        f"rlloop: {tmp_path.name}, step 1: reward/mean is 0.05 (reward/mean < 0.1)"
    ]
    [sink] = make_sinks({"alerts": {"webhook": f"{address}/bad", "when": "reward/mean < 0.1"}}, tmp_path, {})
    sink.log(1, {"reward/mean": 0.05})
    sink.close()
    assert "an alert could not be posted to the webhook" in (tmp_path / "run.log").read_text()


def test_a_silent_run_is_told_from_a_thread(webhook, tmp_path):
    address, posted = webhook
    [sink] = make_sinks({"alerts": {"webhook": f"{address}/good", "when": ["silent 0.001"]}}, tmp_path, {})
    until(lambda: posted)
    sink.close()
    assert len(posted) == 1


def test_the_dashboard_watches_live_runs(tmp_path):
    old, live = Writer(tmp_path / "old"), Writer(tmp_path / "live")
    old.write()
    old.finish()
    live.write()
    watch = Watch(
        Runs(tmp_path),
        "http://nowhere",
        [Condition.parse(text) for text in ("ledger/sampled > 1", "silent 5", "failed")],
    )
    assert watch.look() == []  # what was there before
    live.write()
    assert watch.look() == ["live, step 1: ledger/sampled is 12 (ledger/sampled > 1)"]
    hour = time.time() + 3600
    assert watch.look(now=hour) == ["live: no record for 60 minutes (silent 5)"]
    (tmp_path / "live" / "summary.json").write_text('{"status": "failed", "step": 1}')
    assert watch.look(now=hour) == ["live: failed"]
    assert watch.look(now=hour) == []


def test_a_run_that_cannot_be_read_ends_no_other_s_alerts(tmp_path, monkeypatch):
    bad, good = Writer(tmp_path / "bad"), Writer(tmp_path / "good")
    bad.write()
    good.write()
    watch = Watch(Runs(tmp_path), "http://nowhere", [Condition.parse("ledger/sampled > 1")])
    assert watch.look() == []
    of_run = Watch._of

    def damaged(self, run, now):
        if run.id == "bad":
            raise RunError("metrics-1.zip is damaged")
        return of_run(self, run, now)

    monkeypatch.setattr(Watch, "_of", damaged)
    good.write()
    told = "bad: cannot be read: metrics-1.zip is damaged"
    assert watch.look() == [told, "good, step 1: ledger/sampled is 12 (ledger/sampled > 1)"]
    assert told not in watch.look()


def test_a_damaged_segment_ends_no_other_s_alerts(tmp_path):
    bad, good = Writer(tmp_path / "bad"), Writer(tmp_path / "good")
    bad.write()
    good.write()
    (tmp_path / "bad" / "rotated").mkdir()
    (tmp_path / "bad" / "rotated" / "metrics_00000000.jsonl.zst").touch()
    watch = Watch(Runs(tmp_path), "http://nowhere", [Condition.parse("ledger/sampled > 1")])
    [told] = watch.look()
    assert told.startswith("bad: cannot be read: ")
    assert "metrics_00000000.jsonl.zst is damaged" in told
    good.write()
    assert watch.look() == ["good, step 1: ledger/sampled is 12 (ledger/sampled > 1)"]


def test_a_run_that_cannot_be_read_at_the_start_is_told(tmp_path, monkeypatch):
    posted = list[str]()
    Writer(tmp_path / "bad").write()

    def damaged(self, run, now):
        raise RunError("it is damaged")

    monkeypatch.setattr(Watch, "_of", damaged)
    monkeypatch.setattr("rlloop.dashboard.watch.post", lambda webhook, text, tell: posted.append(text))
    watch = Watch(Runs(tmp_path), "http://nowhere", [Condition.parse("failed")])
    watch.start()
    watch.close()
    assert posted == ["bad: cannot be read: it is damaged"]


@pytest.mark.parametrize("value", ["soon", [1], {"count": 1}, pytest.param(10**400, id="large")])
def test_an_odd_value_of_a_record_is_left_out_and_the_others_alert(tmp_path, value):
    writer = Writer(tmp_path / "run")
    writer.write()
    watch = Watch(Runs(tmp_path), "http://nowhere", [Condition.parse("odd > 1"), Condition.parse("ledger/sampled > 1")])
    assert watch.look() == []
    writer.write(extra={"time/step": value, "odd": value})
    assert watch.look() == ["run, step 1: ledger/sampled is 12 (ledger/sampled > 1)"]
    writer.write(extra={"odd": 2})
    assert watch.look() == ["run, step 2: odd is 2 (odd > 1)"]


@pytest.mark.parametrize("error", [FileNotFoundError("config.yaml"), None])
def test_a_run_that_is_deleted_at_this_moment_is_no_alert(tmp_path, monkeypatch, error):
    live = Writer(tmp_path / "live")
    live.write()
    watch = Watch(Runs(tmp_path), "http://nowhere", [Condition.parse("silent 5"), Condition.parse("failed")])
    assert watch.look() == []
    of_run = Watch._of

    def deleted(self, run, now):
        shutil.rmtree(run.path)
        if error is not None:
            raise error
        return of_run(self, run, now)

    monkeypatch.setattr(Watch, "_of", deleted)
    assert watch.look() == []
