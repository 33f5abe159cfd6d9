from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.recipes.countdown import report, warmstart
from rlloop.recipes.countdown.data import (
    all_problems,
    demonstrations,
    held_out_problems,
    random_baseline,
    training_problems,
    worked_traces,
)
from rlloop.recipes.countdown.task import Countdown
from rlloop.rewards.countdown import compose, verify
from rlloop.runs.folder import read_records, read_rollouts, rollout_files

SMALL = {
    "largest_number": 4,
    "largest_target": 20,
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2},
    "warm_start": {
        "demonstrations": 64, "batch_size": 16, "lr": 0.01, "eval_every": 5, "eval_draws": 8, "max_steps": 10,
        "supervised_steps": 15,
    },
}  # fmt: skip


OVERRIDES = [
    *(f"task.{key}={value}" for key, value in SMALL.items() if not isinstance(value, dict)),
    *(f"task.{key}.{name}={value}" for key in ("model", "warm_start") for name, value in SMALL[key].items()),
    *("rollout.num_prompts=4", "rollout.group_size=4", "trainer.num_steps=2", "eval.num_draws=8"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def working_folder(tmp_path, cache, monkeypatch) -> None:
    """Warm starts of the tests stay apart; compiled kernels do not have to."""
    monkeypatch.setattr(warmstart, "cache_root", lambda: cache)
    monkeypatch.chdir(tmp_path)


def test_every_trace_is_worked_rightly():
    rng = np.random.default_rng(0)
    problems = all_problems(12, 99)
    for index in rng.choice(len(problems), 200):
        numbers, target = problems[index].numbers, problems[index].target
        for trace in worked_traces(numbers)[target]:
            expression = compose(trace, list(numbers))
            assert expression is not None
            assert verify(expression, list(numbers), target)
            assert len(trace.split()) == warmstart.RESPONSE_TOKENS - 1


def test_the_problems_are_counted_and_the_split_is_a_tenth():
    problems = all_problems(12, 99)
    assert len(problems) == len(set(problems)) == 4739
    held_out, training = held_out_problems(12, 99), training_problems(12, 99)
    assert set(held_out) | set(training) == set(problems)
    assert not set(held_out) & set(training)
    assert 0.08 < len(held_out) / len(problems) < 0.12
    # The split is of problems, not of a set of them: a smaller range holds out the same ones.
    assert set(held_out_problems(8, 50)) == set(held_out) & set(all_problems(8, 50))


def test_the_random_baseline_is_what_draws_give():
    rng = np.random.default_rng(0)
    problems = held_out_problems(12, 99)
    hits = []
    for index in range(4000):
        problem = problems[index % len(problems)]
        traces = [
            (target, trace)
            for target, some in worked_traces(problem.numbers).items()
            if 1 <= target <= 99
            for trace in some
        ]
        hits.append(traces[rng.integers(len(traces))][0] == problem.target)
    assert np.mean(hits) == pytest.approx(random_baseline(12, 99), abs=4 * 0.0045)


def test_demonstrations_are_of_training_problems_and_repeat():
    made = demonstrations(300, 5, 12, 99)
    assert made == demonstrations(300, 5, 12, 99)
    assert made != demonstrations(300, 6, 12, 99)
    assert len({demonstration.prompt for demonstration in made}) == 300
    held_out = {(problem.numbers, problem.target) for problem in held_out_problems(12, 99)}
    for demonstration in made:
        *numbers, _, target = demonstration.prompt.split()
        key = tuple(sorted(map(int, numbers))), int(target)
        assert key not in held_out
        assert verify(compose(demonstration.response, list(key[0])) or "", list(key[0]), key[1])
    few = demonstrations(700, 0, 4, 20)  # more than there are problems
    assert max(Counter(tuple(sorted(d.prompt.split())) for d in few).values()) > 1


def test_training_batches_are_a_function_of_seed_and_step():
    task = Countdown(3)
    task.train_examples(1, 32)  # what came before does not matter
    batch = task.train_examples(7, 32)
    assert batch == Countdown(3).train_examples(7, 32)
    assert batch != Countdown(4).train_examples(7, 32)
    assert batch != task.train_examples(8, 32)
    assert len({example.id for example in batch}) == 32


def test_no_held_out_problem_is_trained_on():
    task = Countdown(0)
    held_out = {example.id for example in task.eval_examples(1000)}
    assert len(held_out) == len(held_out_problems(12, 99))
    for step in range(60):
        assert not held_out & {example.id for example in task.train_examples(step, 32)}


def test_held_out_examples_are_the_same_for_every_seed_and_come_round():
    count = len(held_out_problems(12, 99))
    examples = Countdown(0).eval_examples(count + 5)
    assert examples == Countdown(9).eval_examples(count + 5)
    assert examples[:5] == examples[count:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"largest_number": 3}, "task.largest_number is 3; it must be from 4 to 999"),
        ({"warm_start": {"stop": 0.2}}, "task.warm_start: Key 'stop' .* its keys are .*stop_at"),
        ({"warm_start": {"lr": "fast"}}, "task.warm_start: Value 'fast'"),
        ({"warm_start": {"max_steps": 0}}, "task.warm_start.max_steps is 0"),
        ({"warm_start": {"demonstrations": 10}}, "task.warm_start.batch_size is .* at most"),
        ({"model": {"width": 3}}, "task.model: Key 'width'"),
    ],
)
def test_a_mistake_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        Countdown(0, **settings)


def test_the_folder_is_hugging_faces_and_the_tokenizer_goes_round():
    task = Countdown(0, **SMALL)
    folder = task.model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("4 1 2 -> 20", "4 - 1 = 3 , 3 * 2 = 6", "16 / 4 = 4 , 4 + 0 = 4"):
        ids = task.tokenizer.encode(text).ids
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == task.decode(ids) == text
        assert task.decode([*ids, tokenizer.eos_token_id]) == text
        assert task.decode([*ids, tokenizer.eos_token_id, ids[0]]) == f"{text} <eos> {text.split()[0]}"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id


def test_the_warm_start_is_cached_by_what_decides_it(monkeypatch):
    task = Countdown(0, **SMALL)
    folder = task.model_folder()
    weights = (folder / "model.safetensors").read_bytes()
    assert warmstart.warm_start_curve(folder).last[0] == 10

    other = {**SMALL, "warm_start": {**SMALL["warm_start"], "lr": 0.02}}
    assert warmstart.digest(Countdown(0, **other)) != warmstart.digest(task)
    assert warmstart.digest(Countdown(8, **SMALL)) == warmstart.digest(task)  # the run's seed is not one of them

    def forbidden(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(warmstart, "Supervised", forbidden)
    assert Countdown(8, **SMALL).model_folder() == folder
    assert (folder / "model.safetensors").read_bytes() == weights


def test_the_supervised_arm_goes_on_where_the_warm_start_ended():
    """Ten steps and five more are the same trajectory as fifteen."""
    curve = warmstart.supervised_only(Countdown(0, **SMALL))
    longer = {**SMALL, "warm_start": {**SMALL["warm_start"], "max_steps": 15}}
    unbroken = Countdown(0, **longer)
    assert [step for step, _ in curve.points] == [5, 10, 15]
    assert curve.points == warmstart.warm_start_curve(unbroken.model_folder()).points


def test_the_warm_start_stops_at_its_threshold():
    early = {**SMALL, "warm_start": {**SMALL["warm_start"], "stop_at": 0.0}}
    assert warmstart.warm_start_curve(Countdown(0, **early).model_folder()).points[-1][0] == 5


def test_a_model_without_a_tokenizer_takes_the_recipes_own(tmp_path):
    made = shutil.copytree(Countdown(0, **SMALL).model_folder(), tmp_path / "model")
    (made / "tokenizer.json").unlink()
    task = Countdown(0, str(made), largest_number=4, largest_target=20)
    assert task.model_folder() == made
    assert task.train_examples(1, 1)[0].prompt_ids == Countdown(0, **SMALL).train_examples(1, 1)[0].prompt_ids
    assert task.decode([3, 500, 1]) == "-> <unk>"  # an id beyond the words does not vanish
    with pytest.raises(ConfigError, match=r"its vocabulary of .* is too small"):
        Countdown(0, str(made)).train_examples(1, 1)


def test_two_steps_end_to_end(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", "--config-name", "countdown", f"run.dir={run}", *OVERRIDES]) == 0
    metrics = list(read_records(run / "metrics.jsonl"))
    assert [record["step"] for record in metrics] == [0, 1, 2]
    assert "eval/solved" in metrics[0]
    assert "eval/solved" in metrics[2]
    for record in metrics[1:]:
        assert record["parity/tokens_different"] == 0
        assert record["parity/k3"] == 0
        assert record["parity/tokens"] >= 16
        assert record["ledger/sampled"] == record["ledger/trained"] == 16
    for name in ("config.yaml", "parity.jsonl", "summary.json", "checkpoints/step_2/model.safetensors"):
        assert (run / name).is_file(), name
    rows = [row for file in rollout_files(run) for row in read_rollouts(file)]
    assert len(rows) == 32
    held_out = {problem.id for problem in held_out_problems(4, 20)}
    assert not held_out & {row["example"] for row in rows}

    assert report.main([str(run)]) == 0
    assert "supervised only" in capsys.readouterr().out
    assert (run / "countdown.png").stat().st_size > 10_000
    content = json.loads((run / "countdown.json").read_text())
    assert content["tokens_different"] == 0
    assert content["rl"][0] == [0, metrics[0]["eval/solved"]]
    assert content["supervised_best"] == max(score for _, score in content["supervised"])


def test_the_report_refuses_what_is_no_run(tmp_path, capsys):
    assert report.main([str(tmp_path / "nothing")]) == 2
    assert "there is no run" in capsys.readouterr().err
