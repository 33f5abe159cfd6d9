"""`task=NAME`: an entry of the group in place of a recipe's section."""

from __future__ import annotations

import pytest

from rlloop.config.tasks import REWARDS, TASKS
from rlloop.errors import ConfigError
from rlloop.launch.compose import build, compose_recipe


def config(*overrides: str):
    return build(compose_recipe("guess", ["task=reasoning_gym", "task.name=chain_sum", *overrides]))


def test_the_entry_replaces_the_recipes_section_and_its_reward():
    made = config("task.arguments={max_terms: 3}", "rollout.max_tokens=7")
    assert made.task.keys() == TASKS["reasoning_gym"].keys()
    assert (made.task["name"], made.task["arguments"], made.task["max_tokens"]) == ("chain_sum", {"max_terms": 3}, 7)
    assert made.reward == REWARDS["reasoning_gym"]
    assert config("reward._target_=mine.reward").reward["_target_"] == "mine.reward"


def test_an_inline_section_still_takes_its_own_keys():
    made = build(compose_recipe("guess", ["task.numbers=5"]))
    assert (made.task["numbers"], made.task["_target_"]) == (5, "rlloop.recipes.guess.task.Guess")


def test_files_of_the_recipes_own_task_are_not_asked_for():
    chosen = ["task=reasoning_gym", "task.name=chain_sum", "model.path=sft"]
    assert build(compose_recipe("smollm2", chosen)).data["path"] is None
    with pytest.raises(ConfigError, match=r"data.path must be given"):
        build(compose_recipe("smollm2", chosen[2:]))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["task=verifier"],
            r"task is 'verifier'; it must be one of verifiers, reasoning_gym \(did you mean verifiers\?",
        ),
        (["task=verifiers"], r"task.name must be given"),
        (["task=verifiers", "task.name=a", "task.harnes=null"], r"\(did you mean harness\?\); it has name, "),
        (["task=verifiers", "task.name=a", "~task.harness"], r"needs all of its keys"),
    ],
)
def test_what_cannot_work_is_refused_by_name(overrides, says):
    with pytest.raises(ConfigError, match=says):
        build(compose_recipe("guess", overrides))
