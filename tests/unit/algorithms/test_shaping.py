import numpy as np
import pytest

from rlloop.algorithms import groups_with_signal, overlong_penalty
from rlloop.errors import ConfigError


def test_overlong_penalty_is_zero_then_linear_then_one():
    assert overlong_penalty([0, 60, 70, 80, 100, 120], max_tokens=100, buffer=40).tolist() == [
        0.0,
        0.0,
        -0.25,
        -0.5,
        -1.0,
        -1.0,
    ]


def test_the_buffer_may_be_one_token_or_the_whole_budget():
    assert overlong_penalty([99, 100], max_tokens=100, buffer=1).tolist() == [0.0, -1.0]
    assert overlong_penalty([0, 50, 100], max_tokens=100, buffer=100).tolist() == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_an_impossible_buffer_is_refused(buffer):
    with pytest.raises(ConfigError, match="from 1 to max_tokens"):
        overlong_penalty([1], max_tokens=100, buffer=buffer)


def test_groups_with_signal():
    rewards = [0.1, 0.1, 0.1, 1.0, 0.0, 1.0, 0.3]
    groups = [4, 4, 4, 9, 9, 9, 1]
    assert groups_with_signal(rewards, groups).tolist() == [False, False, False, True, True, True, False]
    assert groups_with_signal(np.array([]), np.array([], dtype=int)).tolist() == []
