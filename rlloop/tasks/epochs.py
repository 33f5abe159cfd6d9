"""The order of a task's examples."""

from __future__ import annotations

import numpy as np


def in_epochs(seed: int, size: int, step: int, count: int) -> list[int]:
    """Indices of the `count` examples of step `step` (from 1), out of `size`: each once an epoch, in an order of the
    seed and the epoch."""
    first = (step - 1) * count
    epochs = range(first // size, (first + count - 1) // size + 1)
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(size) for epoch in epochs}
    return [int(orders[at // size][at % size]) for at in range(first, first + count)]
