"""Products summed as by a tensor-parallel engine that divides the terms over ranks, reproduced on one machine.

Rank r of R has the r-th of R equal segments of the terms. Two definitions:

- Each rank's float32 sum, added to the others' in one binary tree over neighbours, then the bias and one rounding. A
  rank that has several segments sums them by its own part of the tree, so R segments have the same bits on any number
  of ranks that divides R.
- Each rank's sum rounded to the compute type, which is what engines send (the bias is rank 0's), and then added in
  float32 in order of rank and rounded once, as one-shot all-reduces do.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlloop.numerics.operators.parameters import each_row
from rlloop.numerics.reference import widen


def sum_over_ranks(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, rounded: Callable[..., Tensor] | None,
    exact: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """x [T, K], weight [N, K], bias [N] -> [T, N]. `exact` makes a rank's float32 sums; `rounded`, where it is given,
    what the rank sends."""
    if weight.shape[1] % ranks:
        raise ValueError(
            f"tp_segments is {ranks}, and a product has {weight.shape[1]} terms; set one that divides them"
        )
    shares = zip(x.chunk(ranks, dim=-1), weight.chunk(ranks, dim=-1), strict=True)
    if rounded is not None:
        sums = [widen(rounded(rows, share, None if rank else bias)) for rank, (rows, share) in enumerate(shares)]
        return sum(sums[1:], start=sums[0]).to(x.dtype)
    sums = [exact(rows, share) for rows, share in shares]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return (sums[0] if bias is None else sums[0] + each_row(widen(bias), len(x))).to(x.dtype)
