"""DAPO: decoupled clip and dynamic sampling policy optimization."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.terms import clipped_surrogate, finish, token_mean


def dapo(
    batch: LossBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl: KLKind = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """The clipped surrogate with more room upwards than downwards, averaged over all tokens alike.

        L = −1/T sum_i sum_t min(r_it A_it, clip(r_it, 1 − clip_low, 1 + clip_high) A_it)

    Yu et al. 2025 (2503.14476). Its advantage is `group_norm`. The paper's other two parts are not in the loss:
    `rlloop.algorithms.overlong_penalty` (soft punishment of long answers, in the reward) and
    `rlloop.algorithms.groups_with_signal` (dynamic sampling, as a filter of groups).
    Shapes: tokens are flat, [N].
    Denominator: `total_tokens`. The paper divides by the tokens of the mini-batch; here that is the optimizer step.
    Defaults: 0.2 and 0.28 are the paper's. `dual_clip` = c also stops tokens with A < 0 and r > c (1912.09729, which
    uses 3); the paper has none, some frameworks switch it on by default.
    """
    b = batch.unmasked()
    policy = clipped_surrogate(b, b.logprobs - b.old_logprobs, clip_low, clip_high, dual_clip)
    return finish(b, policy, token_mean(b), kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef)
