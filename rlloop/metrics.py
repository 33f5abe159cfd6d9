"""Metrics that carry their reduction.

A metric travels as sums and counts until the step's last merge, over micro-batches, minibatches and ranks, so a mean of
means cannot happen. A metric that does not apply is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import add
from typing import Any, Protocol, Self


class Reduction(Protocol):
    """Merges with `+` (associative and commutative, rounding aside) and ends as `.value`."""

    def __add__(self, other: Any, /) -> Self: ...

    @property
    def value(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Mean:
    """`total / count`, both summed over parts. `count` is whatever the metric is a mean over: tokens, sequences, groups.

    Example: `Mean(3.0, 4) + Mean(1.0, 1)` is `Mean(4.0, 5)`, of value 0.8.
    """

    total: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total / self.count


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    largest: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        return self.largest


@dataclass(frozen=True, slots=True)
class Min:
    smallest: float

    def __add__(self, other: Min) -> Min:
        return Min(min(self.smallest, other.smallest))

    @property
    def value(self) -> float:
        return self.smallest


@dataclass(frozen=True, slots=True)
class EffectiveSampleSize:
    """Kish's effective sample size as a fraction of the sample: (sum r)^2 / (n sum r^2). 1 means equal weights."""

    total: float  # sum of r
    squares: float  # sum of r^2
    count: int  # n

    def __add__(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        return EffectiveSampleSize(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total * self.total / (self.count * self.squares)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between fixed edges, open at both ends: `counts[i]` of edges[i-1] <= x < edges[i]. Only equal edges merge."""

    edges: tuple[float, ...]  # ascending
    counts: tuple[int, ...]  # one more than edges

    def __add__(self, other: Histogram) -> Histogram:
        assert self.edges == other.edges
        return Histogram(self.edges, tuple(map(add, self.counts, other.counts)))

    @property
    def value(self) -> dict[str, list[float] | list[int]]:
        return {"edges": list(self.edges), "counts": list(self.counts)}


def merge(parts: Iterable[Mapping[str, Reduction]]) -> dict[str, Reduction]:
    """One dictionary out of many: what shares a name is added."""
    merged: dict[str, Reduction] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric
    return merged


def values(metrics: Mapping[str, Reduction]) -> dict[str, Any]:
    """What a record holds: name -> number (a histogram: its edges and counts)."""
    return {name: metric.value for name, metric in metrics.items()}
