"""Supervised fine-tuning: cross-entropy."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.terms import PolicyTerm, finish, token_mean


def sft(batch: LossBatch) -> LossOutput:
    """Minus the mean log-probability of the given tokens, in nats.

        L = −1/T sum_t logprobs_t

    Shapes: tokens are flat, [N]; advantages, old and rollout logprobs are not read.
    Denominator: `total_tokens`.
    """
    b = batch.unmasked()
    return finish(b, PolicyTerm(-b.logprobs, {}), token_mean(b))
