"""Shaping of rewards and filtering of groups, before advantages are estimated: the parts of DAPO outside its loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlloop.errors import ConfigError


def best_of_groups(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.bool_]:
    """[n] True for samples with the best reward of their group, in groups whose rewards differ."""
    values, group_ids = np.asarray(rewards, dtype=np.float64), np.asarray(groups)
    best = np.array([values[group_ids == group].max() for group in group_ids])
    return (values == best) & groups_with_signal(values, group_ids)


def overlong_penalty(lengths: ArrayLike, *, max_tokens: int, buffer: int) -> NDArray[np.float64]:
    """A penalty from 0 to −1 to add to each reward, for completions that come near their budget: [n] -> [n].

        0                                     length <= max_tokens − buffer
        (max_tokens − buffer − length)/buffer  between
        −1                                    length >= max_tokens

    DAPO's soft overlong punishment, equation 13 (2503.14476), with max_tokens the whole budget and `buffer` its last
    part (the paper: 20,480 and 4,096). Added before the advantages, so a penalty is relative to its group.
    """
    if not 0 < buffer <= max_tokens:
        raise ConfigError(f"the overlong buffer is {buffer} tokens; it must be from 1 to max_tokens ({max_tokens})")
    lengths = np.asarray(lengths, dtype=np.float64)
    return np.clip((max_tokens - buffer - lengths) / buffer, -1.0, 0.0)


def groups_with_signal(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.bool_]:
    """True for samples whose group has different rewards: [n], [n] -> [n] bool. DAPO's dynamic sampling, as a filter.

    Groups that are all right or all wrong have zero advantages and only dilute the mean. Judge them by the rewards
    *before* shaping: a length penalty must not pass for a signal. What a dropped group would have paid in KL or entropy
    penalties goes with it. The paper samples further prompts until the batch is full; that is the caller's to do.
    """
    flat = np.asarray(rewards, dtype=np.float64)
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    lowest = np.full(index.max(initial=-1) + 1, np.inf)
    highest = -lowest
    np.minimum.at(lowest, index, flat)
    np.maximum.at(highest, index, flat)
    return (highest > lowest)[index]
