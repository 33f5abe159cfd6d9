import copy
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rlloop.trainer import Trainer, TrainSequence

VOCAB = 61


def make_batch(count: int = 9, seed: int = 0) -> list[TrainSequence]:
    """Ragged sequences as an engine might have made them, each token with its own advantage and some masked."""
    rng = np.random.default_rng(seed)
    batch = []
    for _ in range(count):
        prompt, made = (int(n) for n in rng.integers(1, 12, 2))
        batch.append(
            TrainSequence(
                token_ids=rng.integers(1, VOCAB, prompt + made).tolist(),
                predict=range(prompt, prompt + made),
                advantages=rng.normal(size=made).astype(np.float32),
                rollout_logprobs=rng.normal(-4.0, 0.3, made).astype(np.float32),
                mask=rng.random(made) < 0.8,
            )
        )
    return batch


GROUPS = (
    (3, 70),
    (1, 80),
    (2, 65),
    (2, 66),
    (2, 5),
)  # sequences, and tokens of their prompt: 64 of 70, 65, 66 are shared


def make_groups(groups: Sequence[tuple[int, int]] = GROUPS, seed: int = 0) -> list[TrainSequence]:
    """Groups of sequences with the same prompt."""
    rng, batch = np.random.default_rng(seed), []
    for count, length in groups:
        prompt = rng.integers(1, VOCAB, length).tolist()
        for _ in range(count):
            made = int(rng.integers(1, 20))
            batch.append(
                TrainSequence(
                    token_ids=prompt + rng.integers(1, VOCAB, made).tolist(),
                    predict=range(length, length + made),
                    advantages=rng.normal(size=made).astype(np.float32),
                    rollout_logprobs=rng.normal(-4.0, 0.3, made).astype(np.float32),
                    mask=rng.random(made) < 0.9,
                )
            )
    return batch


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """The sums of all micro-batches since the last update, by name; the trainer keeps them."""
    sums = trainer._masters.gradients
    kept = copy.deepcopy((sums._trees, sums._present))
    found = {name: total for name, total in sums.totals().items() if total is not None}
    sums._trees, sums._present = kept
    return found
