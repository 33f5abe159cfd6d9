"""Pairs of a chosen and a rejected completion in a batch."""

from __future__ import annotations

from torch import Tensor

from rlloop.algorithms.batch import LossBatch
from rlloop.errors import ConfigError
from rlloop.metrics import Mean, Reduction


def pairs_of(batch: LossBatch, values: Tensor) -> tuple[Tensor, Tensor]:
    """[P] and [P]: `values`, [S], of the chosen and of the rejected sequences. `batch` is unmasked.

    Raises `ConfigError` where sequences 2p and 2p + 1 are not chosen and rejected, by the sign of their advantages.
    """
    signs = batch.sequence_mean(batch.advantages).sign()
    if len(values) % 2 or not (signs[0::2] > 0).all() or not (signs[1::2] < 0).all():
        raise ConfigError(
            f"a loss of pairs got {len(values)} sequences with advantages of the signs {signs.int().tolist()!s:.80}, "
            "and takes a chosen completion (above 0) and a rejected one (below) in turn, as a task with preferences "
            "gives them with rollout.group_size=2 and algorithm.advantage=raw"
        )
    return values[0::2], values[1::2]


def pair_metrics(losses: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Reduction]:
    """`loss/policy`, and the rewards of chosen and rejected completions: their means, margin and order."""
    count = len(losses)
    if not count:
        return {}
    values = {
        "loss/policy": losses,
        "loss/reward_chosen": chosen,
        "loss/reward_rejected": rejected,
        "loss/reward_margin": chosen - rejected,
        "loss/reward_accuracy": (chosen > rejected).double(),
    }
    return {name: Mean(value.detach().sum().item(), count) for name, value in values.items()}
