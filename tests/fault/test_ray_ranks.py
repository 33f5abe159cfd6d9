"""launch=ray on several ranks: an actor for each, and a run that goes on by itself when one of them dies."""

import os
import re
import signal
import uuid
from pathlib import Path

import pytest

from rlloop.runs.folder import read_records
from tests.support.fleet_run import outcome
from tests.support.ranked_run import SMALL, finish, same, start
from tests.support.ray_processes import left_behind, parent, ranks_of
from tests.support.tiny_run import held, steps, train
from tests.support.waiting import until

pytest.importorskip("ray")


def test_the_death_of_a_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(tmp_path):
    owner = uuid.uuid4().hex
    run, overrides = tmp_path / "run", ("launch=ray", "ray.elastic=true", "trainer.layout.dp_shard=3")
    with held(run, 4):
        process = train(run, SMALL, *overrides, env={**os.environ, "RLLOOP_TEST_RUN": owner})
        until(lambda: steps(run) == 4, process)
        ranks = ranks_of(owner)
        assert len(ranks) == 3
        os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert " of 3: " in output
    assert "The run goes on from its last checkpoint with 2 ranks" in output
    assert not left_behind(owner), "processes were left behind"
    finish(start(tmp_path / "whole", 1))
    same(run, tmp_path / "whole")


def ended_by(sent: signal.Signals, run: Path, owner: str, *overrides: str) -> str:
    """The output of a run of two ranks that ends with an error, since a signal came to one of them after step 3."""
    with held(run, 3):
        layout = ("launch=ray", "trainer.layout.dp_shard=2")
        process = train(run, SMALL, *layout, *overrides, env={**os.environ, "RLLOOP_TEST_RUN": owner})
        until(lambda: steps(run) == 3, process)
        os.kill(ranks_of(owner)[1], sent)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    return output


def test_the_error_is_the_last_line_that_a_dead_rank_leaves_on_the_terminal(tmp_path):
    """Ray would print paragraphs about each of its processes that ended, above and below."""
    output = ended_by(signal.SIGTERM, tmp_path / "run", uuid.uuid4().hex, "ray.replicas=1")
    said = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines() if line.strip()]
    assert re.match(r"rlloop: rank [01] of 2: The actor died .* Worker .*exits", said[-1]), output
    assert ". To resume from the last checkpoint, in this or another layout: rlloop train --config-name" in said[-1]
    assert "raylet" not in output, output


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_the_run_and_is_named(tmp_path):
    """After `ray.rank_timeout`, within which Ray's processes must have started."""
    owner = uuid.uuid4().hex
    output = ended_by(signal.SIGSTOP, tmp_path / "run", owner, "ray.rank_timeout=60")
    stood = r"rlloop: rank ([01]) of 2: no progress for 60 s \(ray\.rank_timeout\)\. Of all ranks: (.*)\. To resume"
    named = re.search(stood, output)
    assert named, output
    silent = [state for state in named[2].split("; ") if "reports no more" in state]
    assert [state.partition(" (")[0].split()[1] for state in silent] == [named[1]], output
    assert not left_behind(owner), "processes were left behind"


@pytest.mark.slow
def test_ranks_on_two_nodes_make_one_ranks_run(tmp_path, monkeypatch):
    """Each node has room for one of the two."""
    from ray.cluster_utils import Cluster

    owner, run = uuid.uuid4().hex, tmp_path / "run"
    monkeypatch.setenv("RLLOOP_TEST_RUN", owner)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=1)
        with held(run, 3):
            process = train(run, SMALL, "launch=ray", f"ray.address={nodes.address}", "trainer.layout.dp_shard=2")
            until(lambda: steps(run) == 3, process)
            assert len({parent(rank) for rank in ranks_of(owner)}) == 2, "they are children of two nodes' raylets"
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    finally:
        nodes.shutdown()
    finish(start(tmp_path / "whole", 1))
    same(run, tmp_path / "whole")


def test_more_ranks_than_gpus_are_refused_before_ray_starts(tmp_path):
    process = train(tmp_path / "run", "launch=ray", "device=cuda", "trainer.layout.tp=64")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    faults = (
        "trainer.layout and rollout.layout, with ray.replicas=0, need 64 GPUs, and this machine has",
        "device is 'cuda', and this machine has no CUDA device; use device=cpu",
    )
    assert any(fault in output for fault in faults), output


def test_a_refusal_of_one_rank_that_starts_ends_the_run_with_its_exit_code(tmp_path):
    """Rank 0 waits in a collective for rank 1."""
    (tmp_path / "refusing.py").write_text(
        "import torch.distributed as dist\nimport rlloop\nclass Engine(rlloop.Engine):\n"
        "    def __init__(self, *given, **named):\n        if dist.get_rank() == 1:\n"
        "            raise rlloop.ConfigError('page_size is odd')\n        super().__init__(*given, **named)\n"
    )
    own = ("trainer.layout.dp_shard=2", "rollout.engine._target_=refusing.Engine")
    process = train(tmp_path / "run", SMALL, "launch=ray", *own)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    assert output.strip().splitlines()[-1] == "rlloop: rank 1 of 2: trainer could not start: page_size is odd"
    assert not (tmp_path / "run").exists(), "nothing was recorded"


@pytest.mark.slow
def test_a_replica_over_ranks_samples_what_one_rank_does(tmp_path):
    owner, run = uuid.uuid4().hex, tmp_path / "run"
    layouts = ("trainer.layout.tp=2", "rollout.layout.tp=2", "ray.replicas=1")
    process = train(run, SMALL, "launch=ray", *layouts, env={**os.environ, "RLLOOP_TEST_RUN": owner})
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    serving = {each["engine"] for each in read_records(run / "fleet.jsonl") if each["event"] == "serving"}
    assert len(serving) == 2
    assert not left_behind(owner), "processes were left behind"
    finish(start(tmp_path / "whole", 1))
    assert outcome(run) == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_ranks_that_ray_ends_for_want_of_memory_are_named_in_one_line(tmp_path):
    """Its own report has paragraphs."""
    few = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    process = train(tmp_path / "run", SMALL, "launch=ray", "trainer.layout.dp_shard=2", env={**os.environ, **few})
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert re.search(r"^rlloop: rank [01] of 2: .* memory", output.strip().splitlines()[-1]), output
