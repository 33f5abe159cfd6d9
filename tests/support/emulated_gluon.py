"""`small_batch_linear`'s kernel on CPU tensors: its source, run program after program, with stand-ins for Gluon.

Shared memory begins as NaN; a barrier knows the bytes it waits for; a tile outside a matrix is zeros, as TMA has it; a
product is one float32 chain over ascending K.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from rlloop.numerics.kernels.triton import small_batch_adapters, small_batch_linear


class Values(torch.Tensor):
    """Numbers in registers, or in shared memory."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)

    def index(self, at):
        return self[int(at)]

    def slice(self, begin, size, dim=0):
        return self.narrow(dim, begin, size)


def values(x: Any, dtype: torch.dtype | None = None) -> Values:
    return torch.as_tensor(x, dtype=dtype).as_subclass(Values)


class Pointer:
    def __init__(self, memory, at=0):
        self.memory, self.at = memory, values(at)
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset):
        return Pointer(self.memory, self.at + offset)


class Barrier:
    def __init__(self):
        self.phase, self.missing = 0, 0


class Barriers:
    def __init__(self, count):
        self.each = [Barrier() for _ in range(count)]

    def index(self, at):
        return self.each[int(at)]


def expect(barrier, size, wanted=True):
    if wanted:
        assert barrier.missing == 0, "a stage is fetched before the one in its place has arrived"
        barrier.missing = int(size)


def wait(barrier, parity):
    assert barrier.phase % 2 != int(parity), "waits for what nobody fetches"


def copy(described, at, barrier, tile, wanted=True):
    if not wanted:
        return
    (row, column), matrix = map(int, at), described.base
    height, width = described.block_shape
    assert tile.shape == (height, width)
    part = matrix[row : row + height, column : column + width]
    tile.zero_()
    tile[: part.shape[0], : part.shape[1]] = part
    barrier.missing -= tile.numel() * tile.element_size()
    assert barrier.missing >= 0, "more arrives than is expected"
    barrier.phase += barrier.missing == 0


def load(pointer, mask=True, other=0, **_):
    mask = torch.as_tensor(mask)
    at, mask = torch.broadcast_tensors(pointer.at, mask)
    found = pointer.memory.flatten()[torch.where(mask, at, 0)]
    return values(torch.where(mask, found, torch.as_tensor(other).to(found.dtype)))


def store(pointer, numbers, mask=True):
    at, mask, numbers = torch.broadcast_tensors(pointer.at, torch.as_tensor(mask), numbers)
    pointer.memory.view(-1)[at[mask]] = numbers[mask].to(pointer.memory.dtype)


def multiplied(a, b, sums, is_async=True):
    a, b, sums = (each.as_subclass(torch.Tensor) for each in (a.float(), b.float(), sums))
    for left, right in zip(a.unbind(1), b.unbind(0), strict=True):
        sums = sums + left[:, None] * right[None, :]
    return values(sums)


def shared(dtype, shape, layout, numbers=None):
    if dtype == torch.int64:
        return Barriers(shape[0])
    return values(torch.full(shape, torch.nan, dtype=dtype)) if numbers is None else numbers.clone()


def nothing(*_, **__):
    return None


def landed(count, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


GLUON = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("int16", "int32", "int64", "float32", "exp")},
    program_id=None,
    cdiv=lambda a, b: -(-a // b),
    where=lambda mask, a, b: values(torch.where(torch.as_tensor(mask), torch.as_tensor(a), torch.as_tensor(b))),
    maximum=lambda a, b: max(int(a), int(b)),
    max=lambda x, axis: x.amax(axis),
    zeros=lambda shape, dtype, layout: values(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, value, dtype, layout: values(torch.full(shape, value, dtype=dtype)),
    arange=lambda begin, end, layout: values(torch.arange(begin, end)),
    expand_dims=lambda x, axis: x.unsqueeze(axis),
    static_range=range,
    allocate_shared_memory=shared,
    load=load,
    store=store,
    **dict.fromkeys(("SliceLayout", "NVMMADistributedLayout", "BlockedLayout", "NVMMASharedLayout"), nothing),
)
STAND_INS = {
    "gl": GLUON,
    "mbarrier": SimpleNamespace(init=nothing, expect=expect, wait=wait, MBarrierLayout=nothing),
    "tma": SimpleNamespace(async_copy_global_to_shared=copy),
    "warpgroup_mma": multiplied,
    "warpgroup_mma_wait": landed,
    **dict.fromkeys(("barrier", "fence_async_shared", "gdc_wait", "gdc_launch_dependents"), nothing),
}


class Kernel:
    """In place of `small_batch_linear._few_rows`."""

    def __init__(self) -> None:
        names = {**vars(small_batch_adapters), **vars(small_batch_linear), **STAND_INS}
        names.update({name: each.value for name, each in names.items() if type(each).__name__ == "constexpr"})
        for name, each in list(names.items()):
            if hasattr(each, "fn") and hasattr(each.fn, "__code__"):
                names[name] = FunctionType(each.fn.__code__, names, name, each.fn.__defaults__)
        self._run = names["_few_rows"]

    def __getitem__(self, grid):
        def launch(*given, num_warps, launch_pdl, enable_fp_fusion, **constants):
            arguments = []
            for each in given:
                if hasattr(each, "block_shape"):
                    each.dtype = each.base.dtype
                    arguments.append(each)
                elif isinstance(each, torch.Tensor):
                    arguments.append(Pointer(each))
                else:
                    arguments.append(values(each))
            for program in range(int(grid[0])):
                GLUON.program_id = lambda axis, program=program: values(program)
                self._run(*arguments, **constants)

        return launch
