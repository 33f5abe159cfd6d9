"""Building blocks of losses: the clipped surrogate, the denominators, and `finish`, which adds penalties and counts.

A token that the mask leaves out has already gone (`LossBatch.unmasked`), so nothing here can count it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlloop.algorithms.batch import LossBatch, LossOutput
from rlloop.algorithms.kl import KLKind, kl_estimate
from rlloop.errors import ConfigError
from rlloop.metrics import Mean, Reduction


@dataclass(frozen=True)
class PolicyTerm:
    """The part of a loss that follows the advantages, token by token, and which tokens its clipping silenced."""

    loss: Tensor  # [N], to be minimised
    clipped: dict[str, Tensor]  # metric name -> [N] bool; empty for losses that do not clip
    silent: Tensor | None = None  # [N] bool: no gradient, by clipping; None: none


@dataclass(frozen=True)
class Share:
    """A micro-batch's share of the step's mean over tokens: sum(values * scale) / total."""

    scale: Tensor | float  # [N] or one number: a token's weight in the mean
    local: int  # this micro-batch's contribution to `total`
    total: int  # of the whole optimizer step

    def sum(self, values: Tensor) -> Tensor:
        return (values * self.scale).sum()


def token_mean(batch: LossBatch) -> Share:
    """1 / total_tokens * sum over tokens: every token of the step weighs the same; long sequences weigh more."""
    return Share(1.0, len(batch.logprobs), batch.total_tokens)


def sequence_mean(batch: LossBatch) -> Share:
    """1 / total_sequences * sum over sequences of the mean over their tokens: every sequence weighs the same."""
    lengths = batch.sequence_lengths
    return Share(1.0 / lengths[batch.sequence].double(), batch.sequences, batch.total_sequences)


def sequence_sum(batch: LossBatch, length: int = 1) -> Share:
    """1 / (total_sequences * length) * sum over tokens: `length` is a constant, not any sequence's own length."""
    return Share(1.0, batch.sequences * length, batch.total_sequences * length)


def clipped_surrogate(
    batch: LossBatch, log_ratio: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyTerm:
    """−min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) with r = exp(log_ratio), [N]; equation 7 of PPO (1707.06347).

    With `dual_clip` = c, −max(that minimum, c A) where A < 0 (1912.09729): a token far likelier than before and yet bad
    cannot dominate the step.

    The same booleans choose the branch and are counted, so a clip fraction is the fraction without a gradient. At A = 0
    nothing is clipped: there is nothing to take away.
    """
    ratio, advantages = log_ratio.exp(), batch.advantages
    high = (advantages > 0) & (ratio > 1 + clip_high)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    bounded = torch.where(high, 1 + clip_high, torch.where(low, 1 - clip_low, ratio))
    clipped = {"loss/clip_high": high, "loss/clip_low": low}
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
        bounded = torch.where(dual, dual_clip, bounded)
        clipped["loss/clip_dual"] = dual
    silent = torch.stack(list(clipped.values())).any(0)
    return PolicyTerm(-bounded * advantages, clipped, silent)


def finish(
    batch: LossBatch,
    policy: PolicyTerm,
    share: Share,
    *,
    kl_coef: float = 0.0,
    kl: KLKind = "k3",
    entropy_coef: float = 0.0,
    penalty: Tensor | None = None,
) -> LossOutput:
    """weights * policy + kl_coef * KL(policy ‖ reference) − entropy_coef * entropy (+ penalty), as the share says.

    `batch` is unmasked. A correction's weights touch the policy term only: penalties hold for every token that the mask
    keeps, also where the advantage is zero, the ratio clipped or the weight zero.

    Metrics: `loss/policy` is a mean over the loss's own denominator; `loss/entropy`, `loss/kl_ref`, the clip fractions
    and `loss/tokens_discarded` (no policy gradient, by clipping or by a zero weight) are over unmasked tokens.
    """
    weighted = policy.loss if batch.weights is None else policy.loss * batch.weights
    total = weighted if penalty is None else weighted + penalty
    of_tokens = {"loss/entropy": batch.entropy, **policy.clipped}

    silent = torch.zeros_like(batch.mask) if policy.silent is None else policy.silent
    of_tokens["loss/tokens_discarded"] = silent if batch.weights is None else silent | (batch.weights == 0)

    if batch.ref_logprobs is not None:
        divergence = kl_estimate(batch.logprobs, batch.ref_logprobs, kl)
        of_tokens["loss/kl_ref"] = divergence
        if kl_coef:
            total = total + kl_coef * divergence
    elif kl_coef:
        raise ConfigError(
            f"kl_coef is {kl_coef} but the batch has no reference logprobs; give it ref_logprobs, or set kl_coef to 0"
        )
    if entropy_coef:
        total = total - entropy_coef * batch.entropy

    metrics = token_means(batch, of_tokens)
    if share.local:
        metrics["loss/policy"] = Mean(share.sum(weighted.detach()), share.local)
    return LossOutput(share.sum(total) / share.total, metrics)


def token_means(batch: LossBatch, values: dict[str, Tensor]) -> dict[str, Reduction]:
    """Name -> mean over the unmasked tokens, with its sum and its count. Nothing where there is no token."""
    count = len(batch.logprobs)
    if not count:
        return {}
    return {name: Mean(value.detach().double().sum(), count) for name, value in values.items()}
