"""DRO: direct reward optimization, a quadratic instead of a clip."""

from typing import Literal

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.terms import PolicyTerm, finish, sequence_sum, token_mean


def dro(
    batch: LossBatch,
    *,
    beta: float = 0.05,
    level: Literal["sequence", "token"] = "sequence",
    kl_coef: float = 0.0,
    kl: KLKind = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """REINFORCE with a quadratic pull towards the policy that sampled.

        sequence: L = −1/S sum_i [ sum_t A_it logprobs_it − beta/2 (sum_t d_it)^2 ]
        token:    L = −1/T sum_it [ A_it logprobs_it − beta/2 d_it^2 ],                  d = logprobs − rollout_logprobs

    Richemond et al. 2024 (2405.19107): minimising (A − beta log(policy / sampler))^2 / 2 over sequences, divided by
    beta; Kimi k1.5 (2501.12599) has the same gradient with the group's mean reward as baseline. Made for off-policy
    data: nothing is clipped and no importance ratio appears. Its advantage is `group_mean`; rewards are not divided by
    a std, because beta is in units of reward.
    Shapes: tokens are flat, [N]; at level "sequence" a sequence must not be split over micro-batches.
    Denominator: `total_sequences` (sequence) or `total_tokens` (token).
    Defaults: level "sequence" is the papers'; "token" penalises each token alone, as hosted trainers do, and 0.05 is
    the beta in their published example. A correction's weights leave the quadratic alone.
    """
    b = batch.unmasked()
    drift = b.logprobs - b.rollout_logprobs
    if level == "sequence":
        share = sequence_sum(b)
        quadratic = b.sequence_sum(drift)[b.sequence] * drift  # adds up to the square of the sequence's sum
    else:
        share = token_mean(b)
        quadratic = drift * drift
    policy = PolicyTerm(-b.advantages * b.logprobs, {})
    return finish(b, policy, share, kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef, penalty=beta / 2 * quadratic)
