"""The part of a tensor that one rank holds: contiguous ranges along one dimension. Imports no torch.

Counts need not divide: rank r of R has the elements from r n // R up to (r + 1) n // R; shares differ by at most one.
"""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]  # first index, and the one after the last


def share(count: int, ranks: int, rank: int) -> Range:
    """The range of `count` elements that a rank has.

    Example: `[share(7, 3, rank) for rank in range(3)]` is `[(0, 2), (2, 4), (4, 7)]`.
    """
    return rank * count // ranks, (rank + 1) * count // ranks


def shares(count: int, ranks: int) -> list[int]:
    """The number of elements that each rank has. Example: `shares(7, 3)` is `[2, 2, 3]`."""
    return [end - begin for begin, end in (share(count, ranks, rank) for rank in range(ranks))]


@dataclass(frozen=True)
class Cut:
    """`ranges` of dimension `dim`, in order: what a rank holds of a tensor, end to end."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """The rank's extent in `dim`."""
        return sum(end - begin for begin, end in self.ranges)
