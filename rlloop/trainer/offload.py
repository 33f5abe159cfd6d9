"""Tensors in host memory, processed in blocks on the device (compare ZeRO-Offload, Ren et al., arXiv:2101.06840).

In ZeRO-Offload the host computes the update, in other arithmetic. Here the device does, with its usual kernels, so the
bits are those of tensors that never left it. Copies in both directions overlap with the computation.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from rlloop.parallel.progress import tick

BLOCKS = 3  # buffers on the device: one arriving, one in use, one returning
BLOCK_BYTES = 48 << 20  # of one; PCIe has its full rate from a few MiB on
ALIGNMENT = 64  # bytes: of a CPU's vectors, and of a GPU's loads


class HostMemory:
    """One allocation of the host, handed out in pieces; pinned for a GPU, so that copies run beside computation.

    It is registered in place, since PyTorch rounds its own pinned memory up to a power of 2.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self._taken = size, 0
        self._whole = torch.empty(size, dtype=torch.uint8)
        if device.type == "cuda" and size:
            runtime, address = torch.cuda.cudart(), self._whole.data_ptr()
            assert runtime is not None
            with torch.cuda.device(device):
                torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, 1)))  # 1: for all contexts
            weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False

    @staticmethod
    def bytes_of(like: Tensor) -> int:
        """Bytes that `zeros_like` takes."""
        return -(-like.nbytes // ALIGNMENT) * ALIGNMENT

    def zeros_like(self, like: Tensor) -> Tensor:
        """A new piece."""
        begin, self._taken = self._taken, self._taken + self.bytes_of(like)
        return self._whole[begin : begin + like.nbytes].view(like.dtype).view(like.shape).zero_()


class Streamed(NamedTuple):
    """Counts of what was streamed."""

    bytes: int = 0  # there and back
    seconds: float = 0.0


class BlockStream:
    """Copies blocks of host tensors to the device and back, in streams of their own on a GPU.

    `counts` are those of the last pass.
    """

    def __init__(self, device: torch.device, block_bytes: int = BLOCK_BYTES) -> None:
        self.device, self.block_bytes, self.counts = device, block_bytes, Streamed()
        self._gpu = device.type == "cuda"
        self._there, self._back = [torch.cuda.Stream(device) if self._gpu else None for _ in range(2)]

    def each(self, blocks: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield the device's copy of each block; its contents are copied back when the next is requested.

        A block's tensors are flat, on the host, and of `block_bytes` together at most. All are back at the end.
        """
        began, moved = time.perf_counter(), 0
        buffers = torch.empty((BLOCKS, self.block_bytes), dtype=torch.uint8, device=self.device)
        gone: list[torch.cuda.Event | None] = [None] * BLOCKS  # when a buffer's last block was copied back
        if self._there is not None:
            self._there.wait_stream(torch.cuda.current_stream(self.device))  # whose memory the buffers may have been
        coming: deque[tuple[int, Sequence[Tensor], list[Tensor], torch.cuda.Event | None]] = deque()

        def work() -> Iterator[list[Tensor]]:
            at, host, here, arrived = coming.popleft()
            if arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(arrived)
            yield here
            if self._back is not None:
                self._back.wait_stream(torch.cuda.current_stream(self.device))
            gone[at] = self._copy(here, host, self._back)
            tick()

        for index, host in enumerate(blocks):
            at, begin, here = index % BLOCKS, 0, []
            for tensor in host:
                here.append(buffers[at, begin : begin + tensor.nbytes].view(tensor.dtype))
                begin += tensor.nbytes
            assert begin <= self.block_bytes, (begin, self.block_bytes)
            if (event := gone[at]) is not None and self._there is not None:
                self._there.wait_event(event)
            coming.append((at, host, here, self._copy(host, here, self._there)))
            moved += 2 * begin
            if len(coming) == BLOCKS - 1:
                yield from work()
        while coming:
            yield from work()
        if self._back is not None:
            self._back.synchronize()
        self.counts = Streamed(moved, time.perf_counter() - began)

    def _copy(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], stream: torch.cuda.Stream | None
    ) -> torch.cuda.Event | None:
        beside: AbstractContextManager[object] = nullcontext() if stream is None else torch.cuda.stream(stream)
        with beside:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            if stream is None:
                return None
            (done := torch.cuda.Event()).record(stream)
            return done
