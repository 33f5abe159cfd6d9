"""Micro-batches over data-parallel ranks: rank r of R has those of index i with i % R = r, one in each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from rlloop.metrics import Reduction
from rlloop.models import Model, ScoreRow, score
from rlloop.numerics.operators import logits_gradients
from rlloop.parallel.collectives import Ranks
from rlloop.trainer.batching import MicroBatch, StepBatch
from rlloop.trainer.moe import MoeTraining
from rlloop.types import Recomputed

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Leaf:
    """The results of a forward over one micro-batch, by predicted token."""

    logprobs: Tensor  # [n] float32
    entropy: Tensor  # [n] float32
    raw_logprobs: Tensor | None = None  # [n] float32; None: nothing to compare with
    redrawn: Tensor | None = None  # [n] int64, likewise
    metrics: dict[str, Reduction] = field(default_factory=dict)  # of the loss

    def to(self, device: torch.device | str) -> Leaf:
        """Detached, on a device."""
        tensors = {name: value.detach().to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


def forward(
    model: Model,
    step: StepBatch,
    micro: MicroBatch,
    moe: MoeTraining,
    *,
    redraws: bool | None,
    of_entropy: bool = False,
) -> Leaf:
    """One forward of the policy over a micro-batch. `redraws` as for `Trainer`; None: nothing is compared.
    `of_entropy`: the entropies will be differentiated, too."""
    record = None if redraws is None else step.redraw_record(redraws)
    rows = step.rows[micro.sequences]
    share = step.shared is not None
    with logits_gradients(kept=not of_entropy):
        logprobs, entropy = score(model, rows, replay=moe.replay, watch=moe.watch, record=record, share=share)
    if record is None:
        return Leaf(logprobs, entropy)
    return Leaf(logprobs, entropy, record.raw_logprobs, record.token_ids)


def rounds(leaves: Sequence[MicroBatch], ranks: Ranks) -> Iterator[tuple[int, MicroBatch | None]]:
    """(number of leaves, this rank's) of each round; None where this rank has none, in the last one."""
    for first in range(0, len(leaves), ranks.size):
        count = min(ranks.size, len(leaves) - first)
        yield count, leaves[first + ranks.rank] if ranks.rank < count else None


def forwards(
    leaves: Sequence[MicroBatch], ranks: Ranks, work: Callable[[MicroBatch], T], idle: Callable[[], object]
) -> list[T]:
    """`work`'s results for this rank's leaves, without a graph. A rank without a leaf in a round runs `idle`, which
    takes part in the layers' collectives. Collective along `ranks`, dp."""
    results = []
    for _, micro in rounds(leaves, ranks):
        if micro is None:
            idle()
        else:
            results.append(work(micro))
    return results


def short(model: Model, step: StepBatch) -> Tensor:
    """The forward of a rank without a micro-batch where layers are sharded: it meets the others at each."""
    vision = model.config.vision
    placeholders = () if vision is None else vision.placeholders.values()
    token = next(each for each in step.rows[0].token_ids if each not in placeholders)  # others need an image
    return score(model, [ScoreRow([token, token], [1])])[0]


def all_leaves(leaves: list[Leaf], model: Model) -> list[Leaf]:
    """Every rank's leaves, in order of index, from this rank's; of a pipeline, the last stage's. Collective."""
    ranks, stage, device = model.context.ranks("dp"), model.stage, model.context.device
    if ranks.size == 1 and stage.whole:
        return leaves
    lists = ranks.gather_objects([leaf.to("cpu") for leaf in leaves] if stage.last else [])
    lists = stage.gather_objects(lists)[-1]
    return [lists[at % ranks.size][at // ranks.size].to(device) for at in range(sum(map(len, lists)))]


def joined(leaves: Iterable[Leaf], name: str) -> Tensor:
    """A field of all leaves, concatenated."""
    return torch.cat([getattr(leaf, name).detach() for leaf in leaves])


def recomputed(step: StepBatch, leaves: Sequence[Leaf]) -> Recomputed:
    """The leaves' results by sequence, on the host."""
    names = ("logprobs",) if leaves[0].raw_logprobs is None else ("logprobs", "raw_logprobs", "redrawn")
    results = (step.split(joined(leaves, name)) for name in names)
    return Recomputed(*results, entropies=step.split(joined(leaves, "entropy")))
