"""What `rlloop verify` finds in a history that is not as it should be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlloop.config import ProfileConfig
from rlloop.models import save_model
from rlloop.parity.certificate import Certificate, bits_digest
from rlloop.records import Journal, RunFolder, read_rollouts, rollout_rows
from rlloop.rescore import rescore
from rlloop.rollout import Engine
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from rlloop.verify import verify
from tests.parity.models import tiny_qwen3

CONFIG = {
    "model": {"dtype": "float32", "profile": vars(ProfileConfig())},
    "parity": {"mode": "require"},
    "fleet": {"max_version_lag": 0},
    "rollout": {"drift": {"stale_steps": 0}},
}
LEDGER = [f"ledger/{name}" for name in ("sampled", "accepted", "rejected", "dropped", "trained")]
ORIGIN = "eu/127.0.0.1:1"


@pytest.fixture
def run(tmp_path) -> Path:
    """Step 4 of a run, sampled with the weights of version 3, whose checkpoint is there."""
    model = tiny_qwen3(64)
    engine = Engine(model)
    engine.set_version(3)
    prompts = [[3, 4 + place] for place in range(6)]
    sampling = [SamplingParams(max_tokens=8, seed=place, temperature=0.7, top_k=20, min_tokens=2) for place in range(6)]
    samples = [
        Sample(f"4/{place}/0", Example("e", made.prompt_ids, "", {}), made, "", RewardResult(0.0), place)
        for place, made in enumerate(engine.generate(prompts, sampling))
    ]
    outcomes = ["trained"] * 4 + ["dropped: no signal in its group", "rejected: reward timeout"]
    with RunFolder(tmp_path) as folder:
        folder.adopt(CONFIG)
        rows = rollout_rows(samples, outcomes, [None] * 6, "print")
        folder.write_rollouts(4, [{**row, "origin": ORIGIN} for row in rows])
    save_model(model, tmp_path / "checkpoints" / "step_3")
    Journal(tmp_path / "fleet.jsonl").append({"event": "serving", "engine": ORIGIN, "version": 3})
    return tmp_path


def check(run: Path, name: str) -> list[str]:
    [found] = [found for found in verify(run) if found.name == name]
    return found.problems


def change(run: Path, *places: int, folder: str = "rollouts", **fields) -> None:
    """Write other things into some completions of step 4."""
    import msgspec
    import zstandard

    file = run / folder / "step_00000004.jsonl.zst"
    rows = read_rollouts(run / "rollouts" / file.name)
    for place in places:
        rows[place] |= fields
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(zstandard.compress(b"\n".join(map(msgspec.json.encode, rows)) + b"\n"))


def test_a_whole_history(run):
    assert check(run, "outcomes") == check(run, "fleet") == []
    found, problems = rescore(run, 64)
    assert problems == []
    assert found.startswith("6 completions")
    assert rescore(run, 2)[0].startswith("2 completions")


def test_a_completion_that_did_not_end_or_was_too_old(run):
    change(run, 0, outcome="vanished")
    change(run, 1, outcome="dropped")
    change(run, 2, policy_version=2)
    problems = check(run, "outcomes")
    assert problems == [
        "4/0/0 ended as 'vanished'",
        "4/1/0 ended as 'dropped'",
        "4/2/0 was trained with weights 1 steps old; the run allows 0",
    ]
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "fleet": {"max_version_lag": 1}}))
    assert len(check(run, "outcomes")) == 2


def test_a_completion_of_an_engine_that_never_served_its_version(run):
    change(run, 5, origin="us/127.0.0.1:2")
    assert check(run, "fleet") == ["4/5/0 is of us/127.0.0.1:2, which never served 3"]


def test_one_bit_of_a_stored_logprob_is_found(run):
    [row] = [row for row in read_rollouts(run / "rollouts/step_00000004.jsonl.zst") if row["uid"] == "4/1/0"]
    flipped = np.array(row["logprobs"], np.float32)
    flipped[-1:].view(np.int32)[0] ^= 1
    change(run, 1, logprobs=[float(f"{value:.9g}") for value in flipped])
    _, problems = rescore(run, 64)
    assert problems == [f"4/1/0: 1 of {len(flipped)} logprobs are not the bits of step_3"]


def test_a_token_that_the_trainer_found_impossible_is_as_certified(run):
    [row, *others] = read_rollouts(run / "rollouts/step_00000004.jsonl.zst")
    change(run, 0, trainer_logprobs=[None, *row["logprobs"][1:]])
    stored = [np.array(each["logprobs"], np.float32) for each in (row, *others) if each["outcome"] == "trained"]
    impossible = [np.array([-np.inf, *row["logprobs"][1:]], np.float32), *stored[1:]]
    Certificate(Journal(run / "parity.jsonl")).append(
        {
            "step": 4,
            "engine": bits_digest(stored),
            "trainer": bits_digest(impossible),
            "tokens": 0,
            "tokens_different": 1,
        }
    )
    assert check(run, "rollouts") == []


def test_a_certificate_without_its_last_lines_is_found(run):
    for step in range(3):
        Journal(run / "metrics.jsonl").append({"step": step, **dict.fromkeys(LEDGER, 0)})
    Certificate(Journal(run / "parity.jsonl")).append(
        {"step": 1, "version": 0, "tokens": 0, "tokens_different": 0, "engine": "", "trainer": ""}
    )
    assert check(run, "certificate") == ["step 2 has no line"]


def test_what_a_crash_undid_must_come_again(run):
    change(run, folder="orphaned/1/rollouts")
    assert check(run, "orphaned") == []
    change(run, 2, folder="orphaned/1/rollouts", token_ids=[5])
    assert check(run, "orphaned") == ["4/2/0, sampled again after a crash, is another completion"]
    (run / "config.yaml").write_text(json.dumps({**CONFIG, "parity": {"mode": "observe"}}))
    assert check(run, "orphaned") == []
    assert rescore(run, 5)[0].startswith("not done: parity.mode=observe")
