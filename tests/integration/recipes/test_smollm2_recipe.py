"""The recipe for a pretrained model: SFT, then RL, on generated sums. tests/contract/test_smollm2.py has the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlloop.cli.main import main
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.recipes.smollm2.problems import reward, write_problems
from rlloop.runs.folder import read_records
from rlloop.types import Example


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_problems(tmp_path / "data", demonstrations=40, problems=40)
    return tmp_path


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_problems_are_right_and_on_one_side(place):
    demonstrations, problems = rows(place / "data/demonstrations.jsonl"), rows(place / "data/problems.jsonl")
    assert not {row["prompt"] for row in demonstrations} & {row["prompt"] for row in problems}
    for row in demonstrations + problems:
        assert eval(row["prompt"].removeprefix("What is ").removesuffix("?")) == int(row["answer"])
        assert reward("", row["completion"], Example("e", [], "", row)).solved
        assert reward("", row["completion"], Example("e", [], "", {"answer": row["completion"]})).solved
    example = Example("e", [], "", {"answer": "7"})
    rewards = [reward("", text, example).reward for text in ("<answer>8</answer>", "7", "<answer> 7 </answer>")]
    assert rewards == [0.1, 0, 1]


def sft_then_rl(model: str, *more: str) -> None:
    sizes = ["trainer.num_steps=1", "eval.num_draws=2", "eval.every=0", "eval.temperature=0", "data.eval_fraction=0.3"]
    for name, path, recipe, batch in (
        ("sft", model, "smollm2/sft", ["rollout.num_prompts=4"]),
        ("rl", "sft/checkpoints/step_1", "smollm2", ["rollout.num_prompts=2", "rollout.group_size=2"]),
    ):
        data = "demonstrations" if name == "sft" else "problems"
        where = [f"model.path={path}", f"data.path=data/{data}.jsonl", f"run.dir={name}"]
        assert main(["train", "--config-name", recipe, *where, *batch, *sizes, *more]) == 0
        record = list(read_records(Path(name) / "metrics.jsonl"))[1]
        assert record["parity/tokens"] > 8
        assert record["parity/tokens_different"] == 0
        assert record["ledger/trained"] == 4


def test_any_folder_goes_through_both(place):
    write_tiny(place / "model", hidden_size=32, num_layers=1)
    sft_then_rl("model", "rollout.max_tokens=12")
