"""The task that a run's configuration names, and what a loss can learn from it."""

from typing import Any

import pytest

from rlloop.algorithms.presets import PRESETS
from rlloop.config.model import ModelSection
from rlloop.config.run import AlgorithmConfig, RunConfig
from rlloop.errors import ConfigError
from rlloop.launch.layouts import check_task
from rlloop.launch.prepare import prepare
from rlloop.testing import FakeTask


@pytest.mark.parametrize(("own", "used"), [({}, 3), ({"seed": 5}, 5)])
def test_a_task_has_the_runs_seed_unless_it_has_its_own(own: dict[str, int], used: int) -> None:
    config = RunConfig(
        seed=3,
        algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"),
        task={"_target_": "rlloop.testing.FakeTask", **own},
        reward={"_target_": "rlloop.recipes.custom.reward.exact_match", "answer_key": "target"},
    )
    prepared = prepare(config)
    prepared.scorer.close()
    assert isinstance(prepared.task, FakeTask)
    assert prepared.task.seed == used


def test_a_recipe_without_a_task_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no task; add task=verifiers or task=reasoning_gym, and task.name="):
        prepare(RunConfig(algorithm=PRESETS["grpo"]))


def checked(algorithm: Any, **of_task: Any) -> None:
    task = FakeTask(0)
    vars(task).update(of_task)
    check_task(RunConfig(algorithm=algorithm), task)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dpo", "algorithm=dpo learns from given pairs: use --config-name offline/preferences, or another"),
        ("ipo", "algorithm=ipo learns from given pairs: use --config-name offline/preferences"),
        ("reward_model", "algorithm=reward_model learns from given pairs: use --config-name offline/reward_model"),
        ("sft", "algorithm=sft needs given completions: use --config-name offline"),
        ("distillation", "algorithm=distillation needs a teacher: set model.reference_path"),
    ],
)
def test_a_loss_that_cannot_learn_from_samples_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        checked(PRESETS[name])


def test_losses_are_taken_with_what_they_learn_from() -> None:
    for name in ("dpo", "ipo", "reward_model", "sft"):
        checked(PRESETS[name], player=object())  # a task of one's own, which may give anything
        checked(PRESETS[name], player=object(), gives_completions=True, gives_pairs=True)
    with pytest.raises(ConfigError, match="given pairs"):
        checked(PRESETS["dpo"], player=object(), gives_completions=True, gives_pairs=False)
    for name in ("rejection_sampling", "kto", "grpo"):
        checked(PRESETS[name])
    checked(AlgorithmConfig(loss={"_target_": "mine.dpo"}, advantage="raw"))
    check_task(RunConfig(algorithm=PRESETS["distillation"], model=ModelSection(reference_path="teacher")), FakeTask(0))
