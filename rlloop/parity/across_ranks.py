"""Diagnosis over several ranks: those that compute differently or hold different weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from blake3 import blake3
from torch import Tensor

from rlloop.models import Model
from rlloop.models.stored_parameter import StoredParameter, entries_of
from rlloop.numerics.packed import PackedWeight
from rlloop.parity.monitor import Finding


def different_weights(
    trainer: Model, engine: Model, wholes: Iterable[tuple[str, Tensor]] | None = None
) -> dict[str, str]:
    """This rank's parameters with wrong values, and the reason for each. Collective.

    The trainer's must be those of the ranks that hold the same parts; the engine's, on each rank, the trainer's. In a
    pipeline a rank compares those of its own stage. `wholes`: the trainer's parameters, where it has them in pieces
    between its forwards.
    """
    context, theirs = trainer.context, _entries(engine)
    digests, stale = dict[str, str](), list[str]()
    for name, part, whole in (
        ((name, entry.live, entry.whole()) for name, entry in _entries(trainer).items())
        if wholes is None
        else ((name, whole, whole) for name, whole in wholes)
    ):
        digests[name] = _digest(part)
        entry = theirs.get(name)
        if entry is not None and not torch.equal(_bits(entry.live), _bits(entry.part(whole))):
            stale.append(name)
    coordinates = context.coordinates
    shard = (coordinates["tp"], coordinates["pp"], context.ranks("ep").rank)
    alike = [theirs for theirs, at in context.ranks("world").gather_objects((digests, shard)) if at == shard]
    reasons: dict[str, str] = {}
    for name, digest in digests.items():
        [(usual, _)] = Counter(each[name] for each in alike).most_common(1)
        if digest != usual:
            reasons[name] = "the trainer's is not that of other ranks"
    return {**dict.fromkeys(stale, "the engine's is not the trainer's"), **reasons}


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
    """Combine the findings of all ranks into one: the first operation that differs on any, and on which ranks it does.

    What one rank computes wrongly reaches the others in a later operation.
    """
    different = {rank: each for rank, each in enumerate(findings) if each.details.get("op") is not None}
    if not different:
        return findings[0]
    soonest = min(each.order for each in different.values())
    ranks = [rank for rank, each in different.items() if each.order == soonest]
    first = findings[ranks[0]]
    text = f"On {_named(ranks, len(findings))}: {first.text}"
    return replace(first, text=text, details={**first.details, "ranks": ranks})


def _named(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return f"each of {size} ranks"
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} alone" if len(ranks) == 1 else f"ranks {listed}"


def _entries(model: Model) -> dict[str, StoredParameter]:
    return entries_of(model) | ({} if model.adapter is None else model.adapter.entries())


def _bits(tensor: Tensor) -> Tensor:
    if isinstance(tensor, PackedWeight):
        stored = (tensor.codes, tensor.scales, tensor.tensor_scale)
        return torch.cat([_bits(each) for each in stored if each is not None])
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _digest(tensor: Tensor) -> str:
    return blake3(_bits(tensor).cpu().numpy().tobytes()).hexdigest()
