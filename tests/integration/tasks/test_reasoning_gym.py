"""Problems and scores of the library reasoning-gym."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.runs.folder import read_records
from rlloop.tasks.reasoning_gym_tasks import ReasoningGym, reward
from rlloop.types import Example

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the library's own
    pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym: make test-environments"),
]
ROOM = {"max_tokens": 8, "max_sequence_tokens": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / "model"
    write_tiny(folder, hidden_size=32, num_layers=1)
    return str(folder)


@pytest.mark.parametrize("name", ["chain_sum", "arc_agi", "countdown", "family_relationships"])
def test_right_answers_score_as_the_library_says_though_examples_were_records(model, name):
    try:
        task = ReasoningGym(3, model, name=name, train_size=8, eval_size=2, **{**ROOM, "max_sequence_tokens": 100000})
    except ConfigError:  # the tiny model has few positions
        pytest.skip("its prompts are longer than the model")
    for example in task.train_examples(1, 4) + task.eval_examples(2):
        again = Example(**json.loads(json.dumps(vars(example))))
        right = reward("", f"so <answer>{example.data['answer']}</answer>", again)
        assert right.solved
        assert right.components == {"answered": 1.0}
        assert not reward("", "<answer>no idea</answer>", again).solved
        assert reward("", "no idea", again).components == {"answered": 0.0}


def test_problems_are_those_of_seed_and_step(model):
    first, same, other = (ReasoningGym(seed, model, name="chain_sum", train_size=8, **ROOM) for seed in (1, 1, 2))
    assert first.train_examples(2, 5) == same.train_examples(2, 5) != other.train_examples(2, 5)
    assert len({each.id for step in (1, 2) for each in first.train_examples(step, 4)}) == 8
    assert not {e.prompt for e in first.train_examples(1, 8)} & {e.prompt for e in first.eval_examples(8)}


def test_what_does_not_exist_is_refused_by_name(model):
    with pytest.raises(ConfigError, match=r"reasoning_gym has .*chain_sum"):
        ReasoningGym(0, model, name="chain_sums", **ROOM)
    with pytest.raises(ConfigError, match=r"task.arguments do not fit reasoning_gym's chain_sum"):
        ReasoningGym(0, model, name="chain_sum", arguments={"terms": 1}, **ROOM)


def test_a_run(model, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", "--config-name", "agent", f"model.path={model}", "task=reasoning_gym", "run.dir=run"]
    small = ["rollout.num_prompts=2", "rollout.group_size=2", "rollout.max_tokens=8", "trainer.num_steps=1"]
    assert main([*command, "task.name=chain_sum", "task.arguments={max_terms: 2}", *small, "eval.num_draws=2"]) == 0
    [_, record] = read_records(tmp_path / "run/metrics.jsonl")
    assert record["parity/tokens_different"] == 0
    assert "reward/answered" in record
