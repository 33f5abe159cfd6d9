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
    assert numbers(Evaluation(Path("model"), rewards, solved, [], offline)) == said


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ([(0.1, 0.0), (0.6, 0.5)], ["pass@1  0.0000", "reward  0.0500"]),
        ([(0.1, 0.0)], ["reward  0.0500"]),
        ([(3.0, 0.5)], ["reward  0.0500"]),
    ],
)
def test_a_run_that_solved_something_has_a_pass_at_1_of_0(recorded, said):
    assert numbers(Evaluation(Path("model"), [0.1, 0.0], [False, False], [], None, recorded)) == said


def test_samples_without_a_reward_are_rejected_as_in_a_run():
    rows = [{"reward": 1.0}, {"failed": "ValueError: odd (mine.py:3)"}]
    last = Evaluation(Path("model"), [1.0], [True], rows).describe().splitlines()[-1]
    assert last == "  1 of 2 held-out samples rejected, first: ValueError: odd (mine.py:3)"


def numbers(evaluation):
    return [line.partition(" ±")[0].strip() for line in evaluation.describe().splitlines()[1:]]
