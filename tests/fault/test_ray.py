"""launch=ray: the same bits as launch=local whatever the number of engines, even when one is killed in mid-run."""

import os
import signal
import time
from pathlib import Path

import pytest

from rlloop.records import read_records
from tests.fault.tiny_run import history, train

pytest.importorskip("ray")


def workers(owner: int) -> dict[int, str]:
    """Ray's processes of one run: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended while we looked
            if f"RLLOOP_TEST_RUN={owner}".encode() in environment and "ray" in command:
                found[int(entry.name)] = command
    return found


def finish(process):
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def same(folder: Path, other: Path) -> None:
    assert history(folder) == history(other)
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json", "loop.json"):
        files = [run / "checkpoints" / "step_6" / name for run in (folder, other)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def test_one_engine_or_three_and_a_killed_one_give_the_bits_of_a_local_run(tmp_path, monkeypatch):
    finish(train(tmp_path / "local"))

    monkeypatch.setenv("RLLOOP_TEST_RUN", "alone")
    finish(train(tmp_path / "alone", "launch=ray", "ray.replicas=0"))
    same(tmp_path / "alone", tmp_path / "local")
    assert not workers("alone"), "processes were left behind"

    monkeypatch.setenv("RLLOOP_TEST_RUN", "three")
    process = train(tmp_path / "three", "launch=ray", "ray.replicas=2", "ray.cpus_per_worker=0.5")
    metrics = tmp_path / "three" / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 2):
        time.sleep(0.01)
    victims = [pid for pid, command in workers("three").items() if "ray::Replica" in command]
    assert victims, "no replica was there to be killed"
    os.kill(victims[0], signal.SIGKILL)
    finish(process)
    same(tmp_path / "three", tmp_path / "local")
    assert not workers("three"), "processes were left behind"
    assert len(list(read_records(metrics))) == 7
