"""Memory written by the other GPUs of the host: PyTorch's symmetric memory, without multicast."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from rlloop.parallel.collectives import Ranks

SLOTS = 4  # a buffer is written again after so many gathers, of which two would do: all have met in between
LANES = 2  # groups of rows that meet apart
FLAGS = 64  # int64 of each lane


@dataclass(frozen=True)
class Buffer:
    """A gather under way: this rank's columns go to `places`, and `whole` is complete once all have met."""

    whole: Tensor  # [T, columns of all ranks]
    places: Tensor  # [R] int64: where this rank's columns begin, in each rank's buffer
    addresses: Sequence[int]  # the same numbers, on the host


class PeerMemory:
    """Buffers for gathers of up to `numbers` 16-bit numbers each. Every rank of the group constructs it alike."""

    def __init__(self, ranks: Ranks, device: torch.device, numbers: int) -> None:
        assert ranks.group is not None
        self.ranks, self.numbers = ranks, numbers
        assert ranks.size <= FLAGS
        memory = symmetric.empty(SLOTS * numbers + LANES * FLAGS * 4, dtype=torch.bfloat16, device=device)
        memory.zero_()
        self._handle: Any = symmetric.rendezvous(memory, ranks.group.group_name)
        self._memory, self._next = memory, 0
        at = list(self._handle.buffer_ptrs)
        first = [SLOTS * numbers * 2 + lane * FLAGS * 8 for lane in range(LANES)]
        self.flags = torch.tensor([[address + begin for address in at] for begin in first], device=device)
        self.rounds = torch.zeros(LANES, 1, dtype=torch.int64, device=device)
        self._at = at
        self._places: dict[tuple[int, int], tuple[Tensor, Sequence[int]]] = {}
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
            addresses = addresses[mine:] + addresses[:mine]
            self._places[slot, first] = torch.tensor(addresses, device=self.flags.device), addresses
        return Buffer(self._memory[begin : begin + rows * columns].view(rows, columns), *self._places[slot, first])


class _Copy(ctypes.Structure):
    """`CUDA_MEMCPY2D` of CUDA's driver."""

    _fields_ = (
        ("from_column", ctypes.c_size_t), ("from_row", ctypes.c_size_t), ("from_kind", ctypes.c_int),
        ("from_host", ctypes.c_void_p), ("from_device", ctypes.c_uint64), ("from_array", ctypes.c_void_p),
        ("from_pitch", ctypes.c_size_t),
        ("to_column", ctypes.c_size_t), ("to_row", ctypes.c_size_t), ("to_kind", ctypes.c_int),
        ("to_host", ctypes.c_void_p), ("to_device", ctypes.c_uint64), ("to_array", ctypes.c_void_p),
        ("to_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


_DEVICE = 2  # `CU_MEMORYTYPE_DEVICE`


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def copy_rows(x: Tensor, addresses: Sequence[int], stride: int) -> None:
    """x [T, N] to each of `addresses`, rows `stride` numbers apart there, by the copy engines: no multiprocessor works
    for it, so products that keep all of them busy go on beside it. Raises `RuntimeError`."""
    (rows, width), size = x.shape, x.element_size()
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    for address in addresses:
        copy = _Copy(
            from_kind=_DEVICE, from_device=x.data_ptr(), from_pitch=x.stride(0) * size, to_kind=_DEVICE,
            to_device=address, to_pitch=stride * size, width=width * size, height=rows,
        )  # fmt: skip
        if status := _driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), stream):
            raise RuntimeError(f"a copy to another GPU failed with CUDA error {status}")
