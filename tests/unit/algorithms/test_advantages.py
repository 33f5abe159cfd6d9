import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlloop.algorithms import batch_norm, get_advantage, global_norm, group_mean, group_norm, leave_one_out, raw
from rlloop.algorithms.advantages import ADVANTAGES, GROUP_RELATIVE

REWARDS = [1.0, 0.0, 0.0, 0.0, 5.0, 3.0]
GROUPS = [7, 7, 7, 7, 2, 2]


def test_group_mean():
    assert group_mean(REWARDS, GROUPS).tolist() == [0.75, -0.25, -0.25, -0.25, 1.0, -1.0]


def test_group_norm():
    first = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)  # sample standard deviations: 0.5 and sqrt(2)
    second = math.sqrt((1 + 1) / 1)
    expected = [0.75 / first, *[-0.25 / first] * 3, 1 / second, -1 / second]
    assert group_norm(REWARDS, GROUPS, eps=0.0) == pytest.approx(expected)
    assert group_norm(REWARDS, GROUPS, eps=0.5)[0] == pytest.approx(0.75 / (0.5 + 0.5))


def test_leave_one_out():
    expected = [1.0 - 0.0, 0.0 - 1 / 3, 0.0 - 1 / 3, 0.0 - 1 / 3, 5.0 - 3.0, 3.0 - 5.0]
    assert leave_one_out(REWARDS, GROUPS) == pytest.approx(expected)


def test_batch_norm():
    centred = [0.75, -0.25, -0.25, -0.25, 1.0, -1.0]
    scale = math.sqrt(sum(c * c for c in centred) / 5)
    assert batch_norm(REWARDS, GROUPS, eps=0.0) == pytest.approx([c / scale for c in centred])
    assert batch_norm(REWARDS, GROUPS, eps=0.5) == pytest.approx([c / (scale + 0.5) for c in centred])


def test_global_norm():
    mean = 9 / 6
    scale = math.sqrt(sum((r - mean) ** 2 for r in REWARDS) / 5)
    assert global_norm(REWARDS, GROUPS, eps=0.0) == pytest.approx([(r - mean) / scale for r in REWARDS])
    assert global_norm(REWARDS, GROUPS, eps=0.5) == pytest.approx([(r - mean) / (scale + 0.5) for r in REWARDS])
    assert global_norm([1.0, 0.0], [0, 1], eps=0.0) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


@pytest.mark.parametrize("name", ["group_norm", "batch_norm", "global_norm"])
def test_rewards_that_hardly_vary_are_divided_by_a_millionth_more(name):
    assert get_advantage(name)([1e-6, -1e-6], [0, 0])[0] == pytest.approx(1 / (2**0.5 + 1))


def test_raw_is_a_copy():
    rewards = np.array(REWARDS)
    advantages = raw(rewards, GROUPS)
    advantages[0] = 9.0
    assert rewards.tolist() == REWARDS


steps = st.integers(2, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-5, 5).map(lambda r: round(r, 3)), min_size=n, max_size=n),
        st.lists(st.integers(-3, 3), min_size=n, max_size=n).filter(lambda groups: len(set(groups)) < len(groups)),
    )
)


@settings(max_examples=40, deadline=None)
@given(steps)
def test_leave_one_out_is_the_mean_of_the_others(step):
    rewards, groups = step
    for i, found in enumerate(leave_one_out(rewards, groups)):
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
        assert found == pytest.approx(rewards[i] - sum(others) / len(others) if others else 0.0, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(steps, st.randoms())
def test_order_of_samples_does_not_matter(step, random):
    rewards, groups = step
    order = list(range(len(rewards)))
    random.shuffle(order)
    for name in ADVANTAGES:
        straight = get_advantage(name)(rewards, groups)
        shuffled = get_advantage(name)([rewards[i] for i in order], [groups[i] for i in order])
        assert shuffled == pytest.approx(straight[order], rel=1e-6, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(steps)
def test_group_relative_advantages_sum_to_zero_in_each_group(step):
    rewards, groups = step
    for name in GROUP_RELATIVE:
        advantages = get_advantage(name)(rewards, groups)
        for group in set(groups):
            assert sum(a for a, g in zip(advantages, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(steps, st.floats(0.5, 100), st.floats(-10, 10))
def test_normalised_advantages_know_neither_scale_nor_shift(step, scale, shift):
    rewards, groups = step
    for name in ("group_norm", "batch_norm", "global_norm"):
        estimate = get_advantage(name, eps=1e-12)
        moved = [scale * r + shift for r in rewards]
        assert estimate(moved, groups) == pytest.approx(estimate(rewards, groups), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6), st.integers(2, 9))
def test_equal_rewards_give_exactly_zero(reward, size):
    """Not a rounding error of the mean, which 1 / eps would blow up: three times 0.1 is such a case."""
    for name in GROUP_RELATIVE:
        assert not get_advantage(name)([reward] * size, [0] * size).any()
    for name in ("group_norm", "batch_norm", "global_norm"):
        assert not get_advantage(name, eps=0)([reward] * size, [0] * size).any()


def test_a_lone_sample_gets_no_advantage():
    for name in GROUP_RELATIVE:
        assert get_advantage(name)([1.0, 0.0, 4.0], [0, 0, 1])[2] == 0
        assert not get_advantage(name)([1.0, 2.0], [0, 1]).any()
    for name in (*GROUP_RELATIVE, "global_norm"):
        assert get_advantage(name)([4.0], [0]).tolist() == [0.0]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_estimates_are_float64_whatever_rewards_are(name):
    rewards = np.array([0.1, 0.7, 0.2, 0.9], np.float32)
    found = get_advantage(name)(rewards, [0, 0, 1, 1])
    assert found.dtype == get_advantage(name)([1, 0, 3, 2], [0, 0, 1, 1]).dtype == np.float64
    assert found.tolist() == get_advantage(name)(rewards.tolist(), [0, 0, 1, 1]).tolist()


def test_no_samples_no_advantages():
    for name in ADVANTAGES:
        assert len(get_advantage(name)([], [])) == 0


def test_torch_tensors_are_welcome():
    import torch

    assert group_mean(torch.tensor([1.0, 0.0]), torch.tensor([3, 3])).tolist() == [0.5, -0.5]
