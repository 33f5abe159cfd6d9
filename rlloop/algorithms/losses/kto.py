"""KTO: Kahneman-Tversky optimization, from completions that are each good or bad, without pairs."""

import torch

from rlloop.algorithms.batch import LossBatch, LossOutput, whole_step
from rlloop.errors import ConfigError
from rlloop.metrics import Mean, Reduction


@whole_step
def kto(batch: LossBatch, *, kl_coef: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0) -> LossOutput:
    """One minus the value of each completion, relative to the divergence from the reference.

        r = log π(y)/π_ref(y),  z = max(0, mean r over the step)
        L = desirable (1 − σ(β (r − z))) for a good one, undesirable (1 − σ(β (z − r))) for a bad one

    Ethayarajh et al. 2024 (2402.01306), equation 8; β is `kl_coef`. The paper estimates z from mismatched pairs of
    prompt and completion; here it is the step's own, as the paper suggests where those cost too much (appendix B).
    Shapes: tokens are flat, [N]; a sequence is good where its advantages are above 0.
    Denominator: `total_sequences`. Needs the whole step at once (`whole_step`).
    """
    b = batch.unmasked()
    if b.ref_logprobs is None or kl_coef <= 0:
        raise ConfigError(f"kto compares with a reference: kl_coef is {kl_coef}, and must be above 0")
    ratios = b.sequence_sum(b.logprobs - b.ref_logprobs)
    good = b.sequence_mean(b.advantages) > 0
    z = ratios.detach().mean().clamp(min=0)
    values = torch.where(good, kl_coef * (ratios - z), kl_coef * (z - ratios)).sigmoid()
    losses = (1 - values) * torch.where(good, desirable, undesirable)
    metrics: dict[str, Reduction] = {
        "loss/policy": Mean(losses.sum().item(), len(losses)),
        "loss/kl_ref": Mean(z.item(), 1),
    }
    for name, which in (("good", good), ("bad", ~good)):
        if which.any():
            metrics[f"loss/reward_{name}"] = Mean((kl_coef * ratios[which]).sum().item(), int(which.sum()))
    return LossOutput(losses.sum() / b.total_sequences, metrics)
