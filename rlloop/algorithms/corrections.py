"""Corrections of the mismatch between the engine that sampled and the trainer that learns.

For an unmasked token d = old_logprobs − rollout_logprobs and r = exp(d): the trainer's probability before the update
over the engine's, so `old_logprobs` must be anchored at the trainer. A correction turns r into a constant weight of
the token's policy term. Penalties are not weighed (`terms.finish`), nor is any denominator: a token of weight 0 still
counts in `total_tokens`, as if its advantage were 0, so a correction does not scale up the tokens that stay.

    weighing   tis      min(r, cap)                            truncated importance sampling
               clip     r bounded to [low, high]
               mis      r inside [low, high], else 0           masked importance sampling
               icepop   mis by token, on [0.5, 5]
    masking    mask     1 inside [low, high], else 0           rejection
               veto     0 for a whole sequence with one token outside [low, high]

`level` says what r is of: "token" its own; "sequence" the product over the sequence's tokens, the unbiased weight, of
variance that grows with length; "geometric" their geometric mean. Comparisons are made on d, so no ratio overflows.

In metric names, `is/` stands for importance sampling.

Several multiply, with at most one weighing among them: two would count the ratio twice. Where engine and trainer agree
bit for bit every weight is exactly 1, and every correction changes nothing.

Sources. tis: Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
mis, geometric masks and vetoes: Liu, Li et al. 2025, "When speed kills stability", and verl's rollout correction.
icepop: Ling team 2025, Ring-1T (2510.18855), M(k) = k on [alpha, beta].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rlloop.algorithms.batch import Loss, LossBatch, LossOutput
from rlloop.algorithms.terms import token_means
from rlloop.metrics import LOG_RATIO_EDGES, EffectiveSampleSize, Histogram, Max, Mean, Min, Reduction

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Weights:
    """A correction's factor of each token. `touched`: metric name -> the tokens that it changed, [N] bool."""

    weights: Tensor  # [N] float64, no gradient
    touched: dict[str, Tensor]

    def __mul__(self, other: Weights) -> Weights:
        touched = dict(self.touched)
        for name, tokens in other.touched.items():
            touched[name] = touched[name] | tokens if name in touched else tokens
        return Weights(self.weights * other.weights, touched)


Correction = Callable[[LossBatch], Weights]  # the batch is unmasked


def tis(batch: LossBatch, *, level: Level = "token", cap: float = 2.0) -> Weights:
    """min(r, cap). cap 2 as in Yao et al. and verl."""
    d = _log_ratio(batch, level)
    high = d > _log(cap)
    return Weights(d.clamp(max=_log(cap)).exp(), {"is/truncated_high": high})


def clip(batch: LossBatch, *, level: Level = "token", low: float = 0.5, high: float = 2.0) -> Weights:
    """r bounded on both sides, so tokens that the trainer finds unlikely keep a weight. [1/2, 2] mirrors tis's cap."""
    d = _log_ratio(batch, level)
    touched = {"is/truncated_high": d > _log(high), "is/truncated_low": d < _log(low)}
    return Weights(d.clamp(_log(low), _log(high)).exp(), touched)


def mis(batch: LossBatch, *, level: Level = "token", low: float = 0.0, high: float = 2.0) -> Weights:
    """r where low <= r <= high, else 0: what tis would cap is dropped. high 2 as for tis; no lower bound."""
    d = _log_ratio(batch, level)
    outside = _outside(d, low, high)
    return Weights(d.exp().masked_fill(outside, 0.0), {"is/masked": outside})


def icepop(batch: LossBatch, *, low: float = 0.5, high: float = 5.0) -> Weights:
    """mis by token with both bounds. [0.5, 5] are the values its authors and most frameworks use."""
    return mis(batch, level="token", low=low, high=high)


def mask(batch: LossBatch, *, level: Level = "geometric", low: float = 0.999, high: float = 1.001) -> Weights:
    """1 where low <= r <= high, else 0, without weighing what stays.

    The defaults are verl's for the geometric mean, which hardly moves; for "token" and "sequence" 0.5 and 2 are usual.
    """
    outside = _outside(_log_ratio(batch, level), low, high)
    return Weights((~outside).double(), {"is/masked": outside})


def veto(batch: LossBatch, *, low: float = 1e-4, high: float = math.inf) -> Weights:
    """0 for a whole sequence in which any token's r is below `low` or above `high`. 1e-4, and no upper, as in verl."""
    outside = _outside(_log_ratio(batch, "token"), low, high)
    vetoed = batch.sequence_sum(outside.double())[batch.sequence] > 0
    return Weights((~vetoed).double(), {"is/masked": vetoed})


CORRECTIONS = {"tis": tis, "clip": clip, "mis": mis, "icepop": icepop, "mask": mask, "veto": veto}
WEIGHING = ("tis", "clip", "mis", "icepop")


def corrected(loss: Loss, correction: Correction) -> Loss:
    """The loss with its policy term weighed, token by token, and `is/truncated_*`, `is/masked` among its metrics."""
    loss = possible(loss)

    def weighed(batch: LossBatch, /) -> LossOutput:
        kept = batch.unmasked()
        with torch.no_grad():
            result = correction(kept)
        output = loss(replace(kept, weights=result.weights))
        return LossOutput(output.loss, {**output.metrics, **token_means(kept, result.touched)})

    return weighed


def possible(loss: Loss) -> Loss:
    """The loss with weight 0 for tokens that the trainer finds impossible: logprob −inf, under truncated sampling.

    The engine did not share the truncation, or updates since have moved them out of it. They send no gradient, and
    their infinities, here taken out, would spoil that of others: 0 times infinity is no number.
    """

    def without(batch: LossBatch, /) -> LossOutput:
        kept = batch.unmasked()
        gone = torch.isneginf(kept.logprobs) | torch.isneginf(kept.old_logprobs)
        weights = torch.ones_like(kept.advantages) if kept.weights is None else kept.weights
        return loss(
            replace(
                kept,
                logprobs=torch.where(gone, kept.rollout_logprobs, kept.logprobs),
                old_logprobs=torch.where(gone, kept.rollout_logprobs, kept.old_logprobs),
                weights=weights.masked_fill(gone, 0.0),
            )
        )

    return without


def measured(loss: Loss) -> Loss:
    """The loss with the statistics of r among its metrics, corrected or not."""

    def with_ratio(batch: LossBatch, /) -> LossOutput:
        kept = batch.unmasked()
        output = loss(kept)
        return LossOutput(output.loss, {**output.metrics, **ratio_metrics(kept)})

    return with_ratio


@torch.no_grad()
def ratio_metrics(batch: LossBatch) -> dict[str, Reduction]:
    """`is/ratio_mean`, `_max`, `_min` of r over unmasked tokens, `is/ess`, and a histogram of ln r.

    ESS is the effective sample size by (sum r)^2 / (n sum r^2): 1 where all tokens weigh the same.
    """
    kept = batch.unmasked()
    d = kept.old_logprobs - kept.rollout_logprobs
    if not len(d):
        return {}
    r = d.exp()
    total, squares, largest, smallest = torch.stack([r.sum(), (r * r).sum(), r.max(), r.min()]).tolist()
    bins = torch.bucketize(d, torch.tensor(LOG_RATIO_EDGES, dtype=d.dtype, device=d.device), right=True)
    counts = torch.bincount(bins, minlength=len(LOG_RATIO_EDGES) + 1).tolist()
    return {
        "is/ratio_mean": Mean(total, len(d)),
        "is/ratio_max": Max(largest),
        "is/ratio_min": Min(smallest),
        "is/ess": EffectiveSampleSize(total, squares, len(d)),
        "is/log_ratio_histogram": Histogram(LOG_RATIO_EDGES, tuple(counts)),
    }


def _log_ratio(batch: LossBatch, level: Level) -> Tensor:
    """[N] ln r at a level, the same for every token of a sequence unless the level is token."""
    d = (batch.old_logprobs - batch.rollout_logprobs).detach()
    if level == "token":
        return d
    if level == "sequence":
        return batch.sequence_sum(d)[batch.sequence]
    return batch.sequence_mean(d)[batch.sequence]


def _outside(d: Tensor, low: float, high: float) -> Tensor:
    return ~((d >= _log(low)) & (d <= _log(high)))  # so that a NaN is outside


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf
