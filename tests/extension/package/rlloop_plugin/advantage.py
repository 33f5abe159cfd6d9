"""An advantage: rewards [n] and group numbers [n] of one step to advantages [n]."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def ranks(rewards: ArrayLike, groups: ArrayLike, *, scale: float = 1.0) -> NDArray[np.float64]:
    """`scale` times (members of its group with a lower reward − members with a higher one)."""
    rewards, groups = np.asarray(rewards, dtype=np.float64), np.asarray(groups)
    beside = groups[:, None] == groups[None, :]
    return scale * (beside * np.sign(rewards[:, None] - rewards[None, :])).sum(1)
