"""The task that a run's configuration names."""

import pytest

from rlloop.config.run import AlgorithmConfig, RunConfig
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
