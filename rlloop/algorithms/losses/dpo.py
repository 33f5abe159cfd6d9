"""DPO: direct preference optimization, with its IPO and hinge variants."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rlloop.algorithms.batch import LossBatch, LossOutput, whole_step
from rlloop.algorithms.pairs import pair_metrics, pairs_of
from rlloop.errors import ConfigError

Variant = Literal["sigmoid", "ipo", "hinge"]


@whole_step
def dpo(
    batch: LossBatch, *, kl_coef: float = 0.1, variant: Variant = "sigmoid", label_smoothing: float = 0.0
) -> LossOutput:
    """Minus the log-likelihood of the preferences, under a reward that is the log-ratio to the reference.

        h = log π(chosen)/π_ref(chosen) − log π(rejected)/π_ref(rejected)
        sigmoid: L = −(1 − e) log σ(β h) − e log σ(−β h)        e = label_smoothing
        ipo:     L = (h − 1/(2 β))², with log-ratios that are means over a completion's tokens
        hinge:   L = max(0, 1 − β h)

    Rafailov et al. 2023 (2305.18290), equation 7; label smoothing from cDPO (Mitchell 2023). IPO: Azar et al. 2023
    (2310.12036), equation 17; hinge: SLiC (2305.10425). β is `kl_coef`.
    Shapes: tokens are flat, [N]; sequences 2p and 2p + 1 are pair p, chosen (advantages above 0) and rejected (below).
    Denominator: pairs, `total_sequences` / 2. Needs the whole step at once (`whole_step`).
    """
    b = batch.unmasked()
    if b.ref_logprobs is None or kl_coef <= 0:
        raise ConfigError(f"dpo compares with a reference: kl_coef is {kl_coef}, and must be above 0")
    log_ratios = b.logprobs - b.ref_logprobs
    ratios = b.sequence_mean(log_ratios) if variant == "ipo" else b.sequence_sum(log_ratios)
    chosen, rejected = pairs_of(b, ratios)
    losses = preference_losses(chosen - rejected, kl_coef, variant, label_smoothing)
    return LossOutput(
        losses.sum() / (b.total_sequences / 2), pair_metrics(losses, kl_coef * chosen, kl_coef * rejected)
    )


def preference_losses(margins: Tensor, beta: float, variant: Variant, label_smoothing: float = 0.0) -> Tensor:
    """[P] the loss of each pair; `margins` are its h, [P]."""
    if variant == "ipo":
        return (margins - 1 / (2 * beta)) ** 2
    if variant == "hinge":
        return torch.relu(1 - beta * margins)
    return -F.logsigmoid(beta * margins) * (1 - label_smoothing) - F.logsigmoid(-beta * margins) * label_smoothing
