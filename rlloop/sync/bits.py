"""Tensors as bit patterns, the form in which weights are sent, compared and hashed. Needs numpy only.

A weight is never compared or copied as a number: a float comparison calls −0 and +0 equal and every NaN different.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from blake3 import blake3

from rlloop.errors import SyncError

S = TypeVar("S")
T = TypeVar("T")

# safetensors dtype -> bytes of one element
WIDTH = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


@dataclass(frozen=True, eq=False)
class Bits:
    """A tensor: its safetensors dtype, and its elements as unsigned integers of the same width.

    Example: `Bits("BF16", np.array([[0x3F80, 0x8000]], np.uint16))` is [[1.0, -0.0]].
    """

    dtype: str
    array: np.ndarray  # C-contiguous, little-endian, of the tensor's shape

    def __post_init__(self) -> None:
        expected = UNSIGNED.get(WIDTH.get(self.dtype, 0))
        if expected is None:
            raise SyncError(f"dtype {self.dtype!r} is not supported; supported are {', '.join(WIDTH)}")
        assert self.array.dtype == expected, f"{self.dtype} is held in {self.array.dtype}, not in {expected}"
        if not self.array.flags.c_contiguous:
            object.__setattr__(self, "array", np.ascontiguousarray(self.array))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.array.size

    def same(self, other: Bits) -> bool:
        """True if dtype, shape and every bit are the same."""
        return self.dtype == other.dtype and np.array_equal(self.array, other.array)

    def copy(self) -> Bits:
        return Bits(self.dtype, self.array.copy())

    def digest(self) -> bytes:
        return digest(self.array)


Tensors = Mapping[str, Bits]  # by Hugging Face name


def digest(array: np.ndarray) -> bytes:
    """blake3 of the elements' bytes, 32 bytes."""
    flat = array.reshape(-1).view(np.uint8)
    return blake3(flat.data, max_threads=1).digest()


def digests(names: Collection[str], bits_of: Callable[[str], Bits], threads: int) -> dict[str, bytes]:
    """The digest of each name's tensor, of which no more than `threads` are asked for at a time."""
    return dict(zip(names, each(lambda name: bits_of(name).digest(), names, threads), strict=True))


def each(work: Callable[[S], T], items: Iterable[S], threads: int) -> list[T]:
    """`work` of each item, by no more than so many threads."""
    if threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor in bytes."""
    return WIDTH[dtype] * math.prod(shape)
