import pytest

from rlloop.config.trainer import Schedule, TrainerConfig
from rlloop.trainer.schedule import learning_rate


def rates(config: TrainerConfig) -> list[float]:
    return [learning_rate(update, config) for update in range(config.num_steps * config.num_minibatches)]


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        (Schedule.constant, 0, [2.0, 2.0, 2.0, 2.0]),
        (Schedule.constant, 2, [1.0, 2.0, 2.0, 2.0]),
        (Schedule.linear, 0, [2.0, 1.5, 1.0, 0.5]),
        (Schedule.linear, 2, [1.0, 2.0, 2.0, 1.0]),
        (Schedule.cosine, 0, [2.0, 1.7071067811865475, 1.0, 0.2928932188134524]),
        (Schedule.cosine, 4, [0.5, 1.0, 1.5, 2.0]),
    ],
)
def test_golden_values(schedule: Schedule, warmup: int, expected: list[float]) -> None:
    config = TrainerConfig(lr=2.0, num_steps=4, schedule=schedule, warmup_steps=warmup)
    assert rates(config) == pytest.approx(expected, rel=1e-12)


def test_minibatches_stretch_the_schedule() -> None:
    config = TrainerConfig(lr=2.0, num_steps=2, num_minibatches=2, schedule=Schedule.linear)
    assert rates(config) == pytest.approx([2.0, 1.5, 1.0, 0.5])


def test_nothing_is_learned_past_the_end_of_a_falling_schedule() -> None:
    config = TrainerConfig(lr=2.0, num_steps=4, schedule=Schedule.linear)
    assert learning_rate(9, config) == 0.0
