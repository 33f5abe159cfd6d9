"""Memory written by the other GPUs of the host: PyTorch's symmetric memory, without multicast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from rlloop.parallel.collectives import Ranks

SLOTS = 4  # a buffer is written again after so many gathers, of which two would do: all have met in between


@dataclass(frozen=True)
class Buffer:
    """A gather under way: this rank's columns go to `places`, and `whole` is complete once all have met."""

    whole: Tensor  # [T, columns of all ranks]
    places: Tensor  # [R] int64: where this rank's columns begin, in each rank's buffer


class PeerMemory:
    """Buffers for gathers of up to `numbers` 16-bit numbers each. Every rank of the group constructs it alike."""

    def __init__(self, ranks: Ranks, device: torch.device, numbers: int) -> None:
        assert ranks.group is not None
        self.ranks, self.numbers = ranks, numbers
        memory = symmetric.empty(SLOTS * numbers + 1024, dtype=torch.bfloat16, device=device)
        memory.zero_()
        self._handle: Any = symmetric.rendezvous(memory, ranks.group.group_name)
        self._memory, self._next = memory, 0
        at = list(self._handle.buffer_ptrs)
        self.flags = torch.tensor([address + SLOTS * numbers * 2 for address in at], device=device)
        self.round = torch.zeros(1, dtype=torch.int64, device=device)
        self._at = at
        self._places: dict[tuple[int, int], Tensor] = {}
        torch.cuda.synchronize(device)
        ranks.gather_objects(None)  # no rank writes before all have zeroed

    def rewind(self) -> None:
        """The next gather takes the first buffer again. All ranks have met since they read it."""
        self._next = 0

    def buffer(self, rows: int, columns: int, first: int) -> Buffer:
        """The next gather's: [rows, columns], of which this rank writes those from `first` on (a multiple of 8)."""
        assert rows * columns <= self.numbers
        assert first % 8 == 0
        slot, self._next = self._next, (self._next + 1) % SLOTS
        begin = slot * self.numbers
        if (slot, first) not in self._places:
            addresses = [address + 2 * (begin + first) for address in self._at]
            mine = self.ranks.rank  # the own buffer first, then the others in turn: no two ranks begin with one
            self._places[slot, first] = torch.tensor(addresses[mine:] + addresses[:mine], device=self.round.device)
        return Buffer(self._memory[begin : begin + rows * columns].view(rows, columns), self._places[slot, first])
