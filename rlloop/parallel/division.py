"""Division of a dimension over the ranks of one axis, and differentiable copies between whole tensors and parts.

A tensor that is whole on every rank has its whole gradient on every rank, and a part has that part of the gradient. So
nothing is added across ranks in either direction: the backward of a gather takes the own part, and vice versa.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from rlloop.parallel.collectives import Ranks
from rlloop.parallel.cut import Cut, Range, share, shares

TILES = (64, 16, 1)


@dataclass(frozen=True, eq=False)
class Division:
    """The parts of `count` elements that the ranks of an axis hold: each rank's ranges, end to end.

    Several ranks, or one rank several times, may hold an element (a key-value head that queries on several ranks read).
    All of its copies are equal, and so are those of its gradient.
    """

    ranks: Ranks
    count: int
    ranges: tuple[tuple[Range, ...], ...]  # by rank

    @property
    def own(self) -> tuple[Range, ...]:
        return self.ranges[self.ranks.rank]

    @property
    def size(self) -> int:
        """The number of elements that this rank holds."""
        return self.sizes[self.ranks.rank]

    @cached_property
    def sizes(self) -> list[int]:
        """The number of elements that each rank holds."""
        return [sum(end - begin for begin, end in ranges) for ranges in self.ranges]

    @property
    def repeats(self) -> bool:
        """True if some element is held more than once."""
        return sum(self.sizes) > self.count

    def aligned(self, unit: int) -> bool:
        """True if each rank has one range, which begins at a multiple of `unit`, and nothing is held twice."""
        return self._alignment % unit == 0

    @cached_property
    def _alignment(self) -> int:
        if self.repeats or any(len(ranges) != 1 for ranges in self.ranges):
            return 1
        return math.gcd(0, *(begin for ((begin, _),) in self.ranges))

    def cut(self, dim: int) -> Cut:
        """This rank's part of a tensor that is divided in `dim`."""
        return Cut(dim, self.own)

    def times(self, width: int) -> Division:
        """The division of `count` groups of `width` elements each."""
        ranges = tuple(tuple((begin * width, end * width) for begin, end in each) for each in self.ranges)
        return Division(self.ranks, self.count * width, ranges)

    def groups(self, width: int) -> Division:
        """The reverse of `times`."""
        ranges = tuple(tuple((begin // width, end // width) for begin, end in each) for each in self.ranges)
        return Division(self.ranks, self.count // width, ranges)

    def gather(self, shard: Tensor, dim: int) -> Tensor:
        """The whole of a tensor of which each rank gives its part."""
        return self.ordered(self.ranks.gather(shard, dim, self.sizes), dim)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part; a view where it is one range."""
        pieces = [whole.narrow(dim, begin, end - begin) for begin, end in self.own]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def ordered(self, shards: Tensor, dim: int) -> Tensor:
        """All ranks' parts, end to end in order of rank, as the whole."""
        if self._places is None:
            return shards
        if shards.device not in self._on:  # the copy of a CUDA graph that is being recorded must be here already
            self._on[shards.device] = torch.tensor(self._places, device=shards.device)
        return shards.index_select(dim, self._on[shards.device])

    @cached_property
    def _on(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def _places(self) -> list[int] | None:
        """Index of each element's first copy among the concatenated parts; None if those are the whole in order."""
        held = [index for each in self.ranges for begin, end in each for index in range(begin, end)]
        if held == list(range(self.count)):
            return None
        first = {index: position for position, index in reversed(list(enumerate(held)))}
        return [first[index] for index in range(self.count)]


def evenly(count: int, ranks: Ranks, unit: int = 1) -> Division | None:
    """Consecutive parts that differ by one unit at most; None for one rank."""
    if ranks.size == 1:
        return None
    ranges = tuple((share(count // unit, ranks.size, rank),) for rank in range(ranks.size))
    return Division(ranks, count // unit, ranges).times(unit)


def in_tiles(count: int, ranks: Ranks) -> Division | None:
    """`evenly`, for a product's outputs: in multiples of a kernel's tile where that leaves ranks about as much each."""
    return evenly(count, ranks, next(u for u in TILES if u == 1 or (count % u == 0 and count >= 8 * u * ranks.size)))


def in_blocks(count: int, ranks: Ranks, block: int) -> Division | None:
    """`in_tiles`, but at multiples of `block` where that gives no rank more than an eighth above its even share."""
    blocks = -(-count // block)
    if ranks.size == 1 or blocks < ranks.size or 8 * block * max(shares(blocks, ranks.size)) * ranks.size > 9 * count:
        return in_tiles(count, ranks)
    parts = (share(blocks, ranks.size, rank) for rank in range(ranks.size))
    return Division(ranks, count, tuple(((begin * block, min(end * block, count)),) for begin, end in parts))


def heads_over(queries: int, groups: int, ranks: Ranks) -> tuple[Division, Division] | None:
    """Divisions of query heads and of the key-value heads (`groups`) that they read; None for one rank.

    Whole key-value heads with their queries where there are enough. Else queries are spread evenly, and a rank holds
    the key-value heads that its own read: each once where as many of its queries read each, so that its heads are
    grouped as the model's are; otherwise one copy for each query head.
    """
    if ranks.size == 1:
        return None
    each, of_queries, of_groups = queries // groups, [], []
    for rank in range(ranks.size):
        if groups >= ranks.size:
            begin, end = share(groups, ranks.size, rank)
            of_queries.append(((begin * each, end * each),))
            of_groups.append(((begin, end),))
            continue
        begin, end = share(queries, ranks.size, rank)
        read = [head // each for head in range(begin, end)]
        if len({read.count(group) for group in read}) == 1:
            of_groups.append(((read[0], read[-1] + 1),))
        else:
            of_groups.append(tuple((group, group + 1) for group in read))
        of_queries.append(((begin, end),))
    return Division(ranks, queries, tuple(of_queries)), Division(ranks, groups, tuple(of_groups))


def end_to_end(divisions: Sequence[Division]) -> Division:
    """The division of several dimensions that lie end to end in one, as those of a fused projection do."""
    starts = [0, *accumulate(each.count for each in divisions)]
    ranges = tuple(
        tuple((start + begin, start + end) for each, start in zip(divisions, starts, strict=False)
              for begin, end in each.ranges[rank])
        for rank in range(divisions[0].ranks.size)
    )  # fmt: skip
    return Division(divisions[0].ranks, starts[-1], ranges)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, division: Division, dim: int, unread: bool) -> Tensor:
        ctx.division, ctx.dim = division, dim
        if unread:
            dim %= shard.ndim
            return shard.new_empty(*shard.shape[:dim], division.count, *shard.shape[dim + 1 :])
        return division.gather(shard, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.division.take(grads[0], ctx.dim), None, None, None


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, division: Division, dim: int) -> Tensor:
        ctx.division, ctx.dim = division, dim
        return division.take(whole, dim).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.division.gather(grads[0], ctx.dim), None, None


def gathered(shard: Tensor, division: Division | None, dim: int = -1, unread: bool = False) -> Tensor:
    """The whole tensor, on every rank. Differentiable; without a division, the tensor itself. `unread`: only its
    gradient is wanted, so nothing is copied and its values are undefined."""
    if division is None:
        return shard
    return _Gathered.apply(shard, division, dim, unread) if torch.is_grad_enabled() else division.gather(shard, dim)


def taken(whole: Tensor, division: Division | None, dim: int = -1) -> Tensor:
    """This rank's part of a tensor that every rank has whole. Differentiable; without a division, the tensor itself."""
    if division is None:
        return whole
    return _Taken.apply(whole, division, dim) if torch.is_grad_enabled() else division.take(whole, dim)


def exchanged_parts(x: Tensor, rows: Sequence[int], division: Division) -> Tensor:
    """From own columns of all rows to all columns of own rows: [sum of rows, n, ...] -> [rows[rank], count, ...].

    `rows`: how many each rank gets, in order.
    """
    ranks = division.ranks
    mine, rest = rows[ranks.rank], math.prod(x.shape[2:])
    sends = [count * x.shape[1] * rest for count in rows]
    receives = [mine * size * rest for size in division.sizes]
    got = ranks.exchange(x.contiguous().view(-1), sends, receives).split(receives)
    columns = [piece.view(mine, size, *x.shape[2:]) for piece, size in zip(got, division.sizes, strict=True)]
    return division.ordered(torch.cat(columns, 1), 1)


def exchanged_rows(x: Tensor, rows: Sequence[int], division: Division) -> Tensor:
    """The reverse of `exchanged_parts`: [rows[rank], count, ...] -> [sum of rows, n, ...]."""
    ranks = division.ranks
    chunks = [torch.cat([x[:, begin:end] for begin, end in each], 1).reshape(-1) for each in division.ranges]
    size = division.size
    receives = [count * size * math.prod(x.shape[2:]) for count in rows]
    got = ranks.exchange(torch.cat(chunks), [len(chunk) for chunk in chunks], receives)
    return got.view(sum(rows), size, *x.shape[2:])


def spans(costs: Sequence[float], count: int) -> list[Range]:
    """`count` runs of consecutive items with about the same cost each; some may be empty.

    Example: `spans([1, 1, 2], 2)` is `[(0, 2), (2, 3)]`.
    """
    until = [0.0, *accumulate(costs)]
    wanted = [until[-1] * index / count for index in range(count)]
    starts = [min(range(len(until)), key=lambda at, cost=cost: abs(until[at] - cost)) for cost in wanted]
    return list(pairwise([*starts, len(costs)]))
