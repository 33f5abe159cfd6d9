"""The user's own model, data and reward, from a folder that holds nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlloop import load_model, token_logprobs
from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.models.adapter_files import WEIGHTS, with_stored_adapter
from rlloop.models.config import read_config
from rlloop.recipes.custom.data import DataSection, place, read_files, read_rows
from rlloop.recipes.custom.streaming import ArrowRows, OnDemand
from rlloop.recipes.custom.task import Custom
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from tests.support.checkpoints import make_checkpoint

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {{ opening or '' }}{% endif %}"
)
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
WORDS = ["<unk>", "<bos>", "<eos>", *ROLES, "add", "think", ":", *map(str, range(20))]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ROLES})
    fast.chat_template = template
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, **SIZES)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "sums.jsonl", sums())


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def sums() -> list[dict]:
    return [{"prompt": f"add {a} {b}", "answer": a + b} for a in range(7) for b in range(6)]


def write_rows(file: Path, rows: list) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def task(model: Path, path: Path, *, seed: int = 0, **settings) -> Custom:
    outer = {key: settings.pop(key) for key in ("template", "template_args", "max_sequence_tokens") if key in settings}
    data = {"path": str(path), **settings}
    return Custom(seed, str(model), data=data, max_tokens=8, **{"max_sequence_tokens": 100, **outer})


def tiny(model: Path, path: Path, run: Path, *more: str) -> list[str]:
    sizes = ["rollout.num_prompts=4", "rollout.group_size=4", "rollout.max_tokens=4", "eval.num_draws=4"]
    where = [f"model.path={model}", f"data.path={path}", f"run.dir={run}"]
    return ["train", "--config-name", "custom", *where, *sizes, "trainer.num_steps=2", "trainer.lr=1e-3", *more]


def test_two_steps_with_the_users_own_reward_and_two_more_after_a_restart(model, rows, tmp_path):
    Path("my_own_reward.py").write_text(
        "def brevity(prompt, completion, example, longest=10):\n"
        "    assert example.data['answer'] >= 0\n"
        "    return 1 - len(completion.split()) / longest\n"
    )
    reward = ["reward._target_=my_own_reward.brevity", "+reward.longest=8"]
    assert main(tiny(model, rows, tmp_path / "run", *reward)) == 0
    assert main(tiny(model, rows, tmp_path / "run", *reward, "trainer.num_steps=4")) == 0
    assert main(tiny(model, rows, tmp_path / "unbroken", *reward, "trainer.num_steps=4")) == 0
    weights = [tmp_path / run / "checkpoints/step_4/model.safetensors" for run in ("run", "unbroken")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    metrics = list(read_records(tmp_path / "run/metrics.jsonl"))
    assert [record["step"] for record in metrics] == [0, 1, 2, 3, 4]
    for record in metrics[1:]:
        assert record["parity/tokens"] >= 16
        assert record["parity/tokens_different"] == record["parity/k3"] == 0
    made = [row for file in rollout_files(tmp_path / "run") for row in read_rollouts(file)]
    assert len(made) == 64
    assert {row["reward"] for row in made} <= {1 - n / 8 for n in range(5)}


def test_an_adapter_trains_over_the_users_model_and_resumes(model, rows, tmp_path):
    Path("my_lengths.py").write_text("def score(prompt, completion, example):\n    return -len(completion)\n")
    lora = ["reward._target_=my_lengths.score", "model.lora.rank=4", "trainer.lr=1e-2", "parity.mode=require"]
    assert main(tiny(model, rows, tmp_path / "run", *lora)) == 0
    assert main(tiny(model, rows, tmp_path / "run", *lora, "trainer.num_steps=3", "trainer.offload=moments")) == 0
    assert main(tiny(model, rows, tmp_path / "unbroken", *lora, "trainer.num_steps=3")) == 0
    for name in (WEIGHTS, "optimizer.safetensors"):
        one, other = (tmp_path / run / "checkpoints/step_3" / name for run in ("run", "unbroken"))
        assert one.read_bytes() == other.read_bytes(), name
    records = list(read_records(tmp_path / "run/metrics.jsonl"))
    assert all(record["parity/tokens_different"] == record["parity/k3"] == 0 for record in records[1:])
    assert records[3]["memory/streamed_bytes"] == 2 * records[3]["memory/host_bytes"] > 0
    assert main(["verify", str(tmp_path / "run")]) == 0
    policy = with_stored_adapter(load_model(model), tmp_path / "run/checkpoints/step_3")
    [moved] = token_logprobs(policy, [([3], [4, 5])])
    [base] = token_logprobs(load_model(model), [([3], [4, 5])])
    assert (moved != base).all()


def test_several_rewards_are_logged_by_component_and_failures_are_rejected_with_their_reason(model, rows, tmp_path):
    Path("my_parts.py").write_text(
        "def brevity(prompt, completion, example):\n"
        "    return -len(completion.split())\n"
        "def picky(prompt, completion, example):\n"
        "    if example.data['answer'] % 2:\n"
        "        raise LookupError('odd')\n"
        "    return 0.5\n"
    )
    parts = (
        "reward={_target_: rlloop.rewards.Weighted, parts: {short: {_target_: my_parts.brevity, weight: 0.1}, "
        "even: {_target_: my_parts.picky}, exact: {_target_: rlloop.recipes.custom.reward.exact_match}}}"
    )
    run = tmp_path / "run"
    assert main(tiny(model, rows, run, "~reward", f"+{parts}", "trainer.num_steps=3", "eval.num_draws=8")) == 0
    rejected = 0
    for record, file in zip(list(read_records(run / "metrics.jsonl"))[1:], rollout_files(run), strict=True):
        made = read_rollouts(file)
        failed = [row for row in made if row["outcome"].startswith("rejected: reward error: LookupError: odd")]
        kept = [row for row in made if row["outcome"] == "trained"]
        assert len(failed) == record["ledger/rejected"] == 16 - record["ledger/accepted"]
        rejected += len(failed)
        assert record["reward/even"] == 0.5
        assert record["reward/short"] == pytest.approx(sum(row["components"]["short"] for row in kept) / len(kept))
        assert {"reward/exact", "reward/exact/answered"} <= record.keys()
        for row in kept:
            assert row["reward"] == pytest.approx(0.1 * row["components"]["short"] + 0.5 + row["components"]["exact"])
    assert rejected > 0
    assert main(["verify", str(run)]) == 0


def test_each_epoch_has_every_prompt_once_and_held_out_ones_never(model, rows):
    made = task(model, rows)
    size = len(made._training[0])
    assert size + len(made._held_out[0]) == 42
    seen = [example for step in range(1, size + 1) for example in made.train_examples(step, 2)]
    for epoch in range(2):
        assert len({example.id for example in seen[epoch * size : (epoch + 1) * size]}) == size
    held_out = {example.id for example in made.eval_examples(100)}
    assert held_out
    assert not held_out & {example.id for example in seen}
    assert made.train_examples(5, 3) == task(model, rows).train_examples(5, 3)
    assert made.train_examples(5, 3) != task(model, rows, seed=1).train_examples(5, 3)


def test_a_row_stays_on_its_side_whatever_else_there_is(model, tmp_path):
    some = task(model, write_rows(tmp_path / "some.jsonl", sums()[::2]))
    everything = task(model, write_rows(tmp_path / "all.jsonl", sums() * 2))
    assert set(map(prompt_of, some._held_out[0])) <= set(map(prompt_of, everything._held_out[0]))
    assert not set(map(prompt_of, everything._held_out[0])) & set(map(prompt_of, everything._training[0]))
    assert place("add 1 2") == pytest.approx(0.9164449930340623, abs=1e-9)  # another value would be another split


def prompt_of(example) -> str:
    return example.prompt


def words(ids: list[int]) -> str:
    return " ".join(WORDS[id] for id in ids)


def test_prompts_go_through_the_folders_chat_template(model, rows, tmp_path):
    settings = {"eval_path": str(rows)}
    [example] = task(model, write_rows(tmp_path / "one.jsonl", sums()[8:9]), **settings)._training[0]
    assert (example.prompt, words(example.prompt_ids)) == ("add 1 2", "<|user|> add 1 2 <eos> <|assistant|>")
    assert example.data == {"prompt": "add 1 2", "answer": 3}
    conversation = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    talk = write_rows(tmp_path / "talk.jsonl", [{"talk": conversation, "name": "t"}])
    settings = {"prompt_key": "talk", "id_key": "name", "system": "think", "eval_path": str(talk)}
    [example] = task(model, talk, **settings, template_args={"opening": "think :"})._training[0]
    spoken = "<|system|> think <eos> <|user|> 1 <eos> <|assistant|> 2 <eos> <|user|> 3 <eos> <|assistant|> think :"
    assert (example.id, words(example.prompt_ids)) == ("t", spoken)
    [example] = task(model, talk, **settings, template="raw")._training[0]
    assert words(example.prompt_ids) == "think 1 2 3"


def test_the_policys_words_are_decoded_as_they_stand(model, rows):
    made = task(model, rows)
    three, eos, user = WORDS.index("3"), WORDS.index("<eos>"), WORDS.index("<|user|>")
    assert made.decode([three, user, eos]) == "3 <|user|>"
    assert made.decode([three, eos, three]) == "3 <eos> 3"


def test_long_prompts_stop_the_run_or_are_left_out(model, tmp_path, capsys):
    rows = [*sums(), {"prompt": "add " + "1 " * 30}]
    path = write_rows(tmp_path / "long.jsonl", rows)
    with pytest.raises(
        ConfigError, match=r"row \d+: the prompt has 34 tokens, more than 20 \(data.max_prompt_tokens\)"
    ):
        task(model, path, max_prompt_tokens=20)
    with pytest.raises(
        ConfigError, match=r"more than 22 .*trainer.max_batch_tokens=30 leave, less rollout.max_tokens=8"
    ):
        task(model, path, max_sequence_tokens=30)
    with pytest.raises(ConfigError, match=r"; lower rollout.max_tokens, shorten the row, or leave"):
        task(model, path, max_sequence_tokens=30)
    with pytest.raises(
        ConfigError, match=r"max_tokens=8 leaves no room for a prompt in trainer.max_batch_tokens=8; low"
    ):
        task(model, path, max_sequence_tokens=8)
    positions = read_config(model).max_positions
    room = {"max_tokens": positions, "max_sequence_tokens": 2 * positions}
    with pytest.raises(ConfigError, match=rf"no room for a prompt in the model's {positions} positions; lower it"):
        Custom(0, str(model), data={"path": str(path)}, **room)
    assert len(task(model, path, max_prompt_tokens=20, overlong="drop")._training[0]) < 43
    assert "left out 1 of" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"all of its .* prompts are longer than 2 tokens"):
        task(model, path, max_prompt_tokens=2, overlong="drop")


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "has no rows"),
        (
            [{"question": "1"}],
            {"eval_path": "rows.jsonl"},
            r"row 1 has no field 'prompt' \(data.prompt_key\); it has question",
        ),
        ([{"prompt": "1"}], {"eval_path": "rows.jsonl", "id_key": "name"}, r"no field 'name' \(data.id_key\)"),
        ([{"prompt": 7}], {"eval_path": "rows.jsonl"}, "prompt is 7; it must be a string, or a list of messages"),
        ([{"question": "1"}] * 20, {}, r"rows.jsonl, row 1 has no field 'prompt' \(data.prompt_key\); it has question"),
        ([*sums(), {"prompt": 7}], {}, "rows.jsonl, row 43: prompt is 7"),  # of the file, though some are held out
        ([["prompt"]], {}, "line 1, is a JSON list"),
        ([{"prompt": [{"role": "assistant", "content": "1"}]}], {"eval_path": "rows.jsonl"}, "policy's turn"),
        ([{"prompt": "1"}], {}, "leaves none for (training|evaluation)"),
        (sums(), {"eval_path": "nothing.jsonl"}, "data.eval_path is 'nothing.jsonl', and there is no such file"),
        (sums(), {"overlong": "cut"}, "data.overlong is 'cut'; it must be error or drop"),
        (sums(), {"eval_fraction": 1.5}, "data.eval_fraction is 1.5"),
        (sums(), {"max_prompt_tokens": "many"}, "data.max_prompt_tokens is 'many'; it must be int"),
        (sums(), {"prompts": 1}, "no key data.prompts"),
        (sums(), {"template": "jinja"}, "template is 'jinja'; it must be auto, chat or raw"),
    ],
)
def test_a_mistake_in_the_data_is_named(model, rows, settings, message):
    path = write_rows(Path("rows.jsonl"), rows)
    with pytest.raises(ConfigError, match=message):
        task(model, path, **settings)


def test_a_file_that_may_not_be_read_is_named(model, rows, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ConfigError, match=r"sums.jsonl' cannot be read: Permission denied"):
        read_files(str(rows), "data.path")


def test_mistakes_stop_the_command_before_it_starts(model, rows, tmp_path, capsys):
    def error(*more: str) -> str:
        assert main(tiny(model, rows, tmp_path / "run", *more)) == 2
        return capsys.readouterr().err

    assert "no such file; it must be a JSONL file" in error("data.path=nothing.jsonl")
    assert "data.path is None; it must name the rows" in error("data.path=null")
    assert "data.path is ''; it must name the rows" in error("data.path=")
    Path("torn.jsonl").write_text('{"prompt": "1"}\n{"prompt"\n')
    assert "torn.jsonl, line 2, is not JSON" in error("data.path=torn.jsonl")
    bare = tmp_path / "bare"
    make_checkpoint(bare, **SIZES)
    assert "has no tokenizer (tokenizer.json" in error(f"model.path={bare}")
    save_tokenizer(bare, None)
    assert "has no chat template" not in error(f"model.path={bare}", "data.path=nothing.jsonl")
    assert "template is chat" in error(f"model.path={bare}", "task.template=chat")
    small = tmp_path / "small"
    make_checkpoint(small, **{**SIZES, "vocab_size": 12})
    save_tokenizer(small)
    assert "the tokenizer in" in error(f"model.path={small}")
    assert "without a config.json" in error(f"model.path={tmp_path}")
    for given, missing in (("model.path=model", "data.path"), (f"data.path={rows}", "model.path")):
        assert main(["train", "--config-name", "custom", given]) == 2
        assert f"{missing} must be given" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_file_is_no_dataset_and_is_refused_before_the_network_is_asked(model, rows):
    with pytest.raises(ConfigError, match=r"sums.jsonl', a file: leave out data.format=datasets, or name its folder"):
        task(model, rows, format="datasets")


def test_datasets_is_an_extra(model, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlloop\[datasets\]'"):
        task(model, tmp_path, format="datasets")


def test_a_streamed_dataset_stays_in_its_arrow_files(model, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{i} + 1", "answer": i + 1, "tags": ["sum", str(i)]} for i in range(40)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    read, streamed = (
        read_rows(DataSection(str(tmp_path / "saved"), format="datasets", streaming=streaming))
        for streaming in (False, True)
    )
    for mine, other in zip(read, streamed, strict=True):
        assert list(mine) == list(other)
        assert isinstance(other, OnDemand)  # which asks the dataset, whose table is mapped, for each row
        assert isinstance(other._items, ArrowRows)
        assert other._items.dataset.cache_files
    given = task(model, tmp_path / "saved", format="datasets", streaming=True)
    taken = given.train_examples(3, 8)
    assert taken == task(model, tmp_path / "saved", format="datasets").train_examples(3, 8)
    assert {example.data["tags"][0] for example in taken} == {"sum"}
