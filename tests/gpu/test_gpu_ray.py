"""Actors of Ray on a GPU, two of which may share one: the same bits as a run in one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.gpu_runs import train
from tests.support.tiny_run import history

pytest.importorskip("ray")
pytestmark = [  # the warnings are vLLM's
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("working_folder"),
]
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM 0.26 is not installed")


@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=NEEDS_VLLM)])
def test_a_trainer_and_a_replica_on_one_gpu(engine):
    """The replica samples with weights that reached it as deltas."""
    train("local", "mixture", "trainer.num_steps=2")
    overrides = ["launch=ray", "ray.replicas=1", "ray.gpus_per_worker=0.5", "ray.cpus_per_worker=0.5"]
    train("ray", "mixture", "trainer.num_steps=2", f"rollout.engine={engine}", *overrides)
    assert history(Path("ray")) == history(Path("local"))
