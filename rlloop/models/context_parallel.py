"""Context parallelism: a sequence's tokens divided over ranks, attention and recurrences divided by heads (Ulysses;
Jacobs et al. 2023, arXiv:2309.14509).

All other operations work on single tokens, and each rank computes them for its own range. For attention, an all-to-all
exchanges own tokens of all heads for all tokens of own heads, and another one returns the results. So a head reads its
keys in the same order as on one rank, and forwards have one rank's bits. Key-value heads are sent to every rank whose
queries read them; a latent, which all heads read, to all ranks. A recurrent layer's convolution and scan are exchanged
likewise, by channels of heads. No rank holds more than its tokens of all heads, or all tokens of its heads; but an
indexer's keys and selections are whole on every rank.

A weight's gradient is a sum over tokens, so each rank has a partial sum; the trainer adds these in order of rank. Of a
weight by heads a rank has the gradient of its own heads, and zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlloop.models.layers import Step
from rlloop.numerics.layout import AttentionLayout
from rlloop.parallel.cut import shares
from rlloop.parallel.division import Division, exchanged_parts, exchanged_rows, heads_over

Attend = Callable[[Tensor, Tensor, Tensor, AttentionLayout, Tensor | None], Tensor]


def spread_attention(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor | None, step: Step, selected: Tensor | None = None
) -> Tensor:
    """`attend` over all tokens, by heads: q [t, H, D], k and v [t, G, D] of this rank's tokens -> [t, H, D].

    Without v, `attend` derives the values from the keys. `selected` [t, S]: the keys that own tokens read.
    """
    divisions = heads_over(q.shape[1], k.shape[1], step.context.ranks("cp"))
    assert divisions is not None, "there are several ranks"
    queries, groups = divisions
    by_heads = [all_tokens(x, heads, step) for x, heads in ((q, queries), (k, groups))]
    values = by_heads[1] if v is None else all_tokens(v, groups, step)
    if selected is not None:
        selected = queries.ranks.gather(selected.int(), 0, own_rows(step)).long()  # half the bytes travel
    return own_tokens(attend(by_heads[0], by_heads[1], values, step.layout, selected), queries, step)


def own_heads(x: Tensor | None, heads: int, groups: int, step: Step) -> Tensor | None:
    """Select, from one number for each query head, those of this rank's heads."""
    divisions = heads_over(heads, groups, step.context.ranks("cp"))
    return x if x is None or divisions is None else divisions[0].take(x, 0)


def own_rows(step: Step) -> list[int]:
    """The number of tokens that each context-parallel rank has."""
    return shares(step.layout.tokens, step.context.ranks("cp").size)


def all_tokens(x: Tensor, heads: Division | None, step: Step) -> Tensor:
    """Exchange own tokens of all heads [t, N, ...] for all tokens of own heads [T, n, ...]; without a division, x."""
    return x if heads is None else _ByHeads.apply(x, own_rows(step), heads)


def own_tokens(x: Tensor, heads: Division | None, step: Step) -> Tensor:
    """The reverse of `all_tokens`, of heads without copies."""
    return x if heads is None else _ByTokens.apply(x, own_rows(step), heads)


class _ByHeads(torch.autograd.Function):
    """Own tokens of all heads [t, N, ...] -> all tokens of own heads [T, n, ...].

    The gradients of a head's copies are added in order of rank, in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Sequence[int], heads: Division) -> Tensor:
        ctx.rows, ctx.heads = rows, heads
        return exchanged_rows(x, rows, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, heads, grad = ctx.rows, ctx.heads, grads[0].contiguous()
        if not heads.repeats:
            return exchanged_parts(grad, rows, heads), None, None
        mine, rest = rows[heads.ranks.rank], grad.shape[2:]
        width = math.prod(rest)
        receives = [mine * size * width for size in heads.sizes]
        got = heads.ranks.exchange(grad.view(-1), [count * heads.size * width for count in rows], receives)
        total = grad.new_zeros(mine, heads.count, *rest, dtype=torch.promote_types(grad.dtype, torch.float32))
        for chunk, size, ranges in zip(got.split(receives), heads.sizes, heads.ranges, strict=True):
            columns = chunk.view(mine, size, *rest).split([end - begin for begin, end in ranges], 1)
            for (begin, end), column in zip(ranges, columns, strict=True):
                total[:, begin:end] += column
        return total.to(grad.dtype), None, None


class _ByTokens(torch.autograd.Function):
    """All tokens of own heads [T, n, ...] -> own tokens of all heads [t, N, ...]. No head may have copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Sequence[int], heads: Division) -> Tensor:
        ctx.rows, ctx.heads = rows, heads
        return exchanged_parts(x, rows, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return exchanged_rows(grads[0], ctx.rows, ctx.heads), None, None
