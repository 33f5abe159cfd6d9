"""GRPO: group relative policy optimization."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.terms import clipped_surrogate, finish, sequence_mean


def grpo(
    batch: LossBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl: KLKind = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """The clipped surrogate, averaged over each sequence's tokens, then over sequences.

        L = −1/S sum_i 1/|o_i| sum_t [ min(r_it A_it, clip(r_it, 1 − clip_low, 1 + clip_high) A_it) − kl_coef k(t) ]
        r = exp(logprobs − old_logprobs)

    Shao et al. 2024, DeepSeekMath, equation 3 (2402.03300). Its advantage is `group_norm`.
    Shapes: tokens are flat, [N]; A may vary within a sequence.
    Denominator: `total_sequences`, after the mean over each sequence's unmasked tokens. A token of a short sequence
    weighs more than one of a long sequence.
    Defaults: clip 0.2 is PPO's. The paper penalises with k3 at kl_coef 0.04; later work (DAPO, Dr. GRPO) found the
    penalty needless with verifiable rewards, so it is off.
    """
    b = batch.unmasked()
    policy = clipped_surrogate(b, b.logprobs - b.old_logprobs, clip_low, clip_high)
    return finish(b, policy, sequence_mean(b), kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef)
