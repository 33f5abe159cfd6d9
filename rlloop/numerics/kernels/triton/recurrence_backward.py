"""Gradients of the scan over whole sequences, by batched products over chunks, of all heads at once.

Notation and formulas are those of `scan`, with longer chunks: a backward's sums need no order but their own. Two
passes over the chunks in turn make the states that they begin with, and those states' gradients; everything else is
made for all chunks together.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
NUMBERS = 1 << 26  # of one of some twenty tensors of chunks, at a time


class _Chunks(NamedTuple):
    """Chunks of whole sequences: the first of each sequence, longest first, then the second of each, and so on."""

    tokens: Tensor  # [N, C] int64; the number of tokens where there is none
    counts: list[int]  # chunks of each turn: those go on from as many first ones of the turn before


def _chunks(query_start: Tensor, tokens: int) -> _Chunks:
    starts = query_start.tolist()
    sequences = sorted(pairwise(starts), key=lambda each: each[0] - each[1])
    begins, ends, counts = [], [], []
    for turn in range(-(-(sequences[0][1] - sequences[0][0]) // CHUNK)):
        going = [(begin + turn * CHUNK, end) for begin, end in sequences if begin + turn * CHUNK < end]
        begins += [begin for begin, _ in going]
        ends += [end for _, end in going]
        counts.append(len(going))
    at = torch.tensor(begins, device=query_start.device)[:, None] + torch.arange(CHUNK, device=query_start.device)
    return _Chunks(torch.where(at < torch.tensor(ends, device=at.device)[:, None], at, tokens), counts)


def scan_backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, query_start: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = tuple(torch.zeros_like(x) for x in (q, k, v, decay, beta))
    tokens, groups, heads = len(q), q.shape[1], v.shape[1]
    if tokens == 0:
        return gradients
    chunks, share = _chunks(query_start, tokens), heads // groups
    step = max(1, NUMBERS // (chunks.tokens.numel() * share * max(q.shape[2], v.shape[2], CHUNK)))
    for first in range(0, groups, step):
        of_keys = slice(first, first + step)
        of_values = slice(first * share, (first + step) * share)
        of_q, of_k = (_taken(x[:, of_keys], chunks) for x in (q, k))
        of_v, of_beta, of_grad = (_taken(x[:, of_values], chunks) for x in (v, beta, grad))
        fades = _taken(decay[:, of_values], chunks, 1.0)
        group_gradients = _gradients(of_q, of_k, share, of_v, fades, of_beta, of_grad, corrects, chunks.counts)
        for whole, gradient, at in zip(gradients, group_gradients, (of_keys, of_keys, *[of_values] * 3), strict=True):
            whole[:, at] = _put(gradient, chunks, tokens)
    return gradients


def _taken(x: Tensor, chunks: _Chunks, nothing: float = 0.0) -> Tensor:
    """x [T, H, ...] -> [N, H, C, ...], and `nothing` where there is no token: it neither decays nor writes."""
    padded = torch.cat((x, x.new_full((1, *x.shape[1:]), nothing)))
    return padded[chunks.tokens].transpose(1, 2).contiguous()


def _put(x: Tensor, chunks: _Chunks, tokens: int) -> Tensor:
    """`_taken` turned round: each token once."""
    rows = x.transpose(1, 2).flatten(0, 1)
    out = rows.new_empty(tokens + 1, *rows.shape[1:])
    out[chunks.tokens.flatten()] = rows
    return out[:tokens]


def _gradients(
    q: Tensor, k: Tensor, share: int, v: Tensor, decay: Tensor, beta: Tensor, grad: Tensor, corrects: bool,
    counts: list[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """q, k [N, G, C, K], v and grad [N, H, C, V], decay and beta [N, H, C] -> of q, k, v, decay, beta."""
    groups = q.shape[1]
    q, k = (x.repeat_interleave(share, 1) for x in (q, k))
    size, at = q.shape[2], torch.arange(q.shape[2], device=q.device)
    below, upto = at[:, None] > at, at[:, None] >= at
    fades = torch.where(below, decay[..., None], 1.0).cumprod(-2) * upto  # [t, j]: decays after j up to t
    since, to_end = decay.cumprod(-1), fades[..., -1, :]
    last = since[..., -1]
    alike, weights = k @ k.mT, q @ k.mT
    if corrects:
        unit = torch.eye(size, dtype=k.dtype, device=k.device)
        lower = alike * fades * beta[..., None] * below + unit
        inverse = torch.linalg.solve_triangular(lower, unit.expand_as(lower), upper=False, unitriangular=True)
        own, kept = inverse @ (beta[..., None] * v), inverse @ ((beta * since)[..., None] * k)
    else:
        own, kept, inverse = beta[..., None] * v, None, None
    ends = to_end[..., None] * k
    states = _states(own, kept, ends, last, counts)
    written = own if kept is None else own - kept @ states
    faded = weights * fades
    # Backwards: of what each chunk writes and of the state that it ends with.
    reads = since[..., None] * grad
    of_written = faded.mT @ grad
    of_ends = _state_gradients(of_written, kept, ends, last, q.mT @ reads, counts)
    of_written = of_written + ends @ of_ends
    of_weights = (grad @ written.mT) * upto
    by_q = reads @ states.mT + (of_weights * fades) @ k
    ends_read = written @ of_ends.mT
    by_k = (of_weights * fades).mT @ q + to_end[..., None] * ends_read
    of_fades = of_weights * weights
    of_fades[..., -1, :] += (k * ends_read).sum(-1)
    of_since = (grad * (q @ states)).sum(-1)
    of_since[..., -1] += (of_ends * states).sum((-1, -2))
    if inverse is None:
        by_beta, by_v = (of_written * v).sum(-1), beta[..., None] * of_written
    else:
        read = k @ states
        solved = inverse.mT @ of_written
        of_lower = -(solved @ written.mT) * below
        by_beta = (solved * (v - since[..., None] * read)).sum(-1) + (of_lower * alike * fades).sum(-1)
        by_v = beta[..., None] * solved
        of_since = of_since - (by_v * read).sum(-1)
        by_k = by_k - (since[..., None] * by_v) @ states.mT
        of_alike = of_lower * fades * beta[..., None]
        by_k = by_k + of_alike @ k + of_alike.mT @ k
        of_fades = of_fades + of_lower * alike * beta[..., None]
    # A decay m stands in each product of those after j < m up to t >= m, and in each of those up to t >= m.
    before = torch.cat((torch.zeros_like(fades[..., :1, :]), fades[..., :-1, :]), -2)  # without m itself
    since_before = torch.cat((torch.ones_like(since[..., :1]), since[..., :-1]), -1)
    of_pairs = (of_fades * below) @ before.mT + of_since[..., None] * since_before[..., None, :]
    by_decay = (of_pairs * fades).sum(-2)
    by_q, by_k = (x.unflatten(1, (groups, share)).sum(2) for x in (by_q, by_k))
    return by_q, by_k, by_v, by_decay, by_beta


def _states(own: Tensor, kept: Tensor | None, ends: Tensor, last: Tensor, counts: list[int]) -> Tensor:
    """The states [N, H, K, V] that chunks begin with."""
    states = own.new_zeros(*ends.shape[:2], ends.shape[3], own.shape[3])
    before = 0
    for count, following in pairwise(counts):
        here, there = slice(before, before + following), slice(before + count, before + count + following)
        before += count
        state = states[here]
        written = own[here] if kept is None else own[here] - kept[here] @ state
        states[there] = last[here, :, None, None] * state + ends[here].mT @ written
    return states


def _state_gradients(
    of_written: Tensor, kept: Tensor | None, ends: Tensor, last: Tensor, of_reads: Tensor, counts: list[int]
) -> Tensor:
    """Gradients of the states that chunks end with. `of_reads`: of those that they begin with, as far as they are read;
    what the next chunk has of them is added to it."""
    of_states, of_ends = of_reads, torch.zeros_like(of_reads)
    end = sum(counts)
    for turn in range(len(counts) - 1, -1, -1):
        following = counts[turn + 1] if turn + 1 < len(counts) else 0
        begin = end - counts[turn]
        here, there = slice(begin, begin + following), slice(end, end + following)
        of_ends[here] = of_states[there]
        every = slice(begin, end)
        of_states[every] += last[every, :, None, None] * of_ends[every]
        if kept is not None:
            of_states[every] -= kept[every].mT @ (of_written[every] + ends[every] @ of_ends[every])
        end = begin
    return of_ends
