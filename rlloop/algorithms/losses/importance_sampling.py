"""The policy gradient, weighed by how likely the policy is to sample each token itself."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind
from rlloop.algorithms.terms import PolicyTerm, finish, token_mean


def importance_sampling(
    batch: LossBatch, *, kl_coef: float = 0.0, kl: KLKind = "k3", entropy_coef: float = 0.0
) -> LossOutput:
    """The unclipped surrogate, averaged over all tokens.

        L = −1/T sum_t r_t A_t,   r = exp(logprobs − rollout_logprobs)

    PPO's equation 6 (1707.06347) with the engine's own probabilities below the line, so it is right for stale and for
    mismatched engines, token by token; its variance has no bound. It is its own correction: a weighing one beside it
    would count the ratio twice, and is refused. `old_logprobs` is not read.
    Shapes: tokens are flat, [N].
    Denominator: `total_tokens`.
    Defaults: no penalty.
    """
    b = batch.unmasked()
    policy = PolicyTerm(-(b.logprobs - b.rollout_logprobs).exp() * b.advantages, {})
    return finish(b, policy, token_mean(b), kl_coef=kl_coef, kl=kl, entropy_coef=entropy_coef)
