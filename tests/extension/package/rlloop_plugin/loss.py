"""A loss: any function from a `LossBatch` to a `LossOutput`. Its keyword arguments are keys of the recipe."""

from rlloop.algorithms import LossBatch, LossOutput, PolicyTerm, finish, token_mean


def tempered(batch: LossBatch, *, power: float = 1.0, kl_coef: float = 0.0) -> LossOutput:
    """REINFORCE with tempered advantages.

        L = −1/T sum_t sign(A_t) |A_t|^power logprobs_t

    Shapes: tokens are flat, [N].
    Denominator: `total_tokens`.
    """
    b = batch.unmasked()
    advantages = b.advantages.sign() * b.advantages.abs() ** power
    return finish(b, PolicyTerm(-advantages * b.logprobs, {}), token_mean(b), kl_coef=kl_coef)
