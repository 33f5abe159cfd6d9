"""A reward that reads a field of the rows refuses rows without it, before a run begins."""

from __future__ import annotations

import pytest

from rlloop.config.run import AlgorithmConfig, RunConfig
from rlloop.errors import ConfigError
from rlloop.launch.prepare import prepare

EXACT = {"_target_": "rlloop.recipes.custom.reward.exact_match"}
WEIGHTED = {"_target_": "rlloop.rewards.Weighted", "parts": {"exact": EXACT}}
JUDGE = {"url": "http://127.0.0.1:9", "model": "judge"}
RUBRICS = {"_target_": "rlloop.rewards.JudgeReward", "judge": JUDGE, "rubrics": {"a": {"text": "A."}}}
PAIRS = {"_target_": "rlloop.rewards.PairwiseJudge", "judge": JUDGE}


def prepared(reward: dict) -> None:
    grpo = AlgorithmConfig(loss="grpo", advantage="group_norm")
    task = {"_target_": "rlloop.testing.FakeTask"}
    prepare(RunConfig(algorithm=grpo, task=task, reward=reward)).scorer.close()


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (
            EXACT,
            r"reward: exact_match reads the row's field 'answer', and rows have .*: set \+reward.answer_key=target",
        ),
        (
            {**EXACT, "answer_key": "right"},
            "field 'right', and rows have .*: set reward.answer_key=target, or your own",
        ),
        (WEIGHTED, "reward: part 'exact': exact_match reads the row's field 'answer'"),
        ({"_target_": "rlloop.rewards.MathReward"}, "no field 'answer'; answer_key must name"),
        ({"_target_": "rlloop.rewards.CodeReward"}, "no field 'tests'; tests_key must name"),
        ({**RUBRICS, "reference_key": "right"}, "no field 'right'; reference_key must name"),
        ({**PAIRS, "reference_key": "right"}, "no field 'right'; reference_key must name"),
    ],
)
def test_rows_without_the_field_are_refused_with_the_fields_that_there_are(reward, says):
    with pytest.raises(ConfigError, match=says):
        prepared(reward)


@pytest.mark.parametrize("reward", [{**EXACT, "answer_key": "target"}, RUBRICS, PAIRS])
def test_rows_with_it_are_taken_and_so_are_rewards_that_read_none(reward):
    prepared(reward)


def test_a_player_may_give_rows_the_field_but_other_checks_are_asked(monkeypatch):
    monkeypatch.setattr("rlloop.testing.FakeTask.player", object(), raising=False)
    prepared(EXACT)

    def refuses(example: object) -> None:
        raise ConfigError("no pictures")

    monkeypatch.setattr("rlloop.recipes.custom.reward.exact_match.check_example", refuses)
    with pytest.raises(ConfigError, match="reward: no pictures"):
        prepared(EXACT)
