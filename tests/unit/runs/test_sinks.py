"""Real sinks, fed with records: what they hold afterwards is what went in."""

import urllib.request

import pytest

from rlloop.errors import ConfigError
from rlloop.runs.sinks import check_sinks, make_sinks

RECORDS = [{"reward/mean": 0.25, "parity/k3": 0.0}, {"reward/mean": 0.5, "parity/k3": 0.0, "is/hist": {"edges": []}}]


def feed(sinks):
    for step, record in enumerate(RECORDS):
        for sink in sinks:
            sink.log(step, record)


def test_tensorboard_files_hold_the_numbers(tmp_path):
    sinks = make_sinks({"tensorboard": None}, tmp_path, {"seed": 0})
    feed(sinks)
    sinks[0].close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.25), (1, 0.5)]


def test_prometheus_serves_the_newest_step(tmp_path):
    [sink] = make_sinks({"prometheus": {"port": 0}}, tmp_path, {})
    feed([sink])
    page = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics").read().decode()
    sink.close()
    assert f'rlloop_reward_mean{{run="{tmp_path.name}"}} 0.5' in page
    assert f'rlloop_step{{run="{tmp_path.name}"}} 1.0' in page


def test_wandb_is_offline_without_a_key_and_keeps_its_id(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):  # the second time is a resumed run
        [sink] = make_sinks({"wandb": {"project": "test"}}, tmp_path, {"seed": 0})
        feed([sink])
        sink.close()
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "wandb_id").read_text()
    assert folders
    assert all(folder.name.endswith(run_id) for folder in folders)
    assert any(folder.glob("*.wandb") for folder in folders)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mlflow": {}}, "sinks.mlflow is unknown; there are wandb, tensorboard, prometheus"),
        ({"prometheus": {"prot": 1}}, "sinks.prometheus.prot is unknown; prometheus takes port, host"),
        ({"tensorboard": {"x": 1}}, "takes no options"),
    ],
)
def test_what_cannot_work_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        check_sinks(config)
