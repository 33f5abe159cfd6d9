"""Conversations end to end: a real model, an environment, and the same bits in engine and trainer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rlloop.chat import ChatTokenizer
from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.recipes.custom.tiny import END, write_tiny
from rlloop.recipes.guess.task import Guess, NumberGuessing
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from rlloop.testing import planted_fault
from rlloop.types import Example

TINY = [
    "rollout.num_prompts=7", "rollout.group_size=4", "rollout.max_tokens=3", "trainer.num_steps=2", "eval.num_draws=14",
    "task.max_turns=4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr("rlloop.cache.cache_root", lambda: tmp_path / "cache")  # of models; compiled kernels may stay


def test_the_game():
    game = NumberGuessing(Example("e", [1], "", {"secret": 5, "largest": 7}))
    assert [game.step(word).messages[0]["content"] for word in ("2", "7", "8", "seven", "")] == [
        "higher", "lower", "what", "what", "what",
    ]  # fmt: skip
    last = game.step(" 5 ")
    assert (last.reward, last.done, last.solved) == (1.0, True, True)


def run(folder: str, *more: str) -> list[dict]:
    assert main(["train", "--config-name", "guess", f"run.dir={folder}", *TINY, *more]) == 0
    return list(read_records(Path(folder) / "metrics.jsonl"))


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.min_tokens=2", "trainer.num_minibatches=2"],
        ["rollout.page_size=2", "rollout.max_batch_tokens=16", "trainer.max_batch_tokens=64", "model.dtype=bfloat16"],
    ],
)
def test_every_turn_has_the_same_bits_in_engine_and_trainer(settings):
    metrics = run("run", *settings)
    rows = [row for file in rollout_files(Path("run")) for row in read_rollouts(file)]
    assert max(len(row["turns"]) for row in rows) == 4
    for row in rows:
        assert len(row["logprobs"]) == sum(end - start for start, end in row["turns"])
        assert all(1 <= end - start <= 3 for start, end in row["turns"])
    for record in metrics[1:]:
        assert record["parity/tokens"] >= 4 * 28
        assert record["parity/tokens_different"] == record["parity/k3"] == 0
        assert record["ledger/trained"] == 28
    assert main(["verify", "run"]) == 0


class Patient(NumberGuessing):
    """Replies to those who look for 1 in the first step only once it is over."""

    async def step(self, message: str):
        evaluated = Path("run/metrics.jsonl").exists()
        while self.secret == 1 and evaluated and not rollout_files(Path("run")):
            await asyncio.sleep(0.01)
        return super().step(message)


def test_conversations_that_go_on_with_new_weights_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(Guess, "environment", Patient)
    partial = ["rollout.partial.prompts=7", "algorithm.anchor=rollout", "trainer.lr=1e-2"]
    metrics = run("run", *partial, "checkpoint.every=1")
    assert metrics[1]["rollout/groups_carried"] == 7
    assert all(record["parity/tokens_different"] == record["parity/redrawn_different"] == 0 for record in metrics[1:])
    rows = read_rollouts(rollout_files(Path("run"))[1])
    assert {tuple(row["versions"][:2]) for row in rows if "versions" in row} == {(0, 1)}
    [first, second] = read_records(Path("run/parity.jsonl"))
    assert "versions" not in first
    assert second["versions"].keys() == {"0", "1"}
    assert sum(second["versions"].values()) == second["tokens"]
    assert main(["verify", "run", "--all"]) == 0


def test_a_resumed_run_repeats_its_conversations():
    run("whole")
    run("parts", "trainer.num_steps=1")
    run("parts")
    for name in ("model.safetensors", "optimizer.safetensors"):
        whole, parts = (Path(folder) / "checkpoints/step_2" / name for folder in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes()


def test_a_difference_in_a_conversation_is_found_and_named(capsys):
    with planted_fault("attention"):
        assert main(["train", "--config-name", "guess", "run.dir=run", *TINY]) == 3
    report = json.loads(Path("run/parity_report.json").read_text())
    assert report["doctor"]["op"] == "attention"
    assert report["doctor"]["position"] <= report["first"]["position"]
    rows = {row["uid"]: row for row in read_rollouts(rollout_files(Path("run"))[0])}
    row, first = rows[report["first"]["uid"]], report["first"]
    assert (row["prompt_ids"] + row["token_ids"])[first["position"]] == first["token_id"]
    assert row["logprobs"][first["index"]] == pytest.approx(first["engine"])


def test_the_users_environment_through_the_custom_recipe(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_tool.py").write_text(
        "from rlloop.loop.environments import Reply\n"
        "class Echo:\n"
        "    def __init__(self, example, times):\n"
        "        self.left = times\n"
        "    async def step(self, message):\n"
        "        self.left -= 1\n"
        "        shorter = 1 / (1 + len(message))\n"
        "        return Reply([{'role': 'tool', 'content': 'again'}], reward=shorter, done=not self.left)\n"
    )
    write_tiny(tmp_path / "model", num_layers=1)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "say {n}"}}\n' for n in range(20)))
    arguments = [
        "train", "--config-name", "custom", "model.path=model", "data.path=rows.jsonl", "run.dir=run", *TINY[:5],
        "reward._target_=rlloop.rewards.episode.episode_reward", "data.eval_path=rows.jsonl",
        "+task.environment._target_=my_tool.Echo",
    ]  # fmt: skip
    assert main(arguments) == 2
    assert (
        "my_tool.Echo(example, times) cannot be called with (example): missing a required argument"
        in capsys.readouterr().err
    )
    assert main([*arguments, "+task.environment.times=2"]) == 0
    for record in list(read_records(Path("run/metrics.jsonl")))[1:]:
        assert record["rollout/turns_mean"] == record["reward/turns"] == 2
        assert record["parity/tokens_different"] == 0
        assert record["reward/std"] > 0
    for row in read_rollouts(rollout_files(Path("run"))[0]):
        assert "<|tool|>again<|end|><|assistant|>" in row["text"]


def test_only_what_stands_between_two_turns_is_rendered(tmp_path):
    write_tiny(tmp_path / "model", hidden_size=16, num_layers=1)
    chat = ChatTokenizer(tmp_path / "model")
    text, ids = chat.prompt("hi")
    assert text == chat.decode(ids) == "<|user|>hi<|end|><|assistant|>"
    end = chat.tokenizer.convert_tokens_to_ids(END)
    said = [{"role": "tool", "content": "7"}, {"role": "user", "content": "and?"}]
    rest = "<|tool|>7<|end|><|user|>and?<|end|><|assistant|>"
    assert chat.decode(chat.between(said, end)) == rest  # the policy closed its turn itself
    assert chat.decode(chat.between(said, None)) == END + rest  # it was cut off
    raw = ChatTokenizer(tmp_path / "model", template="raw")
    assert raw.decode(raw.between(said, None)) == "\n7\nand?\n"


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match=r"task.numbers is 1; it must be from 2"):
        Guess(0, numbers=1)
    with pytest.raises(ConfigError, match=r"task.max_turns is 0"):
        Guess(0, max_turns=0)


def test_ppo_learns_values_beside_the_policy_and_resumes_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path("by_length.py").write_text("def reward(prompt, completion, example):\n    return len(completion) % 7 / 7\n")
    sizes = [*TINY, "rollout.group_size=1", "rollout.num_prompts=14", "reward._target_=by_length.reward"]

    def train(folder: str, *more: str) -> list[dict]:
        assert main(["train", "--config-name", "guess/ppo", f"run.dir={folder}", *sizes, *more]) == 0
        return list(read_records(Path(folder) / "metrics.jsonl"))

    records = train("whole")
    for record in records[1:]:
        assert record["parity/tokens_different"] == 0
        assert record["critic/loss"] > 0
    assert records[1]["critic/value_mean"] == records[1]["critic/explained_variance"] == 0.0  # the head begins at 0
    assert records[2]["critic/value_mean"] != 0.0
    row = read_rollouts(rollout_files(Path("whole"))[0])[0]
    assert len(row["token_advantages"]) == len(row["logprobs"])
    assert row["advantage"] == row["reward"]  # as shaped; the advantages are by token
    train("parts", "trainer.num_steps=1")
    train("parts")
    for name in ("model.safetensors", "critic.safetensors"):
        whole, parts = (Path(folder) / "checkpoints/step_2" / name for folder in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes()
    assert main(["verify", "whole"]) == 0
