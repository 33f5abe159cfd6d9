"""The recipe of random weights and generated prompts, in a small shape."""

import pytest

from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.recipes.random.task import RandomModel, even_tokens
from rlloop.runs.folder import read_records
from rlloop.types import Example

SHAPE = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "eos_token_id": 1,
}  # fmt: skip


def test_it_trains_at_zero_kld(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlloop.cache.cache_root", lambda: tmp_path)
    small = [f"task.config.{key}={value}" for key, value in SHAPE.items()]
    small += ["device=cpu", "task.prompt_tokens=6", "rollout.num_prompts=2", "rollout.group_size=4"]
    small += ["rollout.max_tokens=8", "trainer.num_steps=2", "trainer.max_batch_tokens=64", "eval.num_draws=4"]
    assert main(["train", "--config-name", "random", "run.dir=run", *small]) == 0
    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    assert [record["step"] for record in records] == [0, 1, 2]
    assert records[-1]["parity/tokens_different"] == 0
    assert 0 < records[-1]["reward/mean"] < 1


def test_prompts_are_the_seeds_and_steps():
    small = RandomModel(3, config=SHAPE, prompt_tokens=5)
    assert small.train_examples(2, 4) == RandomModel(3, config=SHAPE, prompt_tokens=5).train_examples(2, 4)
    assert small.train_examples(2, 4) != small.train_examples(3, 4)
    assert all(len(each.prompt_ids) == 5 and max(each.prompt_ids) < 160 for each in small.eval_examples(9))
    with pytest.raises(ConfigError, match=r"task.prompt_tokens is 64; it must be from 1 to below .* \(64\)"):
        RandomModel(3, config=SHAPE, prompt_tokens=64)


def test_the_reward_is_the_share_of_even_tokens():
    assert even_tokens("", "1 2 4 5", Example("", [], "", {})) == 0.5
    assert even_tokens("", "", Example("", [], "", {})) == 0.0
