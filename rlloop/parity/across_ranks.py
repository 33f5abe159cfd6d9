"""Diagnosis over several ranks: those that compute differently or hold different weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from blake3 import blake3
from torch import Tensor

from rlloop.models import Model
from rlloop.models.stored_parameter import entries_of
from rlloop.parity.monitor import Finding


def different_weights(trainer: Model, engine: Model) -> dict[str, str]:
    """This rank's parameters with wrong values, and the reason for each. Collective.

    The trainer's must be those of the ranks that hold the same parts; the engine's, on each rank, the trainer's.
    """
    context, own = trainer.context, entries_of(trainer)
    digests = {name: _digest(entry.live) for name, entry in own.items()}
    coordinates = context.coordinates
    shard = (coordinates["tp"], coordinates["pp"], context.ranks("ep").rank)
    alike = [theirs for theirs, at in context.ranks("world").gather_objects((digests, shard)) if at == shard]
    reasons: dict[str, str] = {}
    for name, digest in digests.items():
        [(usual, _)] = Counter(each[name] for each in alike).most_common(1)
        if digest != usual:
            reasons[name] = "the trainer's is not that of other ranks"
    if context.layout.pp > 1 or engine.context.layout.pp > 1:
        return reasons
    for name, entry in entries_of(engine).items():
        whole = own[name].whole()
        if not torch.equal(_bits(entry.live), _bits(entry.part(whole))):
            reasons.setdefault(name, "the engine's is not the trainer's")
    return reasons


def of_weights(weights: Sequence[dict[str, str]]) -> Finding:
    """The finding made of `different_weights` of all ranks, of which at least one is not empty."""
    by_rank = {rank: each for rank, each in enumerate(weights) if each}
    rank, first = next(iter(by_rank.items()))
    name, reason = next(iter(first.items()))
    return Finding(
        f"Weights differ on {_named(list(by_rank), len(weights))}. The first on rank {rank}: {name}, where {reason} "
        f"({len(first)} in all)",
        {"op": None, "where": name, "knob": None, "ranks": list(by_rank), "weights": by_rank},
    )


def of_ranks(findings: Sequence[Finding]) -> Finding:
    """Combine the findings of all ranks into one, which names the ranks on which an operation differs."""
    ranks = [rank for rank, each in enumerate(findings) if each.details["op"] is not None]
    if not ranks:
        return findings[0]
    first = findings[ranks[0]]
    text = f"On {_named(ranks, len(findings))}: {first.text}"
    return replace(first, text=text, details={**first.details, "ranks": ranks})


def _named(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return f"each of {size} ranks"
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} alone" if len(ranks) == 1 else f"ranks {listed}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _digest(tensor: Tensor) -> str:
    return blake3(_bits(tensor).cpu().numpy().tobytes()).hexdigest()
