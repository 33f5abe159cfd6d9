"""Runs whose engine sleeps while the trainer works: the records and the bytes of those whose engine does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlloop.cli.train import _make_jobs
from rlloop.launch.local import local_parts
from rlloop.launch.prepare import prepare
from rlloop.launch.regions import region_parts
from rlloop.launch.workers import Colocated, Replica
from rlloop.runs.folder import RunFolder
from tests.support.ranked_run import finish, same, start
from tests.support.tiny_run import make_model_once


@pytest.mark.parametrize("overrides", [(), ("trainer.layout.tp=2", "rollout.layout.tp=2")], ids=["alone", "tp"])
def test_a_run_that_sleeps_is_the_run_that_does_not(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    finish(start(tmp_path / "awake", 1, "trainer.num_steps=2"))
    finish(start(tmp_path / "asleep", 2 if overrides else 1, "trainer.num_steps=2", "rollout.sleep=true", *overrides))
    same(tmp_path / "asleep", tmp_path / "awake", 2)


@pytest.fixture
def job_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A run of a tiny model, by its overrides."""
    make_model_once(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    usual = ["model.path=model", "reward._target_=learnable.reward", "device=cpu", f"run.dir={tmp_path / 'run'}"]
    return lambda *overrides: _make_jobs("countdown", [("", [*usual, *overrides])])[0]


@pytest.mark.parametrize("sleep", ["true", "null"])
def test_the_trainers_of_a_process_and_of_ranks_know_the_engine_that_sleeps(
    tmp_path: Path, job_of: Callable[..., Any], sleep: str
) -> None:
    job = job_of(f"rollout.sleep={sleep}")
    worker, prepared = Colocated(job.config, "model", 1), prepare(job.config)
    with local_parts(job.config, prepared, RunFolder(tmp_path / "run")) as parts:
        for trainer, engine in ((parts.trainer, parts.engine), (worker.trainer, worker.engine)):
            assert trainer.neighbours == ([engine] if sleep == "true" else [])  # by default, on a GPU alone
    prepared.scorer.close()
    assert not Replica(job.config, "model", 1).engine.sleeps


@pytest.mark.parametrize("sleep", ["true", "null"])
def test_the_engine_of_a_regions_trainer_which_makes_canaries_sleeps_too(
    tmp_path: Path, job_of: Callable[..., Any], sleep: str
) -> None:
    job = job_of(f"rollout.sleep={sleep}", "fleet=regions", "fleet.port=0")
    prepared = prepare(job.config)
    with region_parts(job.config, prepared, RunFolder(tmp_path / "run")) as parts:
        sync: Any = parts.sync
        trainer: Any = parts.trainer
        own = sync.reference.engine
        assert trainer.neighbours == ([own] if sleep == "true" else [])
        first, again = ([each.token_ids for each in sync.reference.canary(0).expected] for _ in range(2))
        if sleep == "true":
            own.sleep()
        assert [each.token_ids for each in sync.reference.canary(0).expected] == first == again
    prepared.scorer.close()
