"""Sums in an order that depends only on the number of terms, not on ranks or arrival times."""

from __future__ import annotations

import torch
from torch import Tensor

from rlloop.numerics.kernels import kernels_for


class TreeSum:
    """A float32 sum of n tensors in a binary tree over their index, stored as at most log2(n) + 1 partial sums.

    Terms are pushed in order of index. Every push merges like a binary counter: two sums of 2^i terms become one of
    2^(i + 1). `total` adds the remaining ones, the shortest sum first. Terms of narrower types are widened when added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Tensor | None] = []  # of 2^i terms at i

    def push(self, term: Tensor, *, borrowed: bool = False) -> None:
        """Add the next term. The counter adds in place and keeps the tensor, or a copy if it is `borrowed`."""
        self.count += 1
        for level, left in enumerate(self._sums):
            if left is None:
                self._sums[level] = term.clone() if borrowed and level == 0 else term
                return
            term = _added(left, term)
            self._sums[level] = None
        self._sums.append(term.clone() if borrowed and self.count == 1 else term)

    def total(self) -> Tensor | None:
        """The sum of all terms, which resets the counter; None without terms."""
        total = None
        for left in self._sums:
            if left is not None:
                total = _wide(left) if total is None else _added(left, total)
        self._sums, self.count = [], 0
        return total


def tree_sum(x: Tensor) -> Tensor:
    """[...] the sum over the last dimension: neighbours are added, then neighbouring sums, until one is left."""
    while (width := x.shape[-1]) > 1:
        if width % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0] if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _added(left: Tensor, right: Tensor) -> Tensor:
    """In the memory of `left`, if that is wide."""
    narrow = left.dtype == right.dtype and left.itemsize == 2
    wide_sum = getattr(kernels_for(left.device), "wide_sum", None) if narrow else None
    return _wide(left).add_(right) if wide_sum is None else wide_sum(left, right)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
