"""Kill -9 at any moment, resume, and nothing shows it: weights, optimizer and records are those of an unbroken run."""

import os
import resource
import signal
from pathlib import Path

import pytest

from rlloop.audit import Extent, verify
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from tests.support import fake_run
from tests.support.command import Command
from tests.support.fake_run import STEPS
from tests.support.tiny_run import LEARNABLE, held, history, steps, train
from tests.support.waiting import until


def start(folder: Path, *stops: int) -> Command:
    return Command(str(folder), *map(str, stops), cwd=folder.parent, program=fake_run.main)


def finish(folder: Path) -> tuple[int, str]:
    """(step it began after, weights and optimizer state at the end)"""
    process = start(folder)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    began, weights = output.splitlines()
    return int(began), weights


def kill_after(folder: Path, records: int) -> None:
    """Start, wait until the run has written so many records of steps, and kill it wherever it is then, which is not far
    behind though the test may look late."""
    kill_when(start(folder, records + 20), folder, records)


def kill_when(process: Command, folder: Path, records: int) -> None:
    until(lambda: steps(folder) >= records, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended by itself before it could be killed"


def test_killed_again_and_again_it_ends_as_if_nothing_had_happened(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    _, expected = finish(whole)
    for records in (1, 3, 9, 20, 41):
        kill_after(broken, records)
    began, weights = finish(broken)
    assert began >= 36
    assert began % 3 == 0
    assert weights == expected
    assert history(broken) == history(whole)
    assert [record["step"] for record in read_records(broken / "metrics.jsonl")] == list(range(STEPS + 1))
    assert not list((broken / "checkpoints").glob("tmp*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of the real parts that nothing stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    output, _ = (process := train(folder)).communicate(timeout=240)
    assert process.returncode == 0, output
    return folder


def test_the_real_parts_resume_bit_for_bit(tmp_path, whole):
    broken = tmp_path / "broken"
    with held(broken, 4):  # there is no checkpoint of step 3, nor of step 4
        kill_when(train(broken), broken, records=4)
    (tmp_path / "learnable.py").write_text(LEARNABLE)
    output, _ = (process := train(broken)).communicate()
    assert process.returncode == 0, output
    assert "resuming after step 2" in output
    assert "the reward's source is not what it was up to step 2: learnable changed" in output
    assert history(broken) == history(whole)
    assert [
        problem for run in (whole, broken) for check in verify(run, Extent(None)) for problem in check.problems
    ] == []
    assert any(row["advantage"] for row in read_rollouts(rollout_files(whole)[-1])), "nothing was learned from"
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json"):
        files = [folder / "checkpoints" / "step_6" / name for folder in (whole, broken)]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    assert sorted(path.name for path in (broken / "checkpoints").iterdir()) == ["step_4", "step_6"]


def test_a_disk_without_room_is_said_and_costs_nothing(tmp_path, whole):
    """A limit on the size of files, which a checkpoint's tensors pass and a record does not."""
    broken = tmp_path / "broken"
    with held(broken, 4):
        process = train(broken)
        until(lambda: steps(broken) == 4, process)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (80_000, 80_000))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert f"{broken} cannot grow: " in output
    assert "Make room; to resume: rlloop train" in output
    output, _ = (process := train(broken)).communicate(timeout=240)
    assert process.returncode == 0, output
    assert history(broken) == history(whole)
