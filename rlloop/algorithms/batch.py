"""The input and the output of a loss: `LossBatch` and `LossOutput`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlloop.metrics import Reduction
from rlloop.numerics.transfer import on_device


@dataclass(frozen=True, eq=False)
class Counts:
    """Unmasked tokens of each sequence under this mask, known to the host: a GPU need not be waited for."""

    tokens: Sequence[int]
    mask: Tensor
    sequence: Tensor


@dataclass(frozen=True, kw_only=True)
class LossBatch:
    """One flat micro-batch of completion tokens, of whole sequences, with the size of the whole optimizer step.

    N tokens; prompt tokens are not in it. The two totals belong to the optimizer step, over all its micro-batches and
    ranks, so a loss divides by the same number however the step is packed; gradients of the micro-batches just add.

    `old_logprobs` anchor the ratio exp(logprobs − old_logprobs) of the clipped losses. The caller chooses:

    - at the **trainer**: logprobs that the trainer itself computed with the weights before the step's first update (for
      the first optimizer step of a batch that is `logprobs.detach()`, no extra forward). The ratio then measures the
      update alone, and starts at exactly 1. It does not see that engine and trainer may differ: what was sampled from
      another distribution is trained on as if it were the trainer's own, unless a correction weighs it.
    - at the **rollout**: the engine's logprobs. The ratio is then unbiased importance sampling even for stale or
      mismatched engines, but numerical mismatch uses up the clip range: tokens are clipped, and their signal thrown
      away, before the policy has moved at all.

    Where engine and trainer agree bit for bit and the weights are the same, the two are one.
    """

    logprobs: Tensor  # [N] of the policy being trained; carries the gradient
    entropy: Tensor  # [N] of the same distributions, in nats; may carry a gradient
    old_logprobs: Tensor  # [N]
    rollout_logprobs: Tensor  # [N] of the distribution each token was sampled from
    advantages: Tensor  # [N] one value a token
    sequence: Tensor  # [N] int64: which of the micro-batch's sequences the token belongs to
    mask: Tensor  # [N] bool: False takes no part in anything, whatever its values are
    total_tokens: int  # unmasked tokens of the whole optimizer step
    total_sequences: int  # sequences with at least one unmasked token, of the whole optimizer step
    ref_logprobs: Tensor | None = None  # [N] of a frozen reference policy
    weights: Tensor | None = None  # [N] constant factors of the policy term, from a correction; None: 1 everywhere
    known: Counts | None = None  # the trainer's; not of a mask that `replace` has changed since
    dense: bool = False  # set by `unmasked` alone: no masked token is left, and all is float64

    def unmasked(self) -> LossBatch:
        """Only the tokens that count, in float64.

        Masked tokens leave before any arithmetic, so that not even their infinities or NaNs reach a sum or a gradient.
        float64 costs nothing beside a model's forward, and takes the order of summation out of the float32 gradient.
        """

        if self.dense:
            return self

        everything = self.counts is not None and sum(self.counts) == len(self.mask)
        here = slice(None) if everything else self.mask
        mask, sequence = self.mask[here], self.sequence[here]

        def keep(values: Tensor) -> Tensor:
            return values[here].double()

        return replace(
            self,
            logprobs=keep(self.logprobs),
            entropy=keep(self.entropy),
            old_logprobs=keep(self.old_logprobs),
            rollout_logprobs=keep(self.rollout_logprobs),
            advantages=keep(self.advantages),
            sequence=sequence,
            mask=mask,
            ref_logprobs=None if self.ref_logprobs is None else keep(self.ref_logprobs),
            weights=None if self.weights is None else keep(self.weights),
            known=None if self.counts is None else Counts(self.counts, mask, sequence),
            dense=True,
        )

    @property
    def counts(self) -> Sequence[int] | None:
        """Unmasked tokens of each sequence, where the host knows them."""
        known = self.known
        return known.tokens if known and known.mask is self.mask and known.sequence is self.sequence else None

    @cached_property
    def sequence_lengths(self) -> Tensor:
        """[S] int64: unmasked tokens of each sequence of the micro-batch."""
        if self.counts is None:
            return torch.bincount(self.sequence[self.mask])
        return on_device(np.trim_zeros(np.asarray(self.counts, np.int64), "b"), self.mask.device)

    @property
    def sequences(self) -> int:
        """Sequences of the micro-batch with at least one unmasked token."""
        return int((self.sequence_lengths > 0).sum()) if self.counts is None else sum(map(bool, self.counts))

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[N] -> [S], each sequence's sum over its tokens. For an unmasked batch; differentiable.

        A sequence's bits depend on its own tokens in their order, not on its neighbours or on atomics.
        """
        if not len(values):  # segment_reduce refuses an empty tensor
            return values
        order = torch.argsort(self.sequence, stable=True)
        return torch.segment_reduce(values[order], "sum", lengths=self.sequence_lengths, initial=0)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[N] -> [S], each sequence's mean over its tokens (0 for one without any). For an unmasked batch."""
        return self.sequence_sum(values) / self.sequence_lengths.clamp(min=1)


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the step's loss: already divided by the step's totals, so that shares add up to it."""

    loss: Tensor  # scalar; call backward on it as it is
    metrics: dict[str, Reduction]


L = TypeVar("L", bound=Callable[..., "LossOutput"])


def whole_step(loss: L) -> L:
    """Marks a loss that compares sequences with each other, and so must see all of an optimizer step in one batch.

    Its step costs a second forward (`Trainer.forward_backward_custom`).
    """
    vars(loss)["whole_step"] = True
    return loss


def entropy_term(loss: L) -> L:
    """Marks a loss that differentiates entropies. Losses with `entropy_coef` above 0 are marked.

    On a GPU its forward then keeps no gradients of logits, which serve logprobs alone. Without the mark gradients have
    the same bits, and a step takes more memory and time.
    """
    vars(loss)["entropy_term"] = True
    return loss


def marks_of(loss: Callable[..., LossOutput]) -> dict[str, bool]:
    """The marks above of a loss, and of a function that it binds to arguments, as attributes for one that wraps it."""
    both = (loss, loss.func) if isinstance(loss, partial) else (loss,)
    return {name: True for name in ("whole_step", "entropy_term") if any(getattr(each, name, False) for each in both)}


class Loss(Protocol):
    """Any function of this form trains: the named ones here, `get_loss(...)`'s, or your own.

    Of your own, `algorithm.loss._target_=package.loss` names it, and its keyword arguments are keys beside `_target_`.
    `kl_coef` among them, above 0, makes the trainer fill `ref_logprobs`. A correction arrives as `batch.weights`, which
    `rlloop.algorithms.finish` applies.
    """

    def __call__(self, batch: LossBatch, /) -> LossOutput: ...
