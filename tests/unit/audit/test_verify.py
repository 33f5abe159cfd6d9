"""Findings of `rlloop verify` in damaged or forged histories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from rlloop.audit import Check, Extent, verify
from rlloop.audit.history import History
from rlloop.audit.parts import find_parts
from rlloop.config.run import AlgorithmConfig, RunConfig
from rlloop.launch.compose import as_container
from rlloop.models import save_model
from rlloop.parity.certificate import Certificate, bits_digest
from rlloop.rollout import Engine
from rlloop.runs.folder import Journal, RunFolder, read_rollouts
from rlloop.runs.rollouts import rollout_rows
from rlloop.trainer import CheckpointStore
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from tests.support.tiny_models import tiny_qwen3

CONFIG = as_container(OmegaConf.structured(RunConfig(algorithm=AlgorithmConfig("grpo", "group_norm"))))
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
    CheckpointStore(tmp_path / "checkpoints").save(3, [lambda folder: save_model(model, folder)])
    Journal(tmp_path / "fleet.jsonl").append({"event": "serving", "engine": ORIGIN, "version": 3})
    return tmp_path


def look(run: Path, name: str, **extent) -> Check:
    [found] = [found for found in verify(run, Extent(**extent)) if found.name == name]
    return found


def check(run: Path, name: str) -> list[str]:
    return look(run, name).problems


def certify(run: Path, step: int, **fields) -> None:
    certificate = Certificate(Journal(run / "parity.jsonl"))
    line = {"version": 0, "tokens": 0, "tokens_different": 0, "engine": "", "trainer": ""}
    certificate.begin({"step": step, **line, **fields})
    certificate.seal()


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
    rescored = look(run, "re-scored", rescored=None)
    assert rescored.problems == []
    assert rescored.summary.startswith("6 completions")
    assert look(run, "re-scored", rescored=2).summary.startswith("2 completions")
    assert "; 4 not" in look(run, "re-scored", rescored=2).summary


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
    lagging = {**CONFIG, "fleet": {**CONFIG["fleet"], "max_version_lag": 1}}
    (run / "config.yaml").write_text(yaml.safe_dump(lagging))
    assert len(check(run, "outcomes")) == 2


def test_a_completion_of_an_engine_that_never_served_its_version(run):
    change(run, 5, origin="us/127.0.0.1:2")
    assert check(run, "fleet") == ["4/5/0 is of us/127.0.0.1:2, which never served 3"]


def test_one_bit_of_a_stored_logprob_is_found(run):
    [row] = [row for row in read_rollouts(run / "rollouts/step_00000004.jsonl.zst") if row["uid"] == "4/1/0"]
    flipped = np.array(row["logprobs"], np.float32)
    flipped[-1:].view(np.int32)[0] ^= 1
    change(run, 1, logprobs=[float(f"{value:.9g}") for value in flipped])
    assert look(run, "re-scored", rescored=None).problems == [
        f"4/1/0: 1 of {len(flipped)} logprobs are not the bits of step_3"
    ]


def test_a_token_that_the_trainer_found_impossible_is_as_certified(run):
    [row, *others] = read_rollouts(run / "rollouts/step_00000004.jsonl.zst")
    change(run, 0, trainer_logprobs=[None, *row["logprobs"][1:]])
    stored = [np.array(each["logprobs"], np.float32) for each in (row, *others) if each["outcome"] == "trained"]
    impossible = [np.array([-np.inf, *row["logprobs"][1:]], np.float32), *stored[1:]]
    certify(run, 4, engine=bits_digest(stored), trainer=bits_digest(impossible), tokens_different=1, version=3)
    assert check(run, "rollouts") == []


def test_completions_of_an_engine_that_was_stale_on_purpose(run):
    change(run, *range(6), policy_version=2)
    rows = read_rollouts(run / "rollouts/step_00000004.jsonl.zst")
    digest = bits_digest([np.array(each["logprobs"], np.float32) for each in rows if each["outcome"] == "trained"])
    certify(run, 4, engine=digest, trainer=digest, version=3)
    assert check(run, "rollouts") == ["4/0/0 is of another version than the certificate says (3)"]
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "rollout": {"drift": {"stale_steps": 1}}}))
    assert check(run, "rollouts") == []


def test_a_certificate_without_its_last_lines_is_found(run):
    for step in range(3):
        Journal(run / "metrics.jsonl").append({"step": step, **dict.fromkeys(LEDGER, 0)})
    certify(run, 1, metrics="0" * 64)
    Journal(run / "metrics.jsonl").append({"step": 3, **dict.fromkeys(LEDGER, 0)})
    assert "step 3 has no line" in check(run, "certificate")


def test_what_a_crash_undid_must_come_again(run):
    change(run, folder="orphaned/1/rollouts")
    assert check(run, "orphaned") == []
    change(run, 2, folder="orphaned/1/rollouts", token_ids=[5])
    assert check(run, "orphaned") == ["4/2/0, sampled again after a crash, is another completion"]
    report = run / "orphaned/1/parity_report.json"
    for step, problems in ((3, 1), (4, 0)):  # of another step, and of this one: what was wrong is why it was set aside
        report.write_text(json.dumps({"step": step}))
        assert len(check(run, "orphaned")) == problems
    assert "1 of steps that broke parity" in look(run, "orphaned").summary
    (run / "orphaned/2").mkdir()  # a kill between moving the completions and the report
    report = report.rename(run / "orphaned/2/parity_report.json")
    assert check(run, "orphaned") == []
    report.write_text("{")
    assert len(check(run, "orphaned")) == 1
    (run / "config.yaml").write_text(json.dumps({**CONFIG, "parity": {**CONFIG["parity"], "mode": "observe"}}))
    assert check(run, "orphaned") == []
    assert look(run, "re-scored", rescored=5).summary.startswith("not done: parity.mode=observe")


def test_on_other_numerics_a_difference_says_nothing_of_the_run(run):
    [row] = [row for row in read_rollouts(run / "rollouts/step_00000004.jsonl.zst") if row["uid"] == "4/1/0"]
    change(run, 1, token_ids=[3 if token != 3 else 5 for token in row["token_ids"]])
    assert look(run, "re-scored", rescored=None).problems != []
    certify(run, 4, version=3, fingerprints={"trainer": "of another machine"})
    elsewhere = look(run, "re-scored", rescored=None)
    assert elsewhere.problems == []
    assert "this machine's numerics are not those that the run recorded" in elsewhere.summary


def test_a_stranger_s_code_is_neither_imported_nor_called(run, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for target in ("stranger.reward", "rlloop.launch.run.os.system", "rlloop.rewards.runner.asyncio.run"):
        (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "reward": {"_target_": target}}))
        parts = find_parts(History(run), run_code=False, make_model=False)
        assert parts.reward is None
        assert parts.no_reward == f"{target} is not rlloop's own code; --run-code calls it"


@pytest.mark.parametrize(
    "named", ["algorithm.loss", "algorithm.advantage", "algorithm.correction.mine", "rollout.engine"]
)
def test_a_stranger_s_loss_advantage_and_engine_are_not_imported_either(run, tmp_path, monkeypatch, named):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    config = OmegaConf.create(CONFIG)
    OmegaConf.update(config, "algorithm.loss_args", {}, merge=False)
    OmegaConf.update(config, "algorithm.advantage_args", {}, merge=False)
    OmegaConf.update(config, named, {"_target_": "stranger.code"}, force_add=True)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(config))
    parts = find_parts(History(run), run_code=False, make_model=False)
    refusal = "stranger.code is not rlloop's own code; --run-code calls it"
    if named == "algorithm.advantage":
        assert look(run, "advantages").summary == f"not recomputed: {refusal}"
    else:
        assert parts.no_training == refusal
    allowed = find_parts(History(run), run_code=True, make_model=False)
    assert (allowed.no_advantage, allowed.no_training) == (None, None)


@pytest.mark.parametrize("section", ["model", "rollout"])
def test_a_stranger_s_kernels_are_not_imported_either(run, tmp_path, monkeypatch, section):
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "kernels.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    config = OmegaConf.create(CONFIG)
    for each in {"model", section}:
        OmegaConf.update(config, f"{each}.profile.activation", "stranger.kernels")
    (run / "config.yaml").write_text(OmegaConf.to_yaml(config))
    refusal = "stranger.kernels is not rlloop's own code; --run-code calls it"
    assert look(run, "re-scored", rescored=None).summary == f"not done: {refusal}"
    parts = find_parts(History(run), run_code=False, make_model=False)
    assert (parts.no_kernels, parts.no_training) == (refusal, refusal)
    assert find_parts(History(run), run_code=True, make_model=False).no_kernels is None
