"""Learning-rate schedules: pure functions of the update's number, so that a resumed run repeats them."""

from __future__ import annotations

import math

from rlloop.config.trainer import Schedule, TrainerConfig


def learning_rate(update: int, config: TrainerConfig) -> float:
    """The learning rate of update `update` (from 0) of `num_steps * num_minibatches`.

    It rises linearly over the first `warmup_steps` updates, the last of which has the full rate. Then it stays
    (`constant`) or falls (`linear`, `cosine`) to 0, which it would reach one update after the last.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == Schedule.constant:
        return config.lr
    falling = max(1, config.num_steps * config.num_minibatches - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / falling)
    if config.schedule == Schedule.linear:
        return config.lr * (1.0 - progress)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
