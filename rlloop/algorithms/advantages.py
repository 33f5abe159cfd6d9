"""Advantages from rewards: pure functions of one step's rewards and groups, in float64, without torch.

    estimator(rewards [n], groups [n] int) -> advantages [n]

Samples of one prompt share a group number; numbers need not be dense nor samples in order. Statistics are over the
whole step, so an estimator runs before the step is split into minibatches. Each normalises at most once, and no loss
normalises again.

A group whose rewards are all equal gets exactly 0 from every group-relative estimator, not a rounding error that a
division by a tiny std would turn into a signal. So does a group of one: it has no baseline.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def group_norm(rewards: ArrayLike, groups: ArrayLike, *, eps: float = 1e-6) -> Array:
    """(R_i − mean of its group) / (std of its group + eps): GRPO (2402.03300), DAPO (2503.14476), GSPO (2507.18071).

    The std is the sample's (n − 1), as in `torch.std` and so in most frameworks; `eps` 1e-6 is common, and shrinks only
    groups that hardly vary.
    """
    centred, members, index = _centre(rewards, groups)
    deviations = np.sqrt(np.bincount(index, centred**2) / np.maximum(members - 1, 1))
    return _scaled(centred, deviations[index] + eps)


def group_mean(rewards: ArrayLike, groups: ArrayLike) -> Array:
    """R_i − mean of its group: Dr. GRPO (2503.20783). In units of reward."""
    return _centre(rewards, groups)[0]


def leave_one_out(rewards: ArrayLike, groups: ArrayLike) -> Array:
    """R_i − mean of the *other* rewards of its group: RLOO (2402.14740). In units of reward.

    It is `group_mean` times n / (n − 1), which makes the baseline independent of the sample it is taken from.
    """
    centred, members, index = _centre(rewards, groups)
    return centred * (members / np.maximum(members - 1, 1))[index]


def batch_norm(rewards: ArrayLike, groups: ArrayLike, *, eps: float = 1e-6) -> Array:
    """(R_i − mean of its group) / (std of those differences over the step + eps).

    REINFORCE++ with baseline (2501.03262). One scale for all prompts: easy and hard ones keep
    their proportions, as with `group_mean`, but the size of the rewards does not matter. The std is the sample's.
    """
    centred, _, _ = _centre(rewards, groups)
    return _scaled(centred, _std(centred) + eps)


def global_norm(rewards: ArrayLike, groups: ArrayLike, *, eps: float = 1e-6) -> Array:
    """(R_i − mean over the step) / (std over the step + eps): REINFORCE++ (2501.03262). Groups are not looked at.

    Works with one sample a prompt. The baseline does not know the prompt: a hard prompt's samples are all pushed down.
    """
    flat = np.asarray(rewards, dtype=np.float64)
    centred, _, _ = _centre(flat, np.zeros(len(flat), dtype=np.int64))
    return _scaled(centred, _std(centred) + eps)


def raw(rewards: ArrayLike, groups: ArrayLike) -> Array:
    """R_i: no baseline. For rewards that are advantages already."""
    return np.array(rewards, dtype=np.float64)


ADVANTAGES = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_norm": batch_norm,
    "global_norm": global_norm,
    "raw": raw,
}
GROUP_RELATIVE = ("group_norm", "group_mean", "leave_one_out", "batch_norm")


def _centre(rewards: ArrayLike, groups: ArrayLike) -> tuple[Array, NDArray[np.int64], NDArray[np.int64]]:
    """R_i − mean of its group [n], members of each group [G], each sample's group as an index [n]."""
    flat = np.asarray(rewards, dtype=np.float64)
    _, first, index, members = np.unique(np.asarray(groups), return_index=True, return_inverse=True, return_counts=True)
    shifted = flat - flat[first][index]  # equal rewards become exact zeros before anything is rounded
    return shifted - (np.bincount(index, shifted) / members)[index], members, index


def _scaled(centred: Array, scale: ArrayLike) -> Array:
    """centred / scale; what does not vary stays 0 where `eps` is 0 too."""
    return np.divide(centred, scale, out=np.zeros_like(centred), where=np.asarray(scale) > 0)


def _std(values: Array) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
