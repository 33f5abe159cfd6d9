"""Dr. GRPO: GRPO done right, without its two biases."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.terms import clipped_surrogate, finish, sequence_sum


def dr_grpo(
    batch: LossBatch,
    *,
    max_tokens: int = 1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl: KLKind = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """The clipped surrogate, summed over tokens and divided by constants only.

        L = −1/(S max_tokens) sum_i sum_t min(r_it A_it, clip(r_it, 1 − clip_low, 1 + clip_high) A_it)

    Liu et al. 2025 (2503.20783). GRPO's 1/|o_i| favours short right answers and long wrong ones, and its division by
    the group's std favours prompts that are nearly always right or wrong; both are gone. Its advantage is `group_mean`.
    Shapes: tokens are flat, [N].
    Denominator: `total_sequences * max_tokens`. The paper's equation is max_tokens = 1, the default; its code divides
    by the generation budget, and so does the `dr_grpo` preset (rollout.max_tokens), to keep the loss of ordinary size.
    Defaults: clip 0.2 is PPO's and the paper's; it uses no KL.
    """
    b = batch.unmasked()
    policy = clipped_surrogate(b, b.logprobs - b.old_logprobs, clip_low, clip_high)
    return finish(b, policy, sequence_sum(b, max_tokens), kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef)
