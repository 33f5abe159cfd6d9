"""PPO's clipped policy loss."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.terms import clipped_surrogate, finish, token_mean


def ppo(
    batch: LossBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl: KLKind = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """The clipped surrogate, averaged over all tokens.

        L = −1/T sum_t min(r_t A_t, clip(r_t, 1 − clip_low, 1 + clip_high) A_t)

    Schulman et al. 2017, equation 7 (1707.06347). The policy half: A comes from an estimator over rewards
    (`global_norm` in the preset `ppo`), or by token from a critic (`ppo_critic`, `rlloop.trainer.critic`).
    Shapes: tokens are flat, [N].
    Denominator: `total_tokens`.
    Defaults: clip 0.2 is the paper's best; its entropy bonus 0.01 was for Atari and is off. `dual_clip`: 1912.09729.
    """
    b = batch.unmasked()
    policy = clipped_surrogate(b, b.logprobs - b.old_logprobs, clip_low, clip_high, dual_clip)
    return finish(b, policy, token_mean(b), kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef)
