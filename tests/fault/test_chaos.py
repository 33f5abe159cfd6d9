"""Five seeds of the campaign (docs/chaos.md), and its checker and shrinker, which must find what is planted."""

from __future__ import annotations

import json
import shutil

import pytest

from rlloop.sync.live import bits_of
from rlloop.sync.manifest import load_key
from rlloop.sync.publisher import Publisher
from rlloop.sync.store import FolderStore
from tests.support import tampering
from tests.support.chaos.campaign import Campaign, as_text, note, parse, read_results, table
from tests.support.chaos.checker import check
from tests.support.chaos.fleet import STEPS, TOKEN
from tests.support.chaos.schedule import KINDS, Fault, draw, shrink

SEEDS = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    return Campaign(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def passed(campaign):
    """The world of a seed that passed."""
    outcome = campaign.run(draw(SEEDS[0], STEPS))
    assert outcome.problems == [], outcome.place
    return outcome.place


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_nothing_is_lost_nor_done_twice_nor_wrong(campaign, passed, seed):
    outcome = campaign.run(draw(seed, STEPS))
    assert outcome.problems == [], f"{outcome.place}: {as_text(draw(seed, STEPS))}"
    assert outcome.events["faults"] > 0


def version(row):
    row["policy_version"] -= 1


def token(row):
    row["token_ids"][0] ^= 1


def again(run):
    """A sample of step 3 is trained in step 4 as well."""
    row = tampering.read_rollouts(tampering.rollouts(run, 3))[5]
    tampering.rows(lambda rows: rows.append(row), step=4)(run)


def other_weight(run):
    file = run / "checkpoints" / "step_6" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)


def other_version(run):
    """A version of the right key that is not the trainer's."""
    publisher = Publisher(FolderStore(run / "weights"), load_key(run.parent / "key"), run_id(run))
    tensors = {name: type(bits)(bits.dtype, bits.array ^ 1) for name, bits in state(run).items()}
    publisher.publish(tensors, STEPS)


def state(run):
    import torch
    from safetensors.torch import load_file

    loaded = load_file(run / "checkpoints" / "step_6" / "model.safetensors")
    return {name: bits_of(tensor.to(torch.bfloat16)) for name, tensor in loaded.items()}


def run_id(run):
    return json.loads((run / "fleet.json").read_text())["run_id"]


def append(name, text):
    def plant(run):
        with (run.parent / name).open("a") as file:
            file.write(text + "\n")

    return plant


def private_key(run):
    append("logs/relay_eu.log", (run.parent / "key").read_text().splitlines()[1])(run)


def other_result(run):
    file = run.parent / "api.jsonl"
    lines = file.read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), "result": "f" * 64})
    file.write_text("\n".join(lines) + "\n")


PLANTED = {
    "another version": (tampering.row(version), "samples: 5/"),
    "another token": (tampering.row(token), "samples: 5/"),
    "trained twice": (again, "was trained 2 times, in steps [3, 4]"),
    "lost": (tampering.rows(lambda rows: rows[:7] + rows[8:]), "was lost"),
    "never asked for": (tampering.row(lambda row: row.update(uid="5/9/9")), "5/9/9 was never asked for"),
    "a weight": (other_weight, "weights: model.safetensors of step_6"),
    "a version in the store": (other_version, "store: "),
    "a line of the certificate": (tampering.lines("parity.jsonl", lambda all: all[:3] + all[4:]), "certificate: "),
    "a result of the API": (other_result, "API: result 2"),
    "a token in a log": (append("logs/engine_us.log", f"with {TOKEN}"), "the fleet's token stands in logs/engine_us"),
    "a key in a log": (private_key, "secrets: key stands in logs/relay_eu.log"),
    "a token in a file": (tampering.row(lambda row: row.update(text=TOKEN)), "fleet's token stands in run/rollouts"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_the_checker_finds_what_is_planted(campaign, passed, tmp_path, name):
    """Also where everything that the run's folder holds was made to agree with it."""
    plant, expected = PLANTED[name]
    world = tmp_path / "world"
    shutil.copytree(passed, world)
    plant(world / "run")
    if name not in ("a line of the certificate", "a version in the store"):
        tampering.forge(world / "run")
    found = check(world, campaign.alone, rescored=0)
    assert any(expected in problem for problem in found), found


def test_a_schedule_is_a_function_of_its_seed_and_seeds_go_through_all_kinds():
    drawn = [draw(seed, STEPS) for seed in range(len(KINDS))]
    assert drawn == [draw(seed, STEPS) for seed in range(len(KINDS))]
    assert {fault.kind for faults in drawn for fault in faults} == set(KINDS)
    assert parse(as_text(drawn[3])) == drawn[3]
    assert all(fault.where in KINDS[fault.kind] for faults in drawn for fault in faults)


@pytest.mark.parametrize("needed", [{4}, {0, 5}, {1, 2, 3}])
def test_a_failing_schedule_shrinks_to_what_it_needs(needed):
    faults = [Fault(step, 0.0, "kill", "trainer", 0.2, step) for step in range(6)]
    runs = []

    def fails(part):
        runs.append(part)
        return needed <= {fault.step for fault in part}

    assert {fault.step for fault in shrink(faults, fails)} == needed
    assert len(runs) < 30


def test_results_are_added_to_and_shown(tmp_path):
    file = tmp_path / "chaos.json"
    schedule = [{"kind": "flip", "where": "x"}]
    record = {"commit": "c", "cpu_seconds": 2.0, "events": {"messages hit": 7}, "schedule": schedule}
    for seed, problems in ((5, []), (2, ["lost"]), (5, ["x | y"])):
        note(file, {"seed": seed, "problems": problems, **record})
    assert [each["seed"] for each in read_results(file)] == [2, 5]
    shown = table(read_results(file))
    assert "2 seeds have been run: 0 passed, 2 failed" in shown
    assert "| flip | 2 | 2 |" in shown
    assert "| 5 | c | flip x | 0 | 7 | **failed**: x / y |" in shown
