"""The schedule of a pipeline stage: 1F1B, one forward, one backward (Narayanan et al. 2021, arXiv:2104.04473)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def one_forward_one_backward(forwards: Iterable[Callable[[], T]], ahead: int) -> Iterator[T]:
    """The results of `forwards`, each when it is time to differentiate it.

    `ahead`: the stages after this one. A stage runs as many forwards before its first backward as keep those at work;
    then a backward follows each forward. So at most `ahead` + 1 micro-batches' activations are kept, whatever their
    lengths and their number, and backwards come in the order of the micro-batches.
    """
    begun: deque[T] = deque()
    for forward in forwards:
        begun.append(forward())
        if len(begun) > ahead:
            yield begun.popleft()
    while begun:
        yield begun.popleft()
