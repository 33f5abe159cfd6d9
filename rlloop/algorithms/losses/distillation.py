"""On-policy distillation: the student's own samples, judged by a teacher token by token."""

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.terms import PolicyTerm, finish, token_mean
from rlloop.errors import ConfigError


def distillation(batch: LossBatch, *, kl_coef: float = 1.0, entropy_coef: float = 0.0) -> LossOutput:
    """The policy gradient of the reverse KL to the teacher, each token's own term.

        a = log π_teacher − log π (constant)
        L = −kl_coef 1/T sum_t r_t a_t,   r = exp(logprobs − old_logprobs)

    Agarwal et al. 2023 (2306.13649), the on-policy reverse KL; a token's future is left out, as in Thinking Machines'
    On-Policy Distillation (2025). The teacher is the reference, `model.reference_path`: any model with the same
    tokenizer. Advantages are not read.
    Shapes: tokens are flat, [N].
    Denominator: `total_tokens`.
    """
    b = batch.unmasked()
    if b.ref_logprobs is None or kl_coef <= 0:
        raise ConfigError(f"distillation needs its teacher: kl_coef is {kl_coef}, and must be above 0")
    advantages = (b.ref_logprobs - b.logprobs).detach()
    ratio = (b.logprobs - b.old_logprobs).exp()
    return finish(b, PolicyTerm(-kl_coef * ratio * advantages, {}), token_mean(b), entropy_coef=entropy_coef)
