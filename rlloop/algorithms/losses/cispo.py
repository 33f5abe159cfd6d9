"""CISPO: the importance weight is clipped, the token is not."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.terms import PolicyTerm, finish, token_mean


def cispo(
    batch: LossBatch,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    kl_coef: float = 0.0,
    kl: KLKind = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """REINFORCE weighed by a clipped ratio that carries no gradient, averaged over all tokens.

        L = −1/T sum_t sg[clip(r_t, 1 − clip_low, 1 + clip_high)] A_t logprobs_t,   r = exp(logprobs − old_logprobs)

    MiniMax 2025, MiniMax-M1, equation 4 (2506.13585). Every token keeps a gradient, so rare tokens that PPO's clip
    would drop still learn: `loss/clip_high` and `loss/clip_low` count bounded weights whatever the sign of A, and none
    of them is discarded. Its advantage is `group_norm`.
    Shapes: tokens are flat, [N].
    Denominator: `total_tokens`.
    Defaults: clip_low 1 is no lower bound, as in the paper. The paper names no upper value; ScaleRL (2510.13786) saw
    little difference between caps of 4 and 8, and 1 + 4 = 5 lies between.
    """
    b = batch.unmasked()
    ratio = (b.logprobs - b.old_logprobs).detach().exp()
    high, low = ratio > 1 + clip_high, ratio < 1 - clip_low
    loss = -ratio.clamp(1 - clip_low, 1 + clip_high) * b.advantages * b.logprobs
    policy = PolicyTerm(loss, {"loss/clip_high": high, "loss/clip_low": low})
    return finish(b, policy, token_mean(b), kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef)
