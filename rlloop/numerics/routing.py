"""Rules of a mixture of experts, as operations take them: routing, and the clamped experts of gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """A router's rule. Order is total everywhere: value descending, index ascending; a NaN counts as −inf.

    Scores are the softmax over all experts, or the sigmoid of each. What is ranked is the score plus the expert's bias;
    what weighs is the score alone. With groups, only experts of the `top_groups` best ones can be chosen; a group is
    worth the sum of its two best values. Slots keep the order in which experts were chosen.
    """

    top_k: int
    score: str = "softmax"  # or sigmoid
    groups: int = 1  # equal runs of consecutive experts
    top_groups: int = 1
    normalise: bool = False  # weights are divided by their sum, made in slot order
    epsilon: float = 0.0  # added to that sum
    scale: float = 1.0  # of the weights, at the end


@dataclass(frozen=True)
class Clamped:
    """Experts with biases and an activation within limits (gpt-oss): `gate sigmoid(alpha gate) (up + 1)`, with the gate
    at most `limit` and up at most that far from 0. Matrices are [E, D, 2F], gate and up in turn, and [E, F, D]."""

    up_bias: Tensor  # [E, 2F]
    down_bias: Tensor  # [E, D]
    limit: float
    alpha: float
