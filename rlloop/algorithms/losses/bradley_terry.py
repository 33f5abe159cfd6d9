"""Bradley-Terry: a reward model from preferences."""

import torch.nn.functional as F

from rlloop.algorithms.batch import LossBatch, LossOutput, whole_step
from rlloop.algorithms.pairs import pair_metrics, pairs_of


@whole_step
def bradley_terry(batch: LossBatch, *, center_coef: float = 0.0) -> LossOutput:
    """Minus the log-probability that the chosen completion beats the rejected one.

        r = sum of the logprobs of a sequence's tokens: of the verdict alone, where the task predicts nothing else
        L = −log σ(r_chosen − r_rejected) + center_coef (r_chosen + r_rejected)²

    Bradley and Terry 1952; Ouyang et al. 2022 (2203.02155), equation 1; centring from Eisenstein et al. 2023
    (2312.09244). The reward is the logprob of a verdict token after the completion, so a reward model is a language
    model, and every engine serves it.
    Shapes: tokens are flat, [N]; sequences 2p and 2p + 1 are pair p, chosen (advantages above 0) and rejected (below).
    Denominator: pairs, `total_sequences` / 2. Needs the whole step at once (`whole_step`).
    """
    b = batch.unmasked()
    chosen, rejected = pairs_of(b, b.sequence_sum(b.logprobs))
    losses = -F.logsigmoid(chosen - rejected)
    total = losses if not center_coef else losses + center_coef * (chosen + rejected) ** 2
    return LossOutput(total.sum() / (b.total_sequences / 2), pair_metrics(losses, chosen, rejected))
