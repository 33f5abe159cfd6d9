"""Real sinks, fed with records: what they hold afterwards is what went in."""

import importlib.util
import json
import urllib.request

import pytest

from rlloop.errors import ConfigError
from rlloop.launch.compose import as_container, compose_recipe
from rlloop.protocols import SampleObserver
from rlloop.runs import sinks as sinks_module
from rlloop.runs.journal import Journal
from rlloop.runs.sinks import check_sinks, make_sinks

HISTOGRAM = {"edges": [-0.1, 0.1], "counts": [1, 5, 2]}
RECORDS = [{"reward/mean": 0.25, "parity/k3": 0.0}, {"reward/mean": 0.5, "parity/k3": 0.0, "is/hist": HISTOGRAM}]
ROWS = [
    {"uid": f"1/0/{n}", "reward": float(n), "solved": n > 0, "outcome": "trained", "token_ids": [1] * (n + 2),
     "prompt": "what?", "text": f"answer {n}"}
    for n in range(3)
]  # fmt: skip


def feed(sinks):
    for step, record in enumerate(RECORDS):
        for sink in sinks:
            if step and isinstance(sink, SampleObserver):
                sink.samples(step, ROWS)
            sink.log(step, record)


def certify(run_dir):
    (run_dir / "parity.jsonl").write_text('{"step": 1, "hash": "abc"}\n')


def test_the_certificate_is_whole_after_its_records_were_rotated(tmp_path):
    journal = Journal(tmp_path / "parity.jsonl")
    for step in range(5):
        journal.append({"step": step, "hash": f"h{step}"})
        if step == 2:
            journal.rotate(step)
    journal.rotate(4)
    with sinks_module._certificate(tmp_path) as (whole, head):
        assert (head, whole.read_text().count("\n")) == ("h4", 5)
    with sinks_module._certificate(tmp_path / "none") as none:
        assert none is None


def test_tensorboard_files_hold_what_was_recorded(tmp_path):
    certify(tmp_path)
    sinks = make_sinks({"tensorboard": None}, tmp_path, {"seed": 0})
    feed(sinks)
    sinks[0].close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.25), (1, 0.5)]
    assert set(events.Tags()["histograms"]) == {"is/hist", "reward/distribution", "rollout/length_distribution"}
    assert events.Histograms("is/hist")[0].histogram_value.bucket == [1, 5, 2]
    assert "answer 2" in events.Tensors("completions/text_summary")[0].tensor_proto.string_val[0].decode()
    assert events.Tensors("certificate/head/text_summary")[0].tensor_proto.string_val == [b"abc"]


def test_prometheus_serves_the_newest_step(tmp_path):
    [sink] = make_sinks({"prometheus": {"port": 0}}, tmp_path, {})
    feed([sink])
    page = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics").read().decode()
    sink.close()
    assert f'rlloop_reward_mean{{run="{tmp_path.name}"}} 0.5' in page
    assert f'rlloop_step{{run="{tmp_path.name}"}} 1.0' in page


@pytest.mark.slow
def test_wandb_is_offline_without_a_key_and_keeps_its_id(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    certify(tmp_path)
    for _ in range(2):  # the second time is a resumed run
        [sink] = make_sinks({"wandb": {"project": "test"}}, tmp_path, {"seed": 0})
        feed([sink])
        sink.close()
        assert sink.note.startswith(f"wandb: offline, in {tmp_path / 'wandb'}")
        assert "uploads it" in sink.note
    tables = sorted((tmp_path / "wandb").glob("offline-run-*/files/media/table/completions_*.json"))
    table = tables[-1]
    assert [row[1::6] for row in json.loads(table.read_text())["data"]] == [
        [f"1/0/{n}", f"answer {n}"] for n in range(3)
    ]
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "wandb_id").read_text()
    assert folders
    assert all(folder.name.endswith(run_id) for folder in folders)
    assert any(folder.glob("*.wandb") for folder in folders)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"comet": {}}, "sinks.comet is unknown; there are wandb, trackio, mlflow, tensorboard, prometheus, alerts"),
        (
            {"prometheus": {"prot": 1}},
            "sinks.prometheus.prot is unknown; prometheus takes port, host .did you mean port",
        ),
        ({"tensorboard": {"x": 1}}, "tensorboard takes completions, completions_every"),
    ],
)
def test_what_cannot_work_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        check_sinks(config)


@pytest.mark.parametrize("scheme", ["https", "postgresql"])
def test_a_login_of_mlflows_is_refused_and_not_told(scheme, monkeypatch):
    monkeypatch.setattr("rlloop.runs.sinks._require", lambda name: None)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or") as refused:
        check_sinks({"mlflow": {"uri": f"{scheme}://me:s3cret@host/x"}})
    assert "s3cret" not in str(refused.value)
    for uri in (None, "runs/@me", "sqlite:////runs/@me/mlflow.db", "https://host/@me", "postgresql://me@host/db"):
        check_sinks({"mlflow": {"uri": uri}})


@pytest.mark.parametrize("name", ["trackio", "mlflow", "wandb"])
def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"sinks.{name} needs the package {name}: pip install 'rlloop\[{name}\]'"):
        check_sinks({name: {}})


def test_mlflow_holds_what_was_recorded(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    certify(tmp_path)
    for _ in range(2):  # the second time is a resumed run
        [sink] = make_sinks({"mlflow": {"completions_every": 1}}, tmp_path, {"seed": 0, "trainer": {"lr": 0.1}})
        feed([sink])
        sink.close()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("rlloop").experiment_id])
    assert run.data.params == {"seed": "0", "trainer.lr": "0.1"}
    assert run.data.metrics["reward/mean"] == 0.5
    assert run.data.tags["certificate.head"] == "abc"
    assert run.info.status == "FINISHED"
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {
        "completions",
        "histograms",
        "parity.jsonl",
    }


def test_trackio_holds_what_was_recorded(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    certify(tmp_path)
    [sink] = make_sinks({"trackio": {"project": tmp_path.name}}, tmp_path, {"seed": 0})
    feed([sink])
    sink.close()
    assert "trackio show --project" in sink.note
    assert trackio.Api().runs(tmp_path.name)


@pytest.mark.parametrize(
    ("overrides", "sinks"),
    [
        (["sinks=wandb"], {"wandb": {}}),
        (["sinks=[wandb,tensorboard]"], {"wandb": {}, "tensorboard": {}}),
        (["sinks=wandb", "sinks.wandb.project=mine"], {"wandb": {"project": "mine"}}),
        (["sinks.prometheus.port=0"], {"prometheus": {"port": 0}}),
        (["sinks={wandb: {mode: offline}}"], {"wandb": {"mode": "offline"}}),
    ],
)
def test_sinks_on_the_command_line(overrides, sinks):
    assert as_container(compose_recipe("guess", overrides))["sinks"] == sinks
