"""Memory that can be given back and taken again at the same addresses, which CUDA graphs and TMA descriptors hold.

On a GPU a range of addresses is reserved once, and physical memory is mapped behind it while it is in use (CUDA's
virtual memory management). On a CPU the system takes back an anonymous mapping's pages, and gives zeros for them later.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from contextlib import suppress
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from rlloop.errors import ConfigError

ALIGNMENT = 256  # bytes; of each tensor's first number, as torch's own allocator aligns them


class CacheMemory(Protocol):
    """Memory for tensors of zeros, taken one after the other."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def release(self) -> None:
        """Give the memory back. Nothing may read or write the tensors until `restore`."""
        ...

    def restore(self) -> None:
        """Take memory again, at the same addresses, filled with zeros. Raises `ConfigError` where there is none."""
        ...


def cache_memory(size: int, device: torch.device) -> CacheMemory:
    """`size` bytes. Raises `ConfigError` where they do not fit."""
    return DevicePages(size, device) if device.type == "cuda" else HostPages(size)


def room_for(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that `zeros` of these arguments takes."""
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class HostPages:
    """Fresh anonymous pages are zero and cost nothing until they are written, so a large cache starts at once."""

    def __init__(self, size: int) -> None:
        self._taken, self._pages = 0, None
        if size == 0:
            return
        try:
            self._pages = _fresh_pages(size)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{size:,} bytes, which does not fit in memory: {error}; lower max_cache_tokens (or page_size, which "
                "it has at least)"
            ) from error

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if prod(shape) == 0:
            return torch.zeros(shape, dtype=dtype)
        begin, self._taken = self._taken, self._taken + room_for(shape, dtype)
        return torch.frombuffer(self._pages, dtype=dtype, count=prod(shape), offset=begin).view(shape)

    def release(self) -> None:
        # Linux alone promises zeros after it. Elsewhere the memory stays, with numbers that are as good: finite ones.
        if self._pages is not None and sys.platform == "linux":
            self._pages.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Pages come when they are touched."""


def _fresh_pages(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


# ------------------------------------------------------------------------------------------------------ CUDA's driver

PINNED, ON_DEVICE, READ_AND_WRITE, OUT_OF_MEMORY = 1, 1, 3, 2  # values of the driver's enumerations


class _Location(Structure):
    _fields_ = (("kind", c_int), ("id", c_int))


class _Flags(Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _Properties(Structure):  # CUmemAllocationProp
    _fields_ = (
        ("kind", c_int), ("handles", c_int), ("location", _Location), ("metadata", c_void_p), ("flags", _Flags)
    )  # fmt: skip


class _Access(Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", c_int))


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
}


class Driver:
    """The driver's functions for virtual memory, by name. A failure raises `RuntimeError`."""

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        for name, kinds in SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = kinds, c_int

    def call(self, name: str, *arguments: Any, allowed: int = 0) -> int:
        """The function's status: 0, or `allowed`."""
        status = getattr(self._library, name)(*arguments)
        if status not in (0, allowed):
            raise RuntimeError(f"{name} failed with CUDA's error {status}")
        return status


class DevicePages:
    """One range of addresses of a GPU, with physical memory behind it but from `release` to `restore`."""

    def __init__(self, size: int, device: torch.device, driver: Driver | None = None) -> None:
        self._device, self._driver, self._taken = device, driver or Driver(), 0
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context this thread's
            self._location = _Location(ON_DEVICE, torch.cuda.current_device())
            self._properties = _Properties(PINNED, 0, self._location)
            grain, address = c_size_t(), c_uint64()
            self._driver.call("cuMemGetAllocationGranularity", byref(grain), byref(self._properties), 0)
            self.size = -(-max(size, 1) // grain.value) * grain.value
            self._driver.call("cuMemAddressReserve", byref(address), self.size, 0, 0, 0)
        self.address, self._handle = address.value, c_uint64()
        self._mapped = [False]  # shared with the finalizer
        # Tensors name this object as their owner, so it goes after the last of them.
        end = weakref.finalize(self, _give_up, self._driver, device, self.address, self.size, self._mapped)
        end.atexit = False  # the process's end frees everything
        self.restore()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if prod(shape) == 0:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        begin, self._taken = self._taken, self._taken + room_for(shape, dtype)
        owner = _Range(self, self.address + begin, prod(shape) * dtype.itemsize)
        return torch.as_tensor(owner, device=self._device).view(dtype).view(shape)

    def release(self) -> None:
        if self._mapped[0]:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()  # what reads or writes it must have ended
                self._driver.call("cuMemUnmap", self.address, self.size)
                self._mapped[0] = False

    def restore(self) -> None:
        if self._mapped[0]:
            return
        while _LEFT:
            _give_up(*_LEFT.pop())
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            if self._create():
                torch.cuda.empty_cache()  # torch keeps memory that the trainer has freed
                if self._create():
                    free, whole = torch.cuda.mem_get_info()
                    raise ConfigError(
                        f"{self.size / 2**30:.1f} GiB, which does not fit in memory: {free / 2**30:.1f} of the GPU's "
                        f"{whole / 2**30:.1f} GiB are free; lower max_cache_tokens"
                    )
            access = _Access(self._location, READ_AND_WRITE)
            self._driver.call("cuMemMap", self.address, self.size, 0, self._handle, 0)
            self._driver.call("cuMemRelease", self._handle)  # the mapping holds it from now on
            self._mapped[0] = True
            self._driver.call("cuMemSetAccess", self.address, self.size, byref(access), 1)
            # Unwritten slots may be read with weight 0, so they must be finite.
            torch.as_tensor(_Range(self, self.address, self.size), device=self._device).zero_()

    def _create(self) -> int:
        """0, or the status of a GPU that has no more memory."""
        create = byref(self._handle), self.size, byref(self._properties), 0
        return self._driver.call("cuMemCreate", *create, allowed=OUT_OF_MEMORY)


class _Range:
    """Bytes of a `DevicePages`, for `torch.as_tensor`, which takes no copy and keeps this object."""

    def __init__(self, memory: DevicePages, address: int, size: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3
        }  # fmt: skip


_LEFT: list[tuple[Driver, torch.device, int, int, list[bool]]] = []  # ranges to give up later


def _give_up(driver: Driver, device: torch.device, address: int, size: int, mapped: list[bool]) -> None:
    if torch.cuda.is_current_stream_capturing():  # the collector of garbage came while a CUDA graph is recorded
        _LEFT.append((driver, device, address, size, mapped))
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        if mapped[0]:
            driver.call("cuMemUnmap", address, size)
        driver.call("cuMemAddressFree", address, size)
