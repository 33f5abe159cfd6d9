"""REINFORCE++: PPO's loss with one normalisation over the whole batch."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.terms import clipped_surrogate, finish, token_mean


def reinforce_pp(
    batch: LossBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl: KLKind = "k2",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """The clipped surrogate, averaged over all tokens; what is new is in the advantage.

        L = −1/T sum_t min(r_t A_t, clip(r_t, 1 − clip_low, 1 + clip_high) A_t)

    Hu et al. 2025 (2501.03262). Its advantage is `global_norm` (with `algorithm.reward_kl_coef`), or `batch_norm`
    for the variant with a group baseline (k2 in the loss, kl_coef > 0). Advantages are normalised there, once; this
    loss does not do it again.
    Shapes: tokens are flat, [N].
    Denominator: `total_tokens`.
    Defaults: clip 0.2 as in PPO; k2 because its gradient is that of KL(policy ‖ reference), off until kl_coef is set.
    """
    b = batch.unmasked()
    policy = clipped_surrogate(b, b.logprobs - b.old_logprobs, clip_low, clip_high)
    return finish(b, policy, token_mean(b), kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef)
