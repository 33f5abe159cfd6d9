"""`rlloop eval` says pass@1 where completions pass or fail."""

from pathlib import Path

import pytest

from rlloop.launch.evaluate import Evaluation


@pytest.mark.parametrize(
    ("rewards", "solved", "said"),
    [
        ([1.0, 0.0], [True, False], ["pass@1  0.5000", "reward  0.5000"]),
        ([0.4, 0.5], [False, False], ["reward  0.4500"]),
        ([4.0, 0.0], [True, False], ["reward  2.0000"]),
    ],
)
def test_pass_at_1_is_said_of_rewards_that_pass_or_fail(rewards, solved, said):
    lines = Evaluation(Path("model"), rewards, solved, 0, []).describe().splitlines()[1:]
    assert [line.partition(" ±")[0].strip() for line in lines] == said
