"""Gradients of attention whose query heads share one head of keys, wider than `attention_backward`'s kernels hold or
with keys of each query's own: a sequence at a time, by cuBLAS.

Scores exist of `SCORES` pairs of a query and a key at a time: of some heads, or of some queries of one head. So how
much memory they take does not grow with the sequence. The module needs no Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

SCORES = 1 << 27
Reads = Callable[[slice], Tensor]  # of some queries: whether each reads each key, [r, m + n]


def causal_reads(queries: int, keys: int, window: int, device: torch.device) -> Reads:
    """The queries are the last of the keys' tokens; `window`: of how many keys each reads; 0: of all before it."""
    at = torch.arange(keys, device=device)

    def reads(rows: slice) -> Tensor:
        own = at[keys - queries :][rows, None]
        seen = at <= own
        return seen & (at > own - window) if window else seen

    return reads


def selected_reads(selected: Tensor) -> Reads:
    """selected [n, S]: the keys that each of the n queries reads, then −1."""

    def reads(rows: slice) -> Tensor:
        some, keys = selected[rows], len(selected)
        mask = torch.zeros(len(some), keys + 1, dtype=torch.bool, device=some.device)
        return mask.scatter_(1, torch.where(some < 0, keys, some), True)[:, :keys]

    return reads


def wide_backward(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], masks: Iterable[Reads], out: Tensor, lse: Tensor,
    grad: Tensor, scale: float, prefixes: Sequence[range] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`attention_backward` with one head of keys. `prefixes`: the m tokens that each sequence reads before its n."""
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    heads, begin = q.shape[1], 0
    for length, reads, prefix in zip(lengths, masks, prefixes or [range(0)] * len(lengths), strict=True):
        own, before = slice(begin, begin + length), slice(prefix.start, prefix.stop)
        begin, count = begin + length, len(prefix) + length
        if length == 0:
            continue
        keys, values = (torch.cat((x[before, 0], x[own, 0])) if len(prefix) else x[own, 0] for x in (k, v))
        # A sequence of its own adds in place.
        sums = [
            torch.zeros(count, total.shape[2], device=k.device) if len(prefix) else total[own, 0]
            for total in (grad_k, grad_v)
        ]
        rows, some = max(1, min(length, SCORES // count)), max(1, SCORES // (length * count))
        for at in range(0, length, rows):
            mask = reads(slice(at, at + rows))
            for head in range(0, heads, some):
                chunk = slice(own.start + at, min(own.start + at + rows, own.stop)), slice(head, head + some)
                parts = (x[chunk] for x in (q, grad, out, lse))
                grad_q[chunk] = _of_pairs(*parts, keys, values, mask, scale, sums)
        if len(prefix):
            for total, each in zip((grad_k, grad_v), sums, strict=True):
                total[before, 0] += each[: len(prefix)]
                total[own, 0] = each[len(prefix) :]
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _of_pairs(
    q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float,
    sums: list[Tensor],
) -> Tensor:  # fmt: skip
    """Adds some queries' terms to the sums of dk and dv, and returns their dq. Holds two arrays of float32."""
    queries, slopes, shape = q.flatten(0, 1), grad.flatten(0, 1), (*lse.shape, len(keys))
    masses = torch.mm(queries, keys.T).float().view(shape).mul_(scale)
    masses = masses.sub_(lse[..., None]).exp_().masked_fill_(~mask[:, None], 0.0)
    delta = (grad.float() * out.float()).sum(-1)
    by_score = torch.mm(slopes, values.T).float().view(shape).sub_(delta[..., None]).mul_(masses).mul_(scale)
    by_score = by_score.to(q.dtype).flatten(0, 1)
    masses = masses.to(q.dtype).flatten(0, 1)
    sums[0] += torch.mm(by_score.T, queries)
    sums[1] += torch.mm(masses.T, slopes)
    return torch.mm(by_score, keys).view_as(q)
