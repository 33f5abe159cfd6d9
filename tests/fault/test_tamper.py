"""Ways to tamper with a finished run: each is found, by the checks that need nothing, or by what its table says."""

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlloop.audit import Extent, verify
from rlloop.errors import RunError
from rlloop.parity.certificate import Statement
from rlloop.parity.witness import message
from rlloop.recipes.countdown.task import Countdown
from rlloop.runs.folder import as_json_file, read_rollouts, summarize
from tests.support import tampering
from tests.support.tampering import (
    KEPT,
    STEPS,
    Tamper,
    agree,
    both,
    flip,
    forge,
    lines,
    make_run,
    problems_of,
    put,
    record,
    remove,
    reseal,
    rollouts,
    row,
    rows,
    text,
)


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("tampered"))


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def bit(values: list[float]) -> list[float]:
    """The last one's neighbour."""
    return [*values[:-1], float(f"{np.nextafter(np.float32(values[-1]), np.float32(-99)):.9g}")]


def swap(found: list, a: int = 2, b: int = 3) -> list:
    found[a], found[b] = found[b], found[a]
    return found


def moved(found: list) -> None:
    """The logprobs of two completions of one length exchanged."""
    lengths = [len(each["logprobs"]) for each in found]
    a, b = next(
        (a, b) for a in range(len(found)) for b in range(a)
        if lengths[a] == lengths[b] and found[a]["logprobs"] != found[b]["logprobs"]
    )  # fmt: skip
    found[a]["logprobs"], found[b]["logprobs"] = found[b]["logprobs"], found[a]["logprobs"]


def best_of(found: list) -> None:
    """A group's best completion in the place of its worst."""
    group = sorted((each for each in found if each["group"] == 0), key=lambda each: each["reward"])
    for key in ("token_ids", "logprobs", "text", "reward", "solved", "components", "finish_reason", "advantage"):
        group[0][key] = group[-1][key]
    group[0]["raw_logprobs"] = group[-1].get("raw_logprobs", group[-1]["logprobs"])


def cut_short(each: dict) -> None:
    for key in ("token_ids", "logprobs"):
        each[key].pop()


def other_token(each: dict) -> None:
    """A word of the same length, and the text that goes with it: nothing but a draw tells."""
    task, ids = Countdown(seed=0), each["token_ids"]
    others = ([*ids[:at], token, *ids[at + 1 :]] for at in range(len(ids)) for token in range(5, 100))
    made = next(other for other in others if other != ids and len(task.decode(other)) == len(each["text"]))
    each.update(token_ids=made, text=task.decode(made))


def exchanged(run: Path) -> None:
    one, other = (rollouts(run, step).read_bytes() for step in (3, 4))
    rollouts(run, 3).write_bytes(other)
    rollouts(run, 4).write_bytes(one)


def beyond(run: Path) -> None:
    put(run, STEPS + 2, read_rollouts(rollouts(run, STEPS)))


def weights(step: int) -> Tamper:
    return flip(f"checkpoints/step_{step}/model.safetensors")


def extra(run: Path) -> None:
    (run / "checkpoints/step_6/model.safetensors.index.json").write_text("{}")


def cut(keep: int) -> Tamper:
    """Every record after a step, with its checkpoints."""

    def tamper(run: Path) -> None:
        for step in range(keep + 1, STEPS + 1):
            rollouts(run, step).unlink()
            shutil.rmtree(run / "checkpoints" / f"step_{step}", ignore_errors=True)
        for name in ("metrics.jsonl", "parity.jsonl", "signatures.jsonl"):
            lines(name, lambda found: [line for line in found if json.loads(line)["step"] <= keep])(run)

    return tamper


def older(run: Path) -> None:
    """As a version would have left it whose certificate covered logprobs alone."""

    def stripped(found: list[bytes]) -> list[bytes]:
        new = ("rollouts", "metrics", "config", "model", "checkpoints")
        return [
            json.dumps({k: v for k, v in json.loads(line).items() if k not in new}).encode() + b"\n" for line in found
        ]

    lines("parity.jsonl", stripped)(run)


def other_key(run: Path) -> None:
    """Signed by somebody else."""
    key = Ed25519PrivateKey.generate()

    def signed(line: bytes) -> bytes:
        said = {name: value for name, value in json.loads(line).items() if name != "signature"}
        return msgspec.json.encode({**said, "signature": key.sign(message(Statement(**said))).hex()}) + b"\n"

    lines("signatures.jsonl", lambda found: [signed(line) for line in found])(run)


def ended_at(step: int) -> Tamper:
    """As a run that was interrupted there, and never had gone on."""

    def tamper(run: Path) -> None:
        cut(step)(run)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        (run / "summary.json").write_bytes(as_json_file(summarize(records, "interrupted")))

    def forgotten(line: bytes) -> bytes:
        return msgspec.json.encode({k: v for k, v in json.loads(line).items() if k != "checkpoints"}) + b"\n"

    return both(tamper, lines("parity.jsonl", lambda found: [forgotten(line) for line in found]))


# What completions or metrics are tampered with, and the check that finds it though certificate, checkpoints and summary
# were made to agree with it. Completions are those of a step whose weights are kept.
FORGED: dict[str, tuple[str, Tamper]] = {
    "reward": ("rewards", both(row(lambda each: each.update(reward=6.0)), agree)),
    "solved": ("rewards", both(row(lambda each: each.update(solved=not each["solved"])), agree)),
    "component": ("rewards", both(row(lambda each: each.update(components={"style": 1.0})), agree)),
    "text": ("rewards", both(row(lambda each: each.update(text="3 + 4")), agree)),
    "advantage": ("advantages", row(lambda each: each.update(advantage=each["advantage"] + 0.5))),
    "prompt": ("requests", row(lambda each: each.update(prompt="1 2 3 -> 6"))),
    "prompt_ids": ("requests", row(lambda each: each.update(prompt_ids=each["prompt_ids"][::-1]))),
    "example": ("requests", row(lambda each: each.update(example="1-2-3-6"))),
    "seed": ("requests", row(lambda each: each["sampling"].update(seed=7))),
    "temperature": ("requests", row(lambda each: each["sampling"].update(temperature=0.5))),
    "finish_reason": ("requests", both(row(lambda each: each.update(finish_reason="stop")), agree)),
    "aborted": ("outcomes", both(row(lambda each: each.update(finish_reason="abort")), agree)),
    "cut short": ("requests", both(row(cut_short), agree)),
    "token": ("re-scored", both(row(other_token), agree)),
    "logprob": ("re-scored", row(lambda each: each.update(logprobs=bit(each["logprobs"])))),
    "raw logprob": ("re-scored", row(lambda each: each.update(raw_logprobs=bit(each["logprobs"])))),
    "trainer's logprob": ("aggregates", row(lambda each: each.update(trainer_logprobs=bit(each["logprobs"])))),
    "logprobs moved": ("re-scored", both(rows(moved), agree)),
    "best of four": ("re-scored", both(rows(best_of), agree)),
    "completion removed": ("requests", rows(lambda found: found[1:])),
    "completion twice": ("rollouts", rows(lambda found: [*found, found[0]])),
    "completion renamed": ("requests", row(lambda each: each.update(uid="5/9/0"))),
    "completions exchanged": ("requests", rows(swap)),
    "outcome": ("advantages", row(lambda each: each.update(outcome="dropped: no signal in its group"))),
    "rejected": ("rollouts", row(lambda each: each.update(outcome="rejected: reward timeout"))),
    "policy_version": ("outcomes", row(lambda each: each.update(policy_version=3))),
    "engine": ("rollouts", row(lambda each: each.update(engine="0" * 64))),
    "group": ("requests", row(lambda each: each.update(group=2))),
    "rollouts exchanged": ("outcomes", exchanged),
    "rollouts of a step that never was": ("rollouts", beyond),
    "reward/mean": ("aggregates", record(5, **{"reward/mean": 6.0})),
    "rollout/length_mean": ("aggregates", record(5, **{"rollout/length_mean": 3.0})),
    "ledger": ("rollouts", record(5, **{"ledger/rejected": 1, "ledger/sampled": 17})),
    "k3": ("aggregates", record(5, **{"parity/k3": 0.1})),
    "tokens_different": ("aggregates", record(5, **{"parity/tokens_different": 0.5})),
    "seed of the run": ("requests", text("config.yaml", "seed: 0\n", "seed: 1\n")),
    "weights": ("re-scored", flip("checkpoints/step_4/model.safetensors")),
    "oldest kept checkpoint missing": ("checkpoints", remove("checkpoints/step_4")),
    "last checkpoint missing": ("checkpoints", remove("checkpoints/step_6")),
    "every checkpoint missing": ("checkpoints", remove("checkpoints")),
    "fingerprints": ("certificate", text("fingerprints.json", '"torch": "2', '"torch": "1')),
    "fingerprints missing": ("certificate", remove("fingerprints.json")),
    "summary missing": ("summary", remove("summary.json")),
}

# And those that need no more than the certificate, which nobody wrote anew.
CHAINED: dict[str, tuple[str, Tamper]] = {
    "record twice": ("metrics", lines("metrics.jsonl", lambda found: [*found[:4], found[3], *found[4:]])),
    "records swapped": ("metrics", lines("metrics.jsonl", swap)),
    "record removed": ("metrics", lines("metrics.jsonl", lambda found: found[:3] + found[4:])),
    "metrics emptied": ("metrics", lines("metrics.jsonl", lambda found: [])),
    "metrics missing": ("metrics", remove("metrics.jsonl")),
    "metrics' tail cut": ("metrics", lines("metrics.jsonl", lambda found: found[:-1])),
    "metrics' last line torn": ("metrics", lines("metrics.jsonl", lambda found: [*found[:-1], found[-1][:-9]])),
    "line changed": ("certificate", record(2, "parity.jsonl", tokens_different=3)),
    "line removed": ("certificate", lines("parity.jsonl", lambda found: found[:2] + found[3:])),
    "lines swapped": ("certificate", lines("parity.jsonl", swap)),
    "certificate's tail cut": ("certificate", lines("parity.jsonl", lambda found: found[:-1])),
    "certificate emptied": ("certificate", lines("parity.jsonl", lambda found: [])),
    "certificate missing": ("certificate", remove("parity.jsonl")),
    "rollouts missing": ("rollouts", remove("rollouts/step_00000002.jsonl.zst")),
    "rollouts emptied": ("rollouts", rows(lambda found: [{}], 2)),
    "rollouts torn": ("rollouts", lambda run: rollouts(run, 2).write_bytes(rollouts(run, 2).read_bytes()[:-40])),
    "every rollout missing": ("rollouts", remove("rollouts")),
    "optimizer": ("checkpoints", flip("checkpoints/step_4/optimizer.safetensors")),
    "optimizer, sealed anew": ("checkpoints", both(flip("checkpoints/step_4/optimizer.safetensors"), reseal)),
    "head in a checkpoint": ("checkpoints", both(flip("checkpoints/step_6/loop.json"), reseal)),
    "file beside": ("checkpoints", extra),
    "manifest": ("checkpoints", text("checkpoints/step_6/manifest.json", '"bytes": ', '"bytes": 1')),
    "summary": ("summary", text("summary.json", '"step": 6', '"step": 5')),
    "history cut, but its last checkpoint": ("checkpoints", both(cut(5), reseal)),
    "signatures missing": ("signature", remove("signatures.jsonl")),
}

# Made to agree, and nothing that `verify` can compute tells: who knows the head does, and training again.
CONSISTENT: dict[str, tuple[str, Tamper]] = {
    "token, of weights that are gone": ("key witness replay", both(row(other_token, step=2), agree)),
    "logprob, of weights that are gone": (
        "key witness replay", row(lambda each: each.update(logprobs=bit(each["logprobs"])), step=2),
    ),
    "loss": ("key witness replay", record(5, **{"loss/policy": -1.0})),
    "eval": ("key witness replay", record(6, **{"eval/solved": 0.99})),
    "final weights": ("key witness replay", flip("checkpoints/step_6/model.safetensors")),
    "optimizer": ("key witness replay", flip("checkpoints/step_4/optimizer.safetensors")),
    "time": ("key witness", record(3, **{"time/step": 0.001})),
    "learning rate": ("key witness replay", text("config.yaml", "lr: 0.01", "lr: 0.02")),
    "mode changed to observe": ("key witness", text("config.yaml", "mode: require", "mode: observe")),
    "an older format": ("key witness", older),
    "another's signature": ("key", other_key),
    "history cut, and told as interrupted": ("key witness", ended_at(4)),
}  # fmt: skip


def names(problems: list[str]) -> set[str]:
    return {problem.partition(":")[0] for problem in problems}


@pytest.mark.parametrize("name", [*FORGED, *CHAINED])
def test_found(copy, name):
    check, tamper = {**FORGED, **CHAINED}[name]
    tamper(copy)
    found = names(problems_of(copy, rescored=0, rewarded=0))
    assert found
    assert check in found or name in FORGED


@pytest.mark.parametrize("name", FORGED)
def test_found_though_all_was_made_to_agree(copy, name):
    check, tamper = FORGED[name]
    tamper(copy)
    forge(copy)
    assert check in names(problems_of(copy))


@pytest.mark.parametrize("name", CONSISTENT)
def test_found_by_who_knows_the_head_or_trains_again(run, copy, name):
    ways, tamper = CONSISTENT[name]
    tamper(copy)
    if name != "another's signature":
        if name != "history cut, and told as interrupted":
            assert problems_of(copy), "the certificate does not cover it"
        forge(copy)
    assert not problems_of(copy), "what is to be consistent is not"
    beside: dict[str, dict[str, object]] = {
        "key": {"public_key": run.parent / "key.pub"},
        "witness": {"witness": run.parent / "witness.jsonl"},
        "replay": {"replay": True},
    }
    for way in ways.split():
        expected = {"key": "signature", "replay": "replayed"}.get(way, way)
        assert expected in names(problems_of(copy, **beside[way])), way


FILES = (
    "config.yaml", "metrics.jsonl", "parity.jsonl", "summary.json", "fingerprints.json",
    *(f"rollouts/step_{step:08d}.jsonl.zst" for step in range(1, STEPS + 1)),
    *(f"checkpoints/step_{step}/{name}" for step in KEPT
      for name in ("manifest.json", "loop.json", "trainer.json", "model.safetensors", "optimizer.safetensors")),
)  # fmt: skip


@st.composite
def edits(draw) -> tuple[str, str, int, int]:
    """(kind, file, two numbers that say where and what)"""
    kinds = [
        "flip",
        "insert",
        "cut",
        "empty",
        "remove",
        "swap files",
        "field",
        "swap lines",
        "double a line",
        "drop a line",
    ]
    name = draw(st.sampled_from(FILES))
    kind = draw(st.sampled_from(kinds if name.endswith((".jsonl", ".zst")) else kinds[:6]))
    return kind, name, draw(st.integers(0, 2**31)), draw(st.integers(0, 2**31))


def apply(run: Path, kind: str, name: str, a: int, b: int) -> None:
    """Leaves the file as it was where `a` and `b` happen to say so."""
    file = run / name
    content = file.read_bytes()
    at = a % len(content)
    if kind == "flip":
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << b % 8)]) + content[at + 1 :])
    elif kind == "insert":
        file.write_bytes(content[:at] + [b" ", b"\n", b"0", b"\x00", b"{", b"\xff"][b % 6] + content[at:])
    elif kind == "cut":
        file.write_bytes(content[: at if b % 2 else -1])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "remove":
        file.unlink()
    elif kind == "swap files":
        other = run / FILES[b % len(FILES)]
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        packed = name.endswith(".zst")
        each = (zstandard.decompress(content) if packed else content).splitlines(keepends=True)
        at, other_at = a % len(each), b % len(each)
        if kind == "field":
            each[at] = changed(json.loads(each[at]), b)
        elif kind == "swap lines":
            swap(each, at, other_at)
        elif kind == "double a line":
            each.insert(other_at, each[at])
        else:
            del each[at]
        file.write_bytes(zstandard.compress(b"".join(each), 1) if packed else b"".join(each))


def changed(record: dict, b: int) -> bytes:
    """One value, somewhere in it, is another."""
    key = sorted(record)[b % len(record)]
    value = record[key]
    odd = [None, -1, 10**30, "", [], {}, True, 0.5, [[]], "0" * 64]
    record[key] = next(each for each in odd[b // len(record) % len(odd) :] + odd if each != value)
    return json.dumps(record).encode() + b"\n"


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edit=edits())
def test_edits_that_nobody_thought_of_are_found(run, tmp_path, edit):
    place = tmp_path / "run"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(run, place)
    apply(place, *edit)
    assume(
        any(not (place / name).exists() or (place / name).read_bytes() != (run / name).read_bytes() for name in FILES)
    )
    try:
        assert problems_of(place, rescored=0, rewarded=0)
    except RunError:
        assert not (place / "config.yaml").exists()


def test_an_honest_run_has_no_problems(run):
    beside = {"public_key": run.parent / "key.pub", "witness": run.parent / "witness.jsonl"}
    assert problems_of(run, **beside, replay=True) == []


REFILLS = ("algorithm.dynamic_sampling=true", "algorithm.max_refills=2", "rollout.group_size=2")


@pytest.mark.parametrize(
    "lives",
    [
        [REFILLS],
        [("trainer.num_steps=3",), ("trainer.num_steps=5", "checkpoint.keep=4", "eval.every=2")],
        [("trainer.num_minibatches=2", "rollout.top_k=5", "rollout.temperature=0.7", "rollout.min_tokens=2")],
        [("parity.mode=observe", "rollout.profile.linear=stock")],
    ],
    ids=["dynamic sampling", "extended with other settings", "truncated sampling", "observed"],
)
def test_honest_runs_of_other_kinds_have_no_problems(tmp_path, lives):
    for overrides in lives:
        run = make_run(tmp_path, *overrides)
    beside = {"public_key": tmp_path / "key.pub", "witness": tmp_path / "witness.jsonl"}
    assert problems_of(run, **beside, replay=True) == []


def test_a_run_that_lost_its_end_goes_on_and_has_no_problems(run, tmp_path):
    """As after a kill: records past the last whole checkpoint, and the last one torn."""
    for name in ("model", "key.pem", "key.pub", "witness.jsonl"):
        copy = shutil.copytree if (run.parent / name).is_dir() else shutil.copy
        copy(run.parent / name, tmp_path / name)
    shutil.copytree(run, tmp_path / "run")
    text("config.yaml", str(run.parent), str(tmp_path))(tmp_path / "run")
    both(remove("checkpoints/step_6"), remove("summary.json"))(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "rew')
    make_run(tmp_path)
    beside = {"public_key": tmp_path / "key.pub", "witness": tmp_path / "witness.jsonl"}
    assert problems_of(tmp_path / "run", **beside, replay=True) == []
    assert (tmp_path / "run" / "orphaned" / "1").is_dir()


def test_a_forger_who_changes_nothing_is_consistent(copy):
    agree(copy)
    forge(copy)
    assert problems_of(copy) == []


def test_rewards_of_another_source_are_not_held_against_the_run(copy, monkeypatch):
    monkeypatch.setattr(tampering, "reward", lambda prompt, completion, example: 0.0)  # of this file's source
    assert problems_of(copy) == []
    [check] = [check for check in verify(copy, Extent(run_code=True)) if check.name == "rewards"]
    assert "96 by other source than is here: not" in check.summary
