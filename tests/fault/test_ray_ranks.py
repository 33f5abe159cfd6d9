"""launch=ray on several ranks: an actor for each, and a run that goes on by itself when one of them dies."""

import os
import signal
import uuid

import pytest

from tests.support.ranked_run import SMALL, finish, same, start
from tests.support.ray_processes import ray_processes
from tests.support.tiny_run import held, steps, train
from tests.support.waiting import until

pytest.importorskip("ray")


def test_the_death_of_a_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(tmp_path):
    owner = uuid.uuid4().hex
    run, overrides = tmp_path / "run", ("launch=ray", "ray.elastic=true", "trainer.layout.dp_shard=3")
    with held(run, 4):
        process = train(run, SMALL, *overrides, env={**os.environ, "RLLOOP_TEST_RUN": owner})
        until(lambda: steps(run) == 4, process)
        ranks = sorted(pid for pid, command in ray_processes(owner).items() if "ray::Colocated" in command)
        assert len(ranks) == 3
        os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert " of 3: " in output
    assert "The run goes on from its last checkpoint with 2 ranks" in output
    assert not ray_processes(owner), "processes were left behind"
    finish(start(tmp_path / "whole", 1))
    same(run, tmp_path / "whole")


def test_more_ranks_than_gpus_are_refused_before_ray_starts(tmp_path):
    process = train(tmp_path / "run", "launch=ray", "device=cuda", "trainer.layout.tp=64")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert "trainer.layout and rollout.layout, with ray.replicas=0, need 64 GPUs, and this machine has" in output
