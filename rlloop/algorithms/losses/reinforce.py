"""REINFORCE: the plain policy gradient."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.terms import PolicyTerm, finish, sequence_sum


def reinforce(batch: LossBatch, *, kl_coef: float = 0.0, kl: KLKind = "k3", entropy_coef: float = 0.0) -> LossOutput:
    """Minus the advantage times the log-probability of the whole completion.

        L = −1/S sum_i sum_t A_it logprobs_it

    Williams 1992 (doi:10.1007/BF00992696). With A of mean zero given the prompt, the unbiased gradient of the expected
    reward, on-policy. It looks at no old policy: a second optimizer step on the same samples is already biased.
    Shapes: tokens are flat, [N].
    Denominator: `total_sequences`; tokens are summed, so the gradient is of the sequence's probability.
    Defaults: no penalty, as in the paper.
    """
    b = batch.unmasked()
    policy = PolicyTerm(-b.advantages * b.logprobs, {})
    return finish(b, policy, sequence_sum(b), kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef)
