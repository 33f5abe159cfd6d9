"""Recurrent states shared by requests with a common prefix; blocks of the cache hold keys and values only.

A prompt is computed up to its last whole block, the state there is saved under that block's name, and a later request
with the same leading blocks starts from it. While a request is computing a state, others that could start from it wait.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class SavedStates:
    """LRU (least recently used) cache of recurrent states by prefix block, in the state rows from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        """`first`: the number of rows that requests run in."""
        self._row_of: OrderedDict[bytes, int] = OrderedDict()  # by block, the longest unused first
        self._free = list(range(first, first + count))[::-1]
        self._coming: dict[int, bytes] = {}  # by the row of a request that will reach the end of that block
        self.stops = np.zeros(first, dtype=np.int64)  # [R] tokens after which a row's state is to be saved; 0: never

    def longest(self, names: list[bytes]) -> int | None:
        """Largest number of these leading blocks with a saved state after them, or 0. None: a longer one is being
        computed."""
        coming = set(self._coming.values())
        for count in range(len(names), 0, -1):
            if names[count - 1] in coming:
                return None
            if names[count - 1] in self._row_of:
                return count
        return 0

    def row(self, name: bytes) -> int:
        """Row of the saved state after this block."""
        self._row_of.move_to_end(name)
        return self._row_of[name]

    def expect(self, row: int, stop: int, name: bytes) -> None:
        """Save this row's state after `stop` tokens, the end of the block, unless it is saved already."""
        if name not in self._row_of:
            self._coming[row], self.stops[row] = name, stop

    def save(self, row: int) -> int:
        """Allocate the row that receives this row's state after the current step."""
        name = self._coming[row]
        self.leave(row)
        to = self._free.pop() if self._free else self._row_of.popitem(last=False)[1]
        self._row_of[name] = to
        return to

    def leave(self, row: int) -> None:
        """Cancel a pending save: the row's request has ended or was preempted."""
        self._coming.pop(row, None)
        self.stops[row] = 0

    def forget(self) -> None:
        """Drop all names: the policy has changed."""
        self._free.extend(self._row_of.values())
        self._row_of.clear()
