"""Estimates of KL(policy ‖ reference), as a term of the loss or of the reward.

From tokens sampled by the policy, with d = ref − logprob (http://joschu.net/blog/kl-approx.html):

    k1 = −d              unbiased, may be negative, high variance
    k2 = d^2 / 2         biased, never negative
    k3 = exp(d) − 1 − d  unbiased, never negative, low variance

Each is an estimate of the same positive number: a policy that has left its reference has a positive mean.

As a **loss** only the gradient matters, and the three differ: that of k1 is zero in expectation (it regularises
nothing: use k1 in the reward), that of k2 is the gradient of KL(policy ‖ reference) on on-policy samples, that of k3 is
the gradient of KL(reference ‖ policy). k1 is REINFORCE++'s choice in the reward, k3 GRPO's in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: torch.expm1(d) - d,  # exp(d) − 1 − d loses every digit where d is small
}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = "k3") -> Tensor:
    """[N], [N] -> [N] float64, in nats. The gradient reaches `logprobs`, never the reference."""
    return ESTIMATORS[kind](ref_logprobs.detach().double() - logprobs.double())


def kl_in_reward(
    rewards: Sequence[float],
    logprobs: Sequence[np.ndarray],
    ref_logprobs: Sequence[np.ndarray],
    *,
    kl_coef: float,
    kl: KLKind = "k1",
) -> np.ndarray:
    """R_i − kl_coef * sum_t k(t): the penalty that a sequence pays in its reward, before any advantage is estimated.

    rewards [n], logprobs and ref_logprobs n arrays [T_i] -> [n] float64. The sum over tokens with k1 is log
    (policy / reference) of the whole completion, as in Ouyang et al. 2022 (2203.02155) and REINFORCE++ (2501.03262).
    """
    penalties = [
        kl_estimate(torch.as_tensor(policy), torch.as_tensor(reference), kl).sum().item()
        for policy, reference in zip(logprobs, ref_logprobs, strict=True)
    ]
    return np.asarray(rewards, dtype=np.float64) - kl_coef * np.asarray(penalties)
