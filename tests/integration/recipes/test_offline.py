"""Objectives on given data, from a random model: imitate either answer, then learn to prefer the right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlloop.audit import Extent, verify
from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.recipes.offline.task import Given
from rlloop.recipes.offline.toy import write_toy
from rlloop.runs.folder import read_records, read_rollouts, rollout_files

TOKENS = ["rollout.max_tokens=2", "eval.num_draws=40", "eval.every=0", "checkpoint.every=0"]
ROOM = {"max_tokens": 2, "max_sequence_tokens": 64}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    write_toy(folder)
    return folder


@pytest.fixture
def train(place, monkeypatch):
    monkeypatch.chdir(place)

    def run(recipe: str, name: str, model: str, data: str, *more: str) -> list[dict]:
        where = [f"model.path={model}", f"data.path={data}.jsonl", f"run.dir={name}"]
        assert main(["train", "--config-name", recipe, *where, *TOKENS, *more]) == 0
        records = list(read_records(place / name / "metrics.jsonl"))
        assert all(record["parity/tokens_different"] == 0 for record in records[1:])
        return records

    return run


@pytest.fixture
def mixed(train, place) -> str:
    """A policy that knows the task's form, and either answer."""
    if not (place / "mixed").exists():
        train("offline", "mixed", "model", "mixed", "trainer.num_steps=60", "trainer.lr=5e-3", "rollout.num_prompts=32")
    return str(place / "mixed/checkpoints/step_60")


def test_demonstrations_are_learned_and_the_run_verifies(train, place):
    records = train(
        "offline", "sft", "model", "demonstrations", "trainer.num_steps=40", "trainer.lr=5e-3", "rollout.num_prompts=32"
    )
    assert records[-1]["loss/total"] < 0.5 * records[1]["loss/total"]
    assert records[-1]["eval/solved"] > records[0]["eval/solved"] + 0.2
    problems = [problem for check in verify(place / "sft", Extent(None, run_code=True)) for problem in check.problems]
    assert problems == []


def test_completions_longer_than_a_sampled_one_may_be_verify_too(train, place):
    train("offline", "long", "model", "demonstrations", "trainer.num_steps=1", "rollout.max_tokens=1")
    assert max(len(row["token_ids"]) for row in read_rollouts(rollout_files(place / "long")[0])) > 1
    problems = [problem for check in verify(place / "long", Extent(None)) for problem in check.problems]
    assert problems == []


@pytest.mark.parametrize("algorithm", ["dpo", "ipo", "kto"])
def test_preferences_are_learned(train, mixed, algorithm):
    steps = ["trainer.num_steps=8", "trainer.lr=1e-3", "rollout.num_prompts=8"]
    records = train("offline/preferences", algorithm, mixed, "preferences", f"algorithm={algorithm}", *steps)
    assert records[-1]["loss/total"] < records[1]["loss/total"]
    names = (
        ("loss/reward_good", "loss/reward_bad")
        if algorithm == "kto"
        else ("loss/reward_chosen", "loss/reward_rejected")
    )
    assert records[1][names[0]] == records[1][names[1]] == 0  # the policy is its own reference
    assert records[-1][names[0]] > records[-1][names[1]]


def test_a_reward_model_orders_pairs(train, mixed, place, capsys):
    steps = ["trainer.num_steps=20", "trainer.lr=5e-3", "rollout.num_prompts=16"]
    records = train("offline/reward_model", "verdicts", mixed, "preferences", *steps)
    assert records[-1]["loss/reward_accuracy"] > 0.75
    assert records[-1]["loss/total"] < records[1]["loss/total"]
    row = read_rollouts(rollout_files(place / "verdicts")[0])[0]
    assert [end - begin for begin, end in row["turns"]] == [1], "the verdict alone is predicted"
    assert main(["eval", "verdicts"]) == 0
    said = capsys.readouterr().out
    assert f"  preference accuracy  {records[-1]['eval/solved']:.4f} ±" in said
    assert f"  margin  {records[-1]['eval/reward']:.4f} ±" in said


def test_conversations_train_every_assistant_turn_and_nothing_else(place, tmp_path):
    talk = [
        {"role": "user", "content": "1 2"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3 1"}, {"role": "assistant", "content": "3"},
    ]  # fmt: skip
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": talk, "n": n}) + "\n" for n in range(40)))
    data = {"path": str(file), "prompt_key": "messages", "eval_path": str(file)}
    task = Given(0, str(place / "model"), kind="demonstrations", data=data, group_size=1, **ROOM)
    [example] = task.train_examples(1, 1)
    given = example.data["given"]["completion"]
    spoken = [task.decode(given["ids"][begin:end]) for begin, end in given["turns"]]
    assert [text.split("<")[0].strip() for text in spoken] == ["2", "3"]
    whole = task.chat.tokenizer.decode([*example.prompt_ids, *given["ids"]])
    assert whole.replace(" ", "").startswith(
        "<|user|>12<|end|><|assistant|>2<|end|><|user|>31<|end|><|assistant|>3<|end|>"
    )


def test_rows_that_cannot_work_are_named_before_anything_starts(place, tmp_path):
    def made(kind, rows, group_size):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"path": str(file), "eval_path": str(place / "preferences.jsonl")}
        return Given(0, str(place / "model"), kind=kind, data=data, group_size=group_size, **ROOM)

    with pytest.raises(ConfigError, match=r"row 1: rejected is 3; it must be text, for task.kind=preferences"):
        made("preferences", [{"prompt": "1 2", "chosen": "2", "rejected": 3}], 2)
    with pytest.raises(ConfigError, match=r"row 1 has no field 'rejected'; it has prompt, chosen$"):
        made("preferences", [{"prompt": "1 2", "chosen": "2"}], 2)
    with pytest.raises(ConfigError, match=r"has no field 'chosen'; .* use --config-name offline$"):
        made("preferences", [{"prompt": "1 2", "completion": "2"}], 2)
    with pytest.raises(ConfigError, match=r"no field 'completion'; .* For pairs use --config-name offline/preferences"):
        made("demonstrations", [{"prompt": "1 2", "chosen": "2", "rejected": "1"}], 1)
    with pytest.raises(ConfigError, match="row 1 has 105 tokens with its prompt, and 64 have room"):
        made("preferences", [{"prompt": "1 2", "chosen": "2 " * 99, "rejected": "1"}], 2)
    with pytest.raises(ConfigError, match=r"rollout.group_size is 1; with task.kind=preferences it must be 2"):
        made("preferences", [{"prompt": "1 2", "chosen": "2", "rejected": "1"}], 1)


REWARD = """
def larger(prompt, completion, example):
    return float(completion.split("<")[0].strip() == example.data["completion"])
"""


@pytest.mark.parametrize("algorithm", ["distillation", "rejection_sampling"])
def test_samples_are_learned_from(place, mixed, monkeypatch, algorithm):
    """A random student follows a teacher of its own samples; a policy that knows either answer imitates its best."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    (place / "toy_reward.py").write_text(REWARD)
    student = {"distillation": ["model.path=model", f"model.reference_path={mixed}", "trainer.lr=5e-3"],
               "rejection_sampling": [f"model.path={mixed}", "trainer.lr=1e-3"]}[algorithm]  # fmt: skip
    command = ["train", "--config-name", "custom", "data.path=demonstrations.jsonl", f"algorithm={algorithm}", *student]
    small = [
        "rollout.num_prompts=16",
        "rollout.group_size=4",
        f"trainer.num_steps={45 if algorithm == 'distillation' else 15}",
        f"run.dir={algorithm}",
    ]
    assert main([*command, *small, *TOKENS, "reward._target_=toy_reward.larger"]) == 0
    records = list(read_records(place / algorithm / "metrics.jsonl"))[1:]
    assert all(record["parity/tokens_different"] == 0 for record in records)
    if algorithm == "distillation":
        last, first = (sum(each["loss/policy"] for each in part) / 4 for part in (records[-4:], records[:4]))
        assert last < 0.6 * first  # the reverse KL to the teacher, in nats a token
    else:
        assert 0 < records[0]["ledger/trained"] < records[0]["ledger/sampled"]
        last, first = (sum(each["reward/mean"] for each in part) / 4 for part in (records[-4:], records[:4]))
        assert last > first + 0.05
