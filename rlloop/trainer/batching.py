"""Packs samples into micro-batches: whole sequences end to end under a token budget, without padding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rlloop.algorithms import LossBatch
from rlloop.algorithms.batch import Counts
from rlloop.errors import ConfigError
from rlloop.models import RedrawRecord, ScoreRow
from rlloop.models.scoring import check_predicted
from rlloop.models.shared_prompts import shared_tokens
from rlloop.numerics.transfer import on_device
from rlloop.types import ModelInput, Sample, SamplingParams, as_model_input


@dataclass(frozen=True)
class TrainSequence:
    """A sequence of tokens, P of which are predicted: scored and, where `mask` is true, trained.

    Example: `TrainSequence.supervised([4, 6, 8, 23], [5, 9, 2])` for a demonstration.
    """

    token_ids: list[int]  # the whole sequence: prompt, completion, further turns
    predict: Sequence[int]  # [P] ascending indices, 1 or more: each token is predicted from those before it
    advantages: np.ndarray  # [P] float32
    rollout_logprobs: np.ndarray | None = None  # [P] float32, as the engine sampled; None: not from an engine
    sampling: SamplingParams | None = None  # of the distribution to score under; None: temperature 1, nothing truncated
    routed_experts: np.ndarray | None = None  # [tokens, layers, top_k], as the engine recorded them
    selected: np.ndarray | None = None  # [tokens, layers], likewise
    mask: np.ndarray | None = None  # [P] bool; False: scored, compared and recorded, but not trained. None: all trained
    model_input: ModelInput | None = None  # of its first tokens, where they are more than text

    @classmethod
    def of_sample(cls, sample: Sample) -> TrainSequence:
        """A completion: the policy's tokens are predicted, each with the sample's advantage."""
        completion = sample.completion
        prompt, written = len(completion.prompt_ids), completion.written
        return cls(
            token_ids=completion.prompt_ids + completion.token_ids,
            predict=[prompt + index for index in written],
            advantages=np.full(len(written), sample.advantage, np.float32)
            if sample.token_advantages is None
            else sample.token_advantages,
            rollout_logprobs=completion.logprobs,
            sampling=completion.sampling,
            routed_experts=completion.routed_experts,
            selected=completion.selected,
            model_input=completion.model_input,
        )

    @classmethod
    def supervised(cls, prompt: ModelInput | Sequence[int], target_ids: Sequence[int]) -> TrainSequence:
        """A demonstration whose target tokens are to become likely; for the `sft` loss."""
        begin, count = as_model_input(prompt), len(target_ids)
        return cls(
            token_ids=[*begin.token_ids, *target_ids],
            predict=range(len(begin), len(begin) + count),
            advantages=np.ones(count, np.float32),
            model_input=None if begin.is_text else begin,
        )


@dataclass(frozen=True)
class MicroBatch:
    """Ranges of the step's sequences and flat predicted tokens that one forward and backward handles."""

    sequences: slice
    tokens: slice


@dataclass(frozen=True)
class StepBatch:
    """All sequences of one `forward_backward`: N predicted tokens in batch order, split into micro-batches.

    Denominators are the whole step's, so the split changes neither the loss nor its gradient.
    """

    rows: list[ScoreRow]
    micro_batches: list[MicroBatch]
    counts: list[int]  # predicted tokens of each sequence
    sequence: Tensor  # [N] int64
    advantages: Tensor  # [N] float32
    rollout_logprobs: Tensor | None  # [N] float32
    old_logprobs: Tensor | None  # [N] float32
    mask: Tensor  # [N] bool
    trained: list[int]  # tokens of each sequence that `mask` keeps
    total_tokens: int  # trained tokens: those that `mask` keeps
    total_sequences: int  # sequences with at least one trained token
    shared: list[int] | None = None  # tokens of each sequence that another of its micro-batch has; None: none shares

    def loss_batch(self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor, ref: Tensor | None) -> LossBatch:
        """A loss's view of one micro-batch of n tokens. logprobs, entropy, ref: [n].

        Without old logprobs this forward is the old policy (ratios are 1); without an engine's, as for demonstrations,
        it is the rollout policy as well.
        """
        old, rollout = self.old_logprobs, self.rollout_logprobs
        here, mask = logprobs.detach(), self.mask[micro.tokens]
        sequence = self.sequence[micro.tokens] - micro.sequences.start
        return LossBatch(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=here if old is None else old[micro.tokens],
            rollout_logprobs=here if rollout is None else rollout[micro.tokens],
            ref_logprobs=ref,
            advantages=self.advantages[micro.tokens],
            sequence=sequence,
            mask=mask,
            known=Counts(self.trained[micro.sequences], mask, sequence),
            total_tokens=self.total_tokens,
            total_sequences=self.total_sequences,
        )

    @property
    def whole(self) -> MicroBatch:
        """The step as one micro-batch."""
        return MicroBatch(slice(0, len(self.rows)), slice(0, sum(self.counts)))

    def redraw_record(self, redraws: bool) -> RedrawRecord | None:
        """An empty record for the step's forwards; None where no engine sampled the sequences: nothing to compare."""
        return None if self.rollout_logprobs is None else RedrawRecord(draws=redraws)

    def split(self, flat: Tensor) -> list[np.ndarray]:
        """[N] -> one [P] array a sequence."""
        values, ends = flat.detach().cpu().numpy(), np.cumsum(self.counts).tolist()
        return [values[begin:end] for begin, end in pairwise([0, *ends])]


def make_step_batch(
    batch: Sequence[Sample | TrainSequence],
    *,
    max_batch_tokens: int,
    multiple: int = 1,
    old_logprobs: Sequence[np.ndarray] | None = None,
    device: torch.device | str = "cpu",
    share: bool = False,
) -> StepBatch:
    """Flatten a batch. `share`: a micro-batch computes a prompt that sequences in a row have in common once.

    `multiple`: the number of micro-batches is a multiple of it, as far as there are sequences, and they are even.

    Raises `ConfigError` for a batch without trained tokens, a sequence above the budget, one whose `predict` names no
    tokens of it or has another length than what goes with them, or rollout logprobs that only some sequences have.
    """
    sequences = [item if isinstance(item, TrainSequence) else TrainSequence.of_sample(item) for item in batch]
    counts = [len(item.predict) for item in sequences]
    _check_lengths(sequences, counts, old_logprobs)
    masks = [
        np.ones(n, bool) if item.mask is None else np.asarray(item.mask, bool)
        for item, n in zip(sequences, counts, strict=True)
    ]
    kept = [int(mask.sum()) for mask in masks]
    if sum(kept) == 0:
        raise ConfigError(f"a batch of {len(sequences)} sequences has no token to train; skip the update instead")
    known = [item.rollout_logprobs for item in sequences if item.rollout_logprobs is not None]
    if known and len(known) < len(sequences):
        raise ConfigError(
            f"{len(known)} of {len(sequences)} sequences carry rollout logprobs; give all of them or none in one batch"
        )

    def flat(arrays: Sequence[np.ndarray] | None) -> Tensor | None:
        return on_device(np.concatenate(arrays).astype(np.float32, copy=False), device) if arrays else None

    advantages = flat([item.advantages for item in sequences])
    assert advantages is not None
    rows = [
        ScoreRow(item.token_ids, item.predict, item.sampling, item.routed_experts, item.selected, item.model_input)
        for item in sequences
    ]
    for index, row in enumerate(rows):
        check_predicted(index, row)
    shared = shared_tokens(rows) if share else [0] * len(rows)
    micro_batches = _split([len(row.token_ids) for row in rows], shared, counts, max_batch_tokens, multiple)
    for micro in micro_batches:
        shared[micro.sequences.start] = 0  # the first one computes its prompt
    return StepBatch(
        rows=rows,
        micro_batches=micro_batches,
        counts=counts,
        sequence=on_device(np.repeat(np.arange(len(counts)), counts), device),
        advantages=advantages,
        rollout_logprobs=flat(known),
        old_logprobs=flat(old_logprobs),
        mask=on_device(np.concatenate(masks), device),
        trained=kept,
        total_tokens=sum(kept),
        total_sequences=sum(count > 0 for count in kept),
        shared=shared if share else None,
    )


def _check_lengths(
    sequences: Sequence[TrainSequence], counts: Sequence[int], old_logprobs: Sequence[np.ndarray] | None
) -> None:
    """Laid end to end, what is too long for one sequence would be the next one's."""
    if old_logprobs is not None and len(old_logprobs) != len(sequences):
        raise ConfigError(f"old_logprobs has {len(old_logprobs)} entries for {len(sequences)} sequences; give one each")
    for index, (item, count) in enumerate(zip(sequences, counts, strict=True)):
        old = None if old_logprobs is None else old_logprobs[index]
        given = {"mask": item.mask, "rollout_logprobs": item.rollout_logprobs, "old_logprobs": old}
        for name, values in {"advantages": item.advantages, **given}.items():
            if values is not None and np.shape(values) != (count,):
                raise ConfigError(
                    f"sequence {index} predicts {count} tokens, so its {name} must be of shape [{count}], one each; "
                    f"given is {list(np.shape(values))}"
                )


def _split(lengths: list[int], shared: list[int], counts: list[int], budget: int, multiple: int) -> list[MicroBatch]:
    """Fill each micro-batch in batch order up to `budget` tokens to compute, then as many as make a `multiple` up to
    the least number of tokens that holds all. Only lengths and what is shared decide, never the number of ranks."""
    if max(lengths) > budget:
        raise ConfigError(
            f"trainer.max_batch_tokens is {budget}, and a sequence of {max(lengths)} tokens does not fit; "
            f"set it to at least {max(lengths)}, or make prompts or rollout.max_tokens shorter"
        )
    cuts = _cuts(lengths, shared, budget, 1)
    if multiple > 1:
        count, least = min(-(-(len(cuts) - 1) // multiple) * multiple, len(lengths)), max(lengths)
        tried = range(least, budget)
        at = bisect_left(tried, True, key=lambda most: len(_cuts(lengths, shared, most, count)) - 1 <= count)
        cuts = _cuts(lengths, shared, least + at, count)
    offset = np.concatenate([[0], np.cumsum(counts)]).tolist()
    return [MicroBatch(slice(a, b), slice(offset[a], offset[b])) for a, b in pairwise(cuts)]


def _cuts(lengths: list[int], shared: list[int], most: int, count: int) -> list[int]:
    """Boundaries [n + 1] of n micro-batches, as indices of sequences: at most `most` tokens each (or one sequence), and
    n at least `count`, or one a sequence."""
    cuts, filled = [0], 0
    for index, (length, known) in enumerate(zip(lengths, shared, strict=True)):
        scarce = index > cuts[-1] and len(lengths) - index <= count - len(cuts)  # a sequence for each that is missing
        if scarce or filled + length - known > most:
            cuts.append(index)
            filled, known = 0, 0
        filled += length - known
    return [*cuts, len(lengths)]
