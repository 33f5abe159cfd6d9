"""The documented command, by torchrun itself: other tests set its environment."""

import os
import re
import signal
from pathlib import Path

import pytest
from torch.distributed.run import main

from tests.support.command import ROOT, Command
from tests.support.ranked_run import finish, same
from tests.support.tiny_run import command_of, held, steps, train
from tests.support.waiting import until


def torchrun(folder: Path, *overrides: str, options: tuple[str, ...] = ()) -> Command:
    arguments = ["--standalone", "--nproc-per-node", "2", *options, "-m", "rlloop", *command_of(folder, *overrides)]
    return Command(*arguments, cwd=folder.parent, env={**os.environ, "PYTHONPATH": f"{ROOT}"}, program=main)


def test_its_summary_has_the_error(tmp_path):
    output, _ = torchrun(tmp_path / "run", "trainer.layout.tp=2", "trainer.layout.cp=2").communicate()
    summary = output[output.index("Root Cause") :]
    assert "cp is 2 and tp 2, which both split heads; set trainer.layout.cp=1" in summary, output


def test_its_summary_has_the_errors_of_a_sweep(tmp_path):
    output, _ = torchrun(tmp_path / "run", "trainer.layout.dp_shard=3", "-m", "seed=0,1").communicate()
    summary = output[output.index("Root Cause") :]
    for name in ("seed=0", "seed=1"):
        assert f"{name}: trainer.layout and rollout.layout have 3 ranks, and torchrun has started 2" in summary, output


@pytest.mark.slow
def test_the_other_ranks_end_after_rank_0_before_torchrun_must_kill_them(tmp_path):
    run = tmp_path / "run"
    with held(run, 2):
        process = torchrun(run, "trainer.layout.dp_shard=2")
        until(lambda: steps(run) == 2, process)
        [rank_0] = re.findall(r"process (\d+)", (run / "run.log").read_text())
        os.kill(int(rank_0), signal.SIGKILL)
        output, _ = process.communicate()
    assert output.count("Signal 9 (SIGKILL)") == 1, output


@pytest.mark.slow
def test_it_starts_all_ranks_again_if_it_may_and_the_run_goes_on(tmp_path):
    run = tmp_path / "run"
    with held(run, 4):
        process = torchrun(run, "trainer.layout.dp_shard=2", options=("--max-restarts", "1"))
        until(lambda: steps(run) == 4, process)
        [rank_0] = re.findall(r"process (\d+)", (run / "run.log").read_text())
        os.kill(int(rank_0), signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    finish([train(tmp_path / "whole")])
    same(run, tmp_path / "whole")
