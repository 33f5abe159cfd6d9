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

from collections.abc import Callable
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


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k3") -> Tensor:
    """[N], [N] -> [N] float64, in nats. The gradient reaches `logprobs`, never the reference."""
    return ESTIMATORS[kind](ref_logprobs.detach().double() - logprobs.double())


def sequence_kl(logprobs: np.ndarray, ref_logprobs: np.ndarray, kind: str = "k1") -> float:
    """The sum over one completion's tokens, [T] and [T], in nats, for `algorithm.reward_kl_coef`.

    With k1 it is log (policy / reference) of the whole completion, the penalty of Ouyang et al. 2022 (2203.02155) and
    REINFORCE++ (2501.03262). It enters the reward before any advantage is estimated.
    """
    return kl_estimate(torch.as_tensor(logprobs), torch.as_tensor(ref_logprobs), kind).sum().item()
