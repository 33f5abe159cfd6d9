"""RLOO: REINFORCE leave-one-out."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.losses.reinforce import reinforce


def rloo(batch: LossBatch, *, kl_coef: float = 0.0, kl: KLKind = "k3", entropy_coef: float = 0.0) -> LossOutput:
    """REINFORCE on whole sequences; what is new is the advantage, `leave_one_out`.

        L = −1/S sum_i A_i sum_t logprobs_it,   A_i = R_i − mean of the other rewards of its group

    Kool et al. 2019 (openreview r1lgTGL5DE); Ahmadian et al. 2024 (2402.14740), who put the KL to the reference into
    the reward (`algorithm.reward_kl_coef`) rather than into the loss.
    Shapes: tokens are flat, [N].
    Denominator: `total_sequences`; tokens are summed.
    Defaults: no penalty in the loss.
    """
    return reinforce(batch, kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef)
