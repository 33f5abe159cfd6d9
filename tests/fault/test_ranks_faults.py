"""A run on several ranks ends with the bytes of one rank's, whatever happens to its ranks on the way."""

import json
import math
import os
import random
import signal
import time
from pathlib import Path

import pytest

from rlloop.audit import Extent, verify
from tests.support.command import Command
from tests.support.ranked_run import finish, same, start
from tests.support.tiny_run import held, make_model, steps
from tests.support.waiting import until


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """One rank's run, which nothing stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    finish(start(folder, 1))
    return folder


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """One rank's run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    finish(start(folder, 1, "trainer.num_steps=2"))
    return folder


def ended(ranks: list[Command]) -> tuple[str, list[int | None]]:
    """Rank 0's output, and the exit codes of all."""
    output, *_ = [rank.communicate(60)[0] for rank in ranks]
    return output, [rank.returncode for rank in ranks]


def layouts(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "parity.jsonl").read_text().splitlines())
    return [line["layout"] for line in lines if "layout" in line]


def test_four_ranks_then_three_then_one_end_as_if_nothing_had_happened(tmp_path, whole):
    folder = tmp_path / "run"
    with held(folder, 4):
        ranks = start(folder, 4, "trainer.layout.dp_shard=2", "trainer.layout.dp_replicate=2")
        until(lambda: steps(folder) == 4, ranks[0])
        os.kill(ranks[2].pid, signal.SIGKILL)
    output, codes = ended(ranks)
    assert codes[0] == 1, output
    assert "rlloop: rank 2 of 4: it reports no more: its process is gone or stopped. To resume from" in output
    assert "in this or another layout: torchrun --nproc-per-node 4 -m rlloop train" in output

    with held(folder, 5):
        ranks = start(folder, 3, "trainer.layout.dp_shard=3")
        until(lambda: steps(folder) == 5, ranks[0])  # it goes on after step 2
        os.kill(ranks[0].pid, signal.SIGINT)
    output, codes = ended(ranks)
    assert codes == [130, 0, 0], output
    assert "Interrupted. To resume: torchrun --nproc-per-node 3 -m rlloop train" in output

    finish(start(folder, 1))
    same(folder, whole)
    assert layouts(folder) == [
        {"trainer": {"dp_shard": 2, "dp_replicate": 2}}, {"trainer": {"dp_shard": 3}}, {},
    ]  # fmt: skip
    assert [problem for check in verify(folder, Extent(None)) for problem in check.problems] == []


@pytest.mark.parametrize(
    "layouts",
    [
        ("trainer.layout.dp_shard=2", "rollout.layout.tp=2"),
        ("trainer.layout.tp=2",),  # an engine on each rank
        ("trainer.layout.pp=2", "rollout.layout.pp=2"),
        ("trainer.layout.dp_shard=2", "rollout.layout.pp=2"),
        ("trainer.layout.pp=2",),  # stages of the trainer, and a whole engine on each rank
        ("trainer.layout.pp=2", "rollout.layout.tp=2"),
        ("trainer.layout.dp_shard=2", "trainer.shard=parameters"),
    ],
)
def test_any_layout_of_trainer_and_engine_makes_the_same_run(tmp_path, short, layouts):
    finish(start(tmp_path / "run", 2, "trainer.num_steps=2", *layouts))
    same(tmp_path / "run", short, step=2)


def test_a_rank_that_stands_still_is_named(tmp_path):
    with held(tmp_path / "run", 3):
        ranks = start(tmp_path / "run", 2, "trainer.layout.dp_shard=2", "ray.rank_timeout=20")
        until(lambda: steps(tmp_path / "run") == 3, ranks[0])
        os.kill(ranks[1].pid, signal.SIGSTOP)
    output, _ = ranks[0].communicate()
    os.kill(ranks[1].pid, signal.SIGCONT)
    _, codes = ended(ranks)
    assert codes[0] == 1, output
    assert "rlloop: rank 1 of 2: no progress for 20 s (ray.rank_timeout). Of all ranks: rank 0 " in output
    assert ". To resume from the last checkpoint, in this or another layout: torchrun --nproc-per-node 2 -m " in output


def test_a_run_whose_processes_were_all_stopped_goes_on(tmp_path):
    """As by Ctrl-Z, for longer than a rank may stand still."""
    (tmp_path / "slow").touch()
    (tmp_path / "slowly.py").write_text(
        "import time\nfrom pathlib import Path\nimport rlloop\nclass Engine(rlloop.Engine):\n"
        "    def generate(self, *given, **named):\n        while Path('slow').exists():\n"
        "            Path('waits').touch()\n            time.sleep(0.1)\n"
        "        return super().generate(*given, **named)\n"
    )
    given = "trainer.num_steps=1", "rollout.engine._target_=slowly.Engine", "ray.rank_timeout=20"
    ranks = start(tmp_path / "run", 2, "trainer.layout.dp_shard=2", *given)
    until((tmp_path / "waits").exists, ranks[0])
    time.sleep(2)  # in which the watcher looks
    for number, seconds in ((signal.SIGSTOP, 25), (signal.SIGCONT, 2)):
        for rank in ranks:
            os.kill(rank.pid, number)
        time.sleep(seconds)
    (tmp_path / "slow").unlink()
    output, codes = ended(ranks)
    assert codes == [0, 0], output


def test_a_rank_that_never_came_is_named(tmp_path):
    """Rank 1 waits for it."""
    ranks = start(tmp_path / "run", 3, "trainer.layout.dp_shard=3", "ray.rank_timeout=30")
    os.kill(ranks[2].pid, signal.SIGKILL)
    output, codes = ended(ranks)
    assert codes[0] == 1, output
    named = "rlloop: rank 2 of 3: no report within 30 s (ray.rank_timeout): not started, or ended at once. Of all ranks"
    assert f"{named}: rank 0 " in output
    assert output.count("has not reported") == 1, output


def test_a_rank_that_died_before_its_first_report_is_named(tmp_path):
    (tmp_path / "dies.py").write_text(
        "import os, signal\nimport rlloop\nclass Engine(rlloop.Engine):\n    def __init__(self, *given, **named):\n"
        "        if os.environ['RANK'] == '1':\n            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        super().__init__(*given, **named)\n"
    )
    ranks = start(tmp_path / "run", 2, "rollout.layout.dp_replicate=2", "rollout.engine._target_=dies.Engine")
    output, codes = ended(ranks)
    assert codes == [1, -signal.SIGKILL], output
    assert "rlloop: rank 1 of 2: it " in output  # has not reported, or reports no more


def test_an_error_on_one_rank_ends_all_and_is_told_with_its_number(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os\nimport rlloop\nclass Engine(rlloop.Engine):\n    def generate(self, *given):\n"
        "        if os.environ['RANK'] == '1':\n            raise ZeroDivisionError('of this rank')\n"
        "        return super().generate(*given)\n"
    )
    ranks = start(tmp_path / "run", 2, "rollout.layout.dp_replicate=2", "rollout.engine._target_=broken.Engine")
    output, codes = ended(ranks)
    assert codes == [1, 0], output
    assert "rlloop: rank 1 of 2: ZeroDivisionError: of this rank" in output


def test_layouts_and_processes_must_agree(tmp_path):
    ranks = start(tmp_path / "run", 2, "trainer.layout.dp_shard=4")
    output, codes = ended(ranks)
    assert codes == [2, 0], output
    assert "trainer.layout and rollout.layout have 4 ranks, and torchrun has started 2 processes" in output


def test_a_dry_run_builds_all_ranks(tmp_path):
    ranks = start(tmp_path / "run", 2, "trainer.layout.dp_shard=2", "rollout.layout.tp=2", "--dry-run")
    assert "Dry run: everything is built" in finish(ranks)
    assert not (tmp_path / "run").exists()


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
KINDS = (  # of layouts, for a model with experts; trainer and engines have the same
    ({"dp_shard": 2}, {"dp_shard": 3}, {"dp_shard": 4}),
    ({"tp": 2}, {"tp": 2, "dp_shard": 2}),
    ({"pp": 2}, {"pp": 2, "dp_shard": 2}),
    ({"dp_shard": 2, "ep": 2}, {"dp_shard": 3, "ep": 3}, {"dp_shard": 2, "tp": 2, "ep": 4}),
)
MANY = pytest.mark.skipif(
    "RLLOOP_MANY_KILLS" not in os.environ, reason="takes fifteen minutes; set RLLOOP_MANY_KILLS=1"
)


def degrees(layout: dict[str, int]) -> list[str]:
    return [f"{part}.layout.{axis}={degree}" for part in ("trainer", "rollout") for axis, degree in layout.items()]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kills", "length", "later"),  # later: records of steps after which a rank is killed; 0: it may not have begun yet
    [(4, 24, (1,)), pytest.param(20, 80, (0, 1), marks=MANY)],
)
def test_killed_at_random_moments_it_ends_as_if_nothing_had_happened(tmp_path, kills, length, later):
    rng, folder, alone, length = random.Random(18), tmp_path / "run", tmp_path / "alone", f"trainer.num_steps={length}"
    patience = "ray.rank_timeout=30"  # for a rank that was killed before its first report
    make_model(tmp_path, **EXPERTS)
    finish(start(alone, 1, length))
    for kill in range(kills):
        layout = rng.choice(KINDS[kill % len(KINDS)])
        size = math.prod(degree for axis, degree in layout.items() if axis != "ep")
        records = steps(folder) + rng.choice(later)
        with held(folder, records + 4):  # it goes on while the test sleeps, but not to its end
            ranks = start(folder, size, *degrees(layout), length, patience)
            until(lambda records=records: steps(folder) >= records, ranks[0])
            time.sleep(rng.uniform(0, 0.6))
            victim = rng.choice(ranks)
            assert victim.poll() is None, f"the run was over before kill {kill + 1}"
            os.kill(victim.pid, signal.SIGKILL)
        output, _ = ended(ranks)
        named = ranks.index(victim)
        assert named == 0 or f"rlloop: rank {named} of {size}: " in output, (layout, output)
    finish(start(folder, 2, "trainer.layout.dp_shard=2", length))
    same(folder, alone, int(length.partition("=")[2]))
