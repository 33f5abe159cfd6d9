"""`rlloop eval` says pass@1 where completions pass or fail."""

from pathlib import Path

import pytest

from rlloop.launch.evaluate import Evaluation


@pytest.mark.parametrize(
    ("rewards", "solved", "offline", "said"),
    [
        ([1.0, 0.0], [True, False], None, ["pass@1  0.5000", "reward  0.5000"]),
        ([0.0, 0.0], [False, False], None, ["pass@1  0.0000", "reward  0.0000"]),
        ([0.4, 0.5], [False, False], None, ["reward  0.4500"]),
        ([4.0, 0.0], [True, False], None, ["reward  2.0000"]),
        ([4.0, 0.0], [True, False], "preferences", ["reward  2.0000"]),
        ([4.0, -1.0], [True, False], "verdicts", ["preference accuracy  0.5000", "margin  1.5000"]),
    ],
)
def test_pass_at_1_is_said_of_rewards_that_pass_or_fail(rewards, solved, offline, said):
    lines = Evaluation(Path("model"), rewards, solved, 0, [], offline).describe().splitlines()[1:]
    assert [line.partition(" ±")[0].strip() for line in lines] == said
