"""Copies between ranks with gradients, which are copies too: nothing is added on the way back.

Two kinds of tensors meet here. A rank's *own* rows are known to it alone, and so is their gradient. *Whole* tensors are
the same on each rank of a group, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlloop.parallel.collectives import Ranks


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        ctx.copied = (ranks, sends, receives)
        return ranks.exchange(x, sends, receives)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ranks, sends, receives = ctx.copied
        return ranks.exchange(grads[0], receives, sends), None, None, None


def exchanged(x: Tensor, ranks: Ranks, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
    """`Ranks.exchange` of own rows; their gradients go back to the ranks that they came from."""
    return x if ranks.size == 1 else _Exchanged.apply(x, ranks, sends, receives)


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.part = (ranks, dim, sizes)
        return x.narrow(dim, sum(sizes[: ranks.rank]), sizes[ranks.rank])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ranks, dim, sizes = ctx.part
        return ranks.gather(grads[0].contiguous(), dim, sizes), None, None, None


def own_part(x: Tensor, ranks: Ranks, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """A rank's part of a whole tensor; its gradient is gathered."""
    return x if ranks.size == 1 else _OwnPart.apply(x, ranks, dim, sizes)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.part = (ranks, dim, sizes)
        return ranks.gather(x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ranks, dim, sizes = ctx.part
        return grads[0].narrow(dim, sum(sizes[: ranks.rank]), sizes[ranks.rank]), None, None, None


def gathered(x: Tensor, ranks: Ranks, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """The whole tensor of all ranks' parts. Every rank differentiates it alike: a part's gradient is cut out of it."""
    return x if ranks.size == 1 else _Gathered.apply(x, ranks, dim, sizes)
