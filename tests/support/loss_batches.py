"""Loss batches for the tests, written sequence by sequence."""

from dataclasses import replace

import torch
from torch import Tensor

from rlloop.algorithms import LossBatch
from rlloop.algorithms.losses import LOSSES

Ragged = list[list[float]]
WHOLE_STEP = [name for name, loss in LOSSES.items() if getattr(loss, "whole_step", False)]
POLICY_LOSSES = [name for name in LOSSES if name not in ("sft", "distillation", *WHOLE_STEP)]
TENSORS = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy", "advantages", "sequence", "mask",
           "weights")  # fmt: skip


def make_batch(
    logprobs: Ragged,
    *,
    old: Ragged | None = None,
    rollout: Ragged | None = None,
    ref: Ragged | None = None,
    advantages: Ragged,
    entropy: Ragged | None = None,
    mask: list[list[bool]] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossBatch:
    """Sequences end to end. Old and rollout logprobs are the current ones where not given."""

    def flat(values: Ragged) -> Tensor:
        return torch.tensor([value for row in values for value in row], dtype=dtype)

    lengths = torch.tensor([len(row) for row in logprobs])
    sequence = torch.repeat_interleave(torch.arange(len(logprobs)), lengths)
    kept = torch.ones(len(sequence), dtype=torch.bool) if mask is None else flat(mask).bool()
    return LossBatch(
        logprobs=flat(logprobs).requires_grad_(),
        entropy=(flat(entropy) if entropy else torch.ones(len(sequence), dtype=dtype)).requires_grad_(),
        old_logprobs=flat(old or logprobs),
        rollout_logprobs=flat(rollout or logprobs),
        ref_logprobs=flat(ref) if ref else None,
        advantages=flat(advantages),
        sequence=sequence,
        mask=kept,
        total_tokens=int(kept.sum()),
        total_sequences=len(sequence[kept].unique()),
    )


def random_batch(
    seed: int = 0, lengths: tuple[int, ...] = (3, 1, 5, 2, 4), drift: float = 0.5, dtype: torch.dtype = torch.float64
) -> LossBatch:
    """Ratios well on both sides of every clip, one advantage a sequence, a third of the tokens masked."""
    random = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def normal(scale: float, size: int = count) -> Tensor:
        return scale * torch.randn(size, generator=random, dtype=torch.float64)

    rollout = -normal(1.0).abs() - 0.1
    mask = torch.rand(count, generator=random) > 1 / 3
    mask[:: max(lengths)] = True
    return LossBatch(
        logprobs=(rollout + normal(drift)).to(dtype).requires_grad_(),
        entropy=normal(1.0).abs().to(dtype).requires_grad_(),
        old_logprobs=(rollout + normal(drift)).to(dtype),
        rollout_logprobs=rollout.to(dtype),
        ref_logprobs=(rollout + normal(drift)).to(dtype),
        advantages=normal(1.0, len(lengths))[sequence].to(dtype),
        sequence=sequence,
        mask=mask,
        total_tokens=int(mask.sum()),
        total_sequences=len(sequence[mask].unique()),
    )


def gradient(batch: LossBatch, loss) -> Tensor:
    """[N] d loss / d logprobs."""
    return torch.autograd.grad(loss(batch).loss, batch.logprobs)[0]


def take(batch: LossBatch, index: Tensor) -> LossBatch:
    """The batch's tokens at `index`, sequences renumbered from 0, totals unchanged: one micro-batch of its step."""
    fields = {name: getattr(batch, name) for name in TENSORS if getattr(batch, name) is not None}
    part = {name: values.detach()[index] for name, values in fields.items()}
    part["sequence"] = part["sequence"].unique(return_inverse=True)[1]
    part["logprobs"].requires_grad_()
    part["entropy"].requires_grad_()
    return replace(batch, **part)
