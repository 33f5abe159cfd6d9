"""Sparse attention on CUDA: the lightning indexer's choice, and attention over what it chose.

A query that reads selected positions is a sequence of its own in pages of one token, so it goes through the kernel of
`attention` and has its bits where every position is selected.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.attention import attention
from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, power_of_two
from rlloop.numerics.kernels.triton.segments import TILE
from rlloop.numerics.kernels.triton.wide_backward import selected_reads, wide_backward
from rlloop.numerics.layout import AttentionLayout

SCORES = 1 << 26  # at a time


@triton.jit(do_not_specialize=["sequences", "blocks", "block_size", "first", "room"])
def _scores(
    q, k, weights, query_start, context, block_start, out, sequences, blocks, block_size, first, room, scale,
    HEADS: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out [tokens, room]: what each position scores, −inf past the query's own."""
    token, tile = first + tl.program_id(0), tl.program_id(1) * TILE
    low, high = token * 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= token:
            low = middle
        else:
            high = middle
    position = tl.load(context + low) + token - tl.load(query_start + low)
    key = tile + tl.arange(0, TILE)
    at = out + tl.program_id(0).to(tl.int64) * room + key
    total = tl.full((TILE,), float("-inf"), tl.float32)
    if tile <= position:
        seen, head, d = key <= position, tl.arange(0, H), tl.arange(0, W)
        mine = block_start + low.to(tl.int64) * blocks
        slot = tl.load(mine + key // block_size, seen, 0) + key % block_size
        keys = tl.load(k + slot[:, None] * WIDTH + d[None, :], seen[:, None] & (d < WIDTH)[None, :], 0.0)
        rows = (token.to(tl.int64) * HEADS + head) * WIDTH
        queries = tl.load(q + rows[:, None] + d[None, :], (head < HEADS)[:, None] & (d < WIDTH)[None, :], 0.0)
        by_head = tl.dot(queries, keys.T, input_precision="ieee") * scale
        by_head = tl.where(by_head < 0, 0.0, by_head)  # NaN stays
        by_head *= tl.load(weights + token.to(tl.int64) * HEADS + head, head < HEADS, 0.0)[:, None]
        total = tl.sum(tl.where((head < HEADS)[:, None], by_head, 0.0), 0) + 0.0  # −0 becomes +0
        total = tl.where(seen & (total == total), total, float("-inf"))
    tl.store(at, total, key < room)


def select(q: Tensor, k: Tensor, weights: Tensor, layout: AttentionLayout, scale: float, count: int) -> Tensor:
    q, k, weights, (tokens, heads, width) = aligned(q), aligned(k), aligned(weights), q.shape
    blocks = layout.block_start.shape[1]
    room = blocks * layout.block_size
    selected = torch.full((tokens, count), -1, dtype=torch.int64, device=q.device)
    ordinal = torch.arange(room, device=q.device)
    step, most = max(1, SCORES // room), min(count, room)
    owner = torch.searchsorted(layout.query_start, torch.arange(tokens, device=q.device), right=True) - 1
    seen = layout.context[owner] + torch.arange(tokens, device=q.device) - layout.query_start[owner] + 1
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        scores = torch.empty(rows.stop - begin, room, device=q.device)
        _scores[(len(scores), cdiv(room, TILE))](
            q, k, weights, layout.query_start, layout.context, layout.block_start.contiguous(), scores,
            len(layout.context), blocks, layout.block_size, begin, room, scale, HEADS=heads,
            H=power_of_two(heads, 16), WIDTH=width, W=power_of_two(width, 16), TILE=TILE, num_warps=4, **EXACT,
        )  # fmt: skip
        best = scores.sort(dim=-1, descending=True, stable=True)[1][:, :most]  # among equals the lowest first
        # A query with few positions takes them all; what lies beyond is no position.
        best = torch.where(ordinal[:most] < seen[rows, None], best, room)
        best = best.sort(dim=-1)[0]
        selected[rows, :most] = torch.where(best < room, best, -1)
    return selected


def _as_sequences(selected: Tensor, query_start: Tensor, block_start: Tensor, block_size: int) -> tuple[Tensor, ...]:
    """Each token as a sequence with one query, in pages of one: (query_start, context, block_start)."""
    at = torch.arange(len(selected) + 1, device=selected.device)
    owner = torch.searchsorted(query_start, at[:-1], right=True) - 1
    known = selected.clamp(min=0)
    slots = block_start[owner[:, None], known // block_size] + known % block_size
    return at, (selected >= 0).sum(1) - 1, slots


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, query_start: Tensor, block_start: Tensor, block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, log-sum-exp of the scaled scores [T, H] float32)."""
    return attention(q, k, v, *_as_sequences(selected, query_start, block_start, block_size), 1, scale)


def sparse_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lengths, starts = query_start.diff().tolist(), query_start.tolist()
    masks = (selected_reads(selected[begin : begin + n]) for begin, n in zip(starts, lengths, strict=False))
    return wide_backward(q, aligned(k), aligned(v), lengths, masks, out, lse, grad, scale)
