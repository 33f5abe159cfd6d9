"""The value half of PPO against its formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlloop.algorithms.values import explained_variance, gae, value_loss


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (0.9, 0.0)])
def test_gae_is_the_sum_of_discounted_deltas(gamma, lam):
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=7), rng.normal(size=7)
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 7)) for t in range(7)]
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-12)
    np.testing.assert_allclose(returns, np.array(expected) + values, rtol=1e-12)


def test_with_lambda_1_returns_are_what_was_earned():
    rewards = [0.0, -0.1, 0.0, 1.0]
    _, returns = gae(rewards, [5.0, -3.0, 0.2, 9.0], gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns, [0.9, 0.9, 1.0, 1.0])


def test_a_value_that_moved_too_far_has_no_gradient():
    values = torch.tensor([0.5, 0.1, -0.6, 0.5], requires_grad=True)
    old, returns = torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 0.0])
    loss, clipped = value_loss(values, old, returns, clip=0.2)
    loss.sum().backward()
    # towards the return beyond the bound: silenced; within it, or away from the return: half the squared error
    assert clipped.tolist() == [True, False, False, False]
    torch.testing.assert_close(loss.detach(), torch.tensor([0.5 * 0.64, 0.5 * 0.81, 0.5 * 2.56, 0.5 * 0.25]))
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -0.9, -1.6, 0.5]))
    assert not value_loss(values, old, returns, clip=0.0)[1].any()


def test_explained_variance():
    returns = [0.0, 1.0, 2.0, 3.0]
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance([7.0] * 4, returns) == 0.0
    assert explained_variance([3.0, 2.0, 1.0, 0.0], returns) < 0
    assert explained_variance([0.3, 0.1], [1.0, 1.0]) == 0.0
