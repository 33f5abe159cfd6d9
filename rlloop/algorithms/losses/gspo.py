"""GSPO: group sequence policy optimization."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.terms import clipped_surrogate, finish, sequence_mean


def gspo(
    batch: LossBatch,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float = 0.0,
    kl: KLKind = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """The clipped surrogate with one ratio a sequence: the geometric mean of its tokens' ratios.

        L = −1/S sum_i 1/|o_i| sum_t min(s_it A_it, clip(s_it, 1 − clip_low, 1 + clip_high) A_it)
        s_i = exp(1/|o_i| sum_t (logprobs_it − old_logprobs_it)),  s_it = sg[s_i] * exp(logprobs_it − sg[logprobs_it])

    Zheng et al. 2025 (2507.18071), in the form GSPO-token of its section 4.3 (sg stops the gradient): values are s_i,
    gradients those of GSPO where A is the same over a sequence, and well defined where it is not. Whole sequences are
    clipped, so the clip fractions jump by lengths. Its advantage is `group_norm`.
    Shapes: tokens are flat, [N]; a sequence must not be split over micro-batches.
    Denominator: `total_sequences`, after the mean over each sequence's unmasked tokens.
    Defaults: 3e-4 and 4e-4 are the paper's (section 5.1). They are small because s is a mean: PPO's 0.2 never clips it.
    """
    b = batch.unmasked()
    of_sequences = b.sequence_mean((b.logprobs - b.old_logprobs).detach())
    log_ratio = of_sequences[b.sequence] + (b.logprobs - b.logprobs.detach())
    policy = clipped_surrogate(b, log_ratio, clip_low, clip_high)
    return finish(b, policy, sequence_mean(b), kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef)
