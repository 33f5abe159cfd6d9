"""Sums whose order is a function of the number of terms alone: neither of ranks nor of when a term comes."""

from __future__ import annotations

from torch import Tensor


class TreeSum:
    """A sum of tensors in a binary tree over their index, held as a binary counter: log2(n) + 1 sums of n terms.

    Terms are pushed in order of index. Every push adds what it can: two sums of 2^i terms make one of 2^(i + 1).
    `total` adds what is left, the shortest sum first. Tensors that were pushed are the counter's: it adds in place.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Tensor | None] = []  # of 2^i terms at i

    def push(self, term: Tensor) -> None:
        self.count += 1
        for level, left in enumerate(self._sums):
            if left is None:
                self._sums[level] = term
                return
            term = left.add_(term)
            self._sums[level] = None
        self._sums.append(term)

    def total(self) -> Tensor | None:
        """The sum of all terms, which ends the counter; None without a term."""
        total = None
        for left in self._sums:
            if left is not None:
                total = left if total is None else left.add_(total)
        self._sums, self.count = [], 0
        return total
