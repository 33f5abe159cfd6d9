"""Expert parallelism: a token's rows are sent to the ranks that hold its experts, and the outputs come back unsummed.

A token's owner combines the same outputs in the same order as one rank would, so its bits do not depend on the tokens
of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlloop.models.layers import Step
from rlloop.models.peer_gathers import peers_among
from rlloop.numerics.operators.mixture import Spread
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ALONE, ParallelContext
from rlloop.parallel.cut import share
from rlloop.parallel.differentiable import exchanged


class OwnExperts(Protocol):
    """The experts that this rank holds of `count`."""

    count: int

    def take_gradient(self, name: str, leaf: int, gradient: Tensor, parameter: Tensor) -> None: ...

    def named_parameters(self) -> Any: ...

    def computed(self, x: Tensor, chosen: Tensor, weights: Mapping[str, Tensor], step: Step) -> Tensor:
        """x [R, D], chosen [R, k] counted from the first own expert -> [R, k, D]."""
        ...


class Tokens(NamedTuple):
    """Tokens of several ranks, concatenated."""

    x: Tensor  # [T, D]
    chosen: Tensor  # [T, k]
    slots: Tensor | None = None  # [T] of their adapters, where rows have several


def same_tokens(context: ParallelContext) -> Ranks:
    """The ranks of an expert group that compute the same tokens: those of tensor parallelism."""
    ep, tp = context.ranks("ep"), context.tp
    return ALONE if ep.size == 1 else min(ep, tp, key=lambda ranks: ranks.size)


def written_experts(
    experts: OwnExperts, x: Tensor, chosen: Tensor, step: Step
) -> Iterator[tuple[slice, Tensor]] | None:
    """Outputs [t, k, D] of the experts chosen [T, k] for some of the tokens x [T, D] at a time, which all ranks have:
    each GPU writes its own experts' into the others' memory, where they are valid until the next. None where they
    cannot: then `exchange_experts` does it. Collective."""
    ep, tp = step.context.ranks("ep"), step.context.tp
    peers = peers_among(tp) if ep.size == tp.size and step.ops.fuses else None
    most = 0 if peers is None else peers.rows(x.dtype, x.shape[1]) // chosen.shape[1]
    if peers is None or not most or not len(x):
        return None
    begin, end = share(experts.count, ep.size, ep.rank)
    weights, slots = dict(experts.named_parameters()), step.ops.row_slots(x)
    each = -(-len(x) // -(-len(x) // most))  # parts of about one size

    def parts() -> Iterator[tuple[slice, Tensor]]:
        for at in (slice(first, first + each) for first in range(0, len(x), each)):
            of_part = step if slots is None else step.of_slots(slots[at])
            outputs = experts.computed(x[at], _own(chosen[at], begin, end), weights, of_part)
            yield at, peers.chosen(outputs, chosen[at], begin, end)

    return parts()


def _own(chosen: Tensor, begin: int, end: int) -> Tensor:
    """Choices counted from this rank's first expert; those of other ranks' experts are the number of its own."""
    return torch.where((chosen >= begin) & (chosen < end), chosen - begin, end - begin)


def exchange_experts(experts: OwnExperts, x: Tensor, chosen: Tensor, step: Step, every: Tokens | None = None) -> Tensor:
    """Outputs [T, k, D] of the experts chosen [T, k] for this rank's tokens x [T, D]; collective.

    `every`: the tokens of all ranks, where this rank has them. The slots of tokens' adapters travel with them: they
    mean the same on all ranks of the group.
    """
    ep, slots = step.context.ranks("ep"), step.ops.row_slots(x)
    if step.even:
        if every is None:
            every = Tokens(ep.gather(x), ep.gather(chosen), None if slots is None else ep.gather(slots))
        return _all_tokens(experts, chosen, step, ep, every)
    (tokens, top_k), device = chosen.shape, x.device
    order = chosen.flatten().argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    every_count = ep.gather(chosen.flatten().bincount(minlength=experts.count)[None])  # [R, E]
    counts = every_count.cpu()
    begin, end = share(experts.count, ep.size, ep.rank)
    sends = [int(counts[ep.rank, slice(*share(experts.count, ep.size, rank))].sum()) for rank in range(ep.size)]
    receives = counts[:, begin:end].sum(1).tolist()
    rows = exchanged(Spread.apply(x, order, inverse, top_k), ep, sends, receives)
    # Not on the host: all of PyTorch's threads, of every rank there, would wake for it.
    own = torch.arange(end - begin, device=device).repeat(ep.size)
    mine = own.repeat_interleave(every_count[:, begin:end].flatten(), output_size=sum(receives))
    if slots is not None:
        step = step.of_slots(ep.exchange(slots.repeat_interleave(top_k)[order], sends, receives))
    outputs = _by_leaf(experts, rows, mine[:, None], receives, step)
    return Spread.apply(exchanged(outputs, ep, receives, sends), inverse, order, 1).unflatten(0, (tokens, top_k))


def _by_leaf(experts: OwnExperts, rows: Tensor, chosen: Tensor, receives: list[int], step: Step) -> Tensor:
    """Outputs of the rows received from each rank. Weights get a separate gradient for each leaf (micro-batch)."""
    weights, count = dict(experts.named_parameters()), step.context.layout.expert_leaves
    if count == 1 or not torch.is_grad_enabled():
        return experts.computed(rows, chosen, weights, step)[:, 0]
    ranks = len(receives) // count
    ends = accumulate((sum(receives[at : at + ranks]) for at in range(0, len(receives), ranks)), initial=0)
    outputs = []
    for leaf, (begin, end) in enumerate(pairwise(ends)):

        def tap(name: str, weight: Tensor, leaf: int = leaf) -> Tensor:
            return _OfLeaf.apply(weight, experts, name, leaf) if weight.requires_grad else weight

        tapped, factors = {name: tap(name, weight) for name, weight in weights.items()}, {}
        for name, weight in weights.items():
            if adapted := step.ops.adapted(weight):
                down, up = (
                    tap(f"{name}.{factor}.weight", x)
                    for factor, x in (("lora_A", adapted[0].down), ("lora_B", adapted[0].up))
                )
                factors[id(tapped[name])] = replace(adapted[0], down=down, up=up)
        of_leaf, which = step, step.ops.adapters
        if which is not None and factors:
            of_leaf = replace(step, ops=step.ops.with_adapters(which.with_factors(factors)))
        outputs.append(experts.computed(rows[begin:end], chosen[begin:end], tapped, of_leaf)[:, 0])
    return torch.cat(outputs)


class _OfLeaf(torch.autograd.Function):
    """A weight whose gradient, of one leaf, is kept apart from the weight's own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, experts: OwnExperts, name: str, leaf: int) -> Tensor:
        parameter = weight if weight.is_leaf or weight._base is None else weight._base  # an adapter's, seen as slots
        ctx.place = (experts, name, leaf, parameter)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        experts, name, leaf, parameter = ctx.place
        experts.take_gradient(name, leaf, grads[0], parameter)
        return None, None, None, None


def _all_tokens(experts: OwnExperts, chosen: Tensor, step: Step, ep: Ranks, every: Tokens) -> Tensor:
    """As `exchange_experts`, where each rank has T tokens: all of them go everywhere, so sizes are known beforehand."""
    (tokens, top_k), (begin, end) = chosen.shape, share(experts.count, ep.size, ep.rank)
    x, wanted, slots = every
    step = step if slots is None else step.of_slots(slots)
    outputs = experts.computed(x, _own(wanted, begin, end), dict(experts.named_parameters()), step).flatten(1)
    back = ep.exchange(outputs, [tokens] * ep.size, [tokens] * ep.size).view(ep.size, tokens, top_k, -1)
    owner = ((chosen + 1) * ep.size - 1) // experts.count  # the inverse of `share`
    return back.gather(0, owner[None, :, :, None].expand(1, -1, -1, back.shape[-1]))[0]
