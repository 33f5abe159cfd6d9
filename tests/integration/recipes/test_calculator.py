"""The agent recipe: tools, errors, rewards by turn, and what its records hold of a conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlloop.cli.main import main
from rlloop.recipes.calculator.task import LARGEST, TOOLS, Calculator, problems
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from rlloop.types import Example


def call(name: str, a: object, b: object) -> str:
    return f'<tool_call> {{"name": "{name}", "arguments": {{"a": {a} , "b": {b} }}}} </tool_call>'


def test_a_conversation_of_calls():
    made = Calculator(Example("e", [], "", {"answer": 23}))
    first = made.step(call("multiply", 4, 5))
    assert first.messages == [{"role": "tool", "name": "multiply", "arguments": '{"a":4,"b":5}', "content": "20"}]
    assert (first.reward, first.done) == (0.0, False)
    for wrong in (call("divide", 4, 2), call("subtract", 1, 2), call("multiply", 99, 99), call("add", '"x"', 1)):
        reply = made.step(wrong)
        assert (reply.messages[0]["content"], reply.reward) == ("error", -0.1)
    both = made.step(call("add", 1, 2) + call("add", 3, 4))
    assert [message["content"] for message in both.messages] == ["3", "7"]
    right, wrong = made.step("answer 23"), made.step("answer 24")
    assert (right.reward, right.done, right.solved) == (1.0, True, True)
    assert (wrong.reward, wrong.done, wrong.solved) == (0.0, True, False)


def test_every_problem_can_be_solved_by_its_calls():
    for each in problems():
        (first, a, b), (second, c, d) = each.calls
        inner, answer = TOOLS[first](a, b), TOOLS[second](c, d)
        assert inner in (c, d)
        assert answer == each.answer == eval(each.text.removeprefix("calculate "))
        assert max(inner, answer) <= LARGEST
    assert 0.05 < sum(each.held_out for each in problems()) / len(problems()) < 0.15


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlloop.cache.cache_root", lambda: tmp_path)
    sizes = ["rollout.num_prompts=2", "rollout.group_size=3", "trainer.num_steps=1", "eval.num_draws=2"]
    warm = ["task.demonstrations=4", "task.warm_steps=12"]
    assert main(["train", "--config-name", "calculator", "run.dir=run", *sizes, *warm]) == 0
    return tmp_path / "run"


def test_records_tell_the_conversation_by_turn(trained):
    record = list(read_records(trained / "metrics.jsonl"))[1]
    assert record["parity/tokens"] > 0
    assert record["parity/tokens_different"] == 0
    rows = [row for file in rollout_files(trained) for row in read_rollouts(file)]
    assert len(rows) == 6
    for row in rows:
        conversation = row["conversation"]
        assert [entry["tokens"] for entry in conversation] == row["turns"]
        assert sum(entry["reward"] for entry in conversation) == pytest.approx(row["reward"])
        ends = [entry.get("read", [None, len(row["token_ids"])])[1] for entry in conversation]
        assert ends == [entry["tokens"][0] for entry in conversation[1:]] + [len(row["token_ids"])]
