"""The value half of PPO: generalised advantage estimation, the clipped value loss, and explained variance."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def gae(
    rewards: ArrayLike, values: ArrayLike, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Advantages and returns of one episode's T tokens, in float64; Schulman et al. 2016 (1506.02438), equation 16.

        delta_t = r_t + gamma V_{t+1} − V_t        A_t = delta_t + gamma lam A_{t+1}        return_t = A_t + V_t

    rewards, values: [T] each, of the policy's tokens alone: another's tokens between two turns are no steps of time.
    V and A after the last token are 0.
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    advantages, following = np.zeros_like(values), 0.0
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    for at in reversed(range(len(values))):
        advantages[at] = following = deltas[at] + gamma * lam * following
    return advantages, advantages + values


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = 0.2) -> tuple[Tensor, Tensor]:
    """1/2 max((V − R)², (clip(V, V_old ± clip) − R)²) by token [N], and where the clipped one is the larger, [N] bool.

    As in OpenAI's `baselines` and TRL: a value moves by at most `clip` in one step's update. `clip` 0: no clipping.
    """
    error = (values - returns).square()
    if not clip:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(error, bounded), bounded > error


def explained_variance(values: ArrayLike, returns: ArrayLike) -> float:
    """1 − Var(R − V) / Var(R): 1 for a perfect critic, 0 for a constant, below 0 for a worse one; 0 where R is
    constant."""
    values, returns = np.asarray(values, np.float64), np.asarray(returns, np.float64)
    spread = float(np.var(returns))
    return 0.0 if spread == 0.0 else 1.0 - float(np.var(returns - values)) / spread
