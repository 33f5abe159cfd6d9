"""Attention of one query a sequence without a GPU: pages, barriers, and segments that are read again.

Bits are compared with those of the kernel for every GPU, in Triton's interpreter. `decode`'s kernel runs on CPU tensors
with stand-ins for Gluon: a copy makes shared memory NaN at once, and brings its numbers when its barrier is waited for.
"""

from __future__ import annotations

import math
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlloop.numerics.kernels.triton import attention, decode
from tests.support.emulated_gluon import GLUON, Barrier, Pointer, Values, multiplied, nothing, values
from tests.support.emulated_prompts import drawn, exact, same
from tests.support.emulated_warps import of_numpy

KERNEL = decode._decode


class Copies(Values):
    """[pages, parts of 64 columns, rows, 64] of shared memory."""

    def _reinterpret(self, dtype, shape, layout):
        return Tile(self, shape)


class Tile:
    def __init__(self, copies, shape, turned=False):
        self._copies, self.shape, self._turned, self.dtype = copies, shape, turned, copies.dtype

    def permute(self, order):
        return Tile(self._copies, self.shape, True)

    def load(self, layout):
        rows = self._copies.permute(0, 2, 1, 3).reshape(self.shape)
        return values((rows.T if self._turned else rows).clone())


class Arrivals(Barrier):
    def __init__(self):
        super().__init__()
        self.copies = []

    def expect(self, size, pred):
        if pred:
            assert self.missing == 0, "a copy begins before the one in its place has arrived"
            self.missing = int(size)

    def wait(self, parity):
        for copy in self.copies:
            copy()
        self.copies.clear()
        assert self.phase % 2 != int(parity), "waits for what nobody fetches"


def fetch(described, at, barrier, tile, pred):
    if not pred:
        return
    (column, row, _), (columns, rows, _) = map(int, at), described.block_shape
    store = described.base.as_strided(described.shape, described.strides)
    part = store[column : column + columns, row : row + rows]
    tile[...] = torch.nan

    def arrive():
        tile.zero_()
        tile[:, : part.shape[1]] = part
        barrier.missing -= tile.numel() * tile.element_size()
        assert barrier.missing >= 0, "more arrives than is expected"
        barrier.phase += barrier.missing == 0

    barrier.copies.append(arrive)


def shared(dtype, shape, layout):
    return Arrivals() if dtype == torch.int64 else torch.full(shape, torch.nan, dtype=dtype).as_subclass(Copies)


def extreme(name):
    return lambda a, b: values(getattr(torch, name)(torch.as_tensor(a), torch.as_tensor(b)))


class Kernel:
    """In place of `decode._decode`."""

    def __init__(self) -> None:
        gl = SimpleNamespace(
            **{
                **vars(GLUON),
                "allocate_shared_memory": shared,
                "convert_layout": lambda x, layout: x,
                "exp2": of_numpy(np.exp2),
                "log2": of_numpy(np.log2),
                "sum": lambda x, axis: of_numpy(np.sum)(x, axis=axis),
                "fma": lambda a, b, c: values((a.double() * b + c).float()),
                "maximum": extreme("maximum"),
                "minimum": extreme("minimum"),
                "constexpr": object,
                "DotOperandLayout": nothing,
            }
        )
        names = {**vars(decode), "_decode": KERNEL}
        names.update({name: each.value for name, each in names.items() if type(each).__name__ == "constexpr"})
        for name, each in list(names.items()):
            if hasattr(each, "fn") and hasattr(each.fn, "__code__"):
                names[name] = FunctionType(each.fn.__code__, names, name, each.fn.__defaults__)
        names.update(
            gl=gl,
            mbarrier=SimpleNamespace(
                init=nothing, expect=Arrivals.expect, wait=Arrivals.wait, MBarrierLayout=nothing
            ),
            tma=SimpleNamespace(async_copy_global_to_shared=fetch),
            mma_v2=lambda a, b, sums, input_precision: multiplied(a, b, sums),
            divided=lambda sums, total: sums / total[:, None],  # it asks for layouts
            _tiles=nothing,
            fence_async_shared=nothing,
            gdc_wait=nothing,
            gdc_launch_dependents=nothing,
        )  # fmt: skip
        self._gl, self._run = gl, names["_decode"]

    def __getitem__(self, grid):
        def launch(*given, num_warps, launch_pdl, enable_fp_fusion, **constants):
            arguments = [Pointer(each) if isinstance(each, torch.Tensor) else each for each in given]
            for each in arguments:
                if hasattr(each, "block_shape"):
                    each.dtype = each.base.dtype
            for at in np.ndindex(*map(int, grid)):
                self._gl.program_id = lambda axis, at=at: values(at[axis])
                self._run(*arguments, **constants)

        return launch


@pytest.fixture
def attend(monkeypatch):
    def run(q: Tensor, k: Tensor, v: Tensor, last, page: int, plain: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Queries [S, H, D] over keys [S, L, G, D] in pages in disorder, of which each reads those up to `last`."""
        monkeypatch.setattr(attention, "_better_kernels", lambda device: (None if plain else decode, None))
        monkeypatch.setattr(decode, "_decode", Kernel())
        blocks = -(-(max(last) + 1) // page)
        pages = torch.randperm(blocks * len(last), generator=torch.Generator().manual_seed(3)).view(-1, blocks)
        stores = [torch.full((blocks * len(last) * page, *x.shape[2:]), math.nan).to(x.dtype) for x in (k, v)]
        for at, end in enumerate(last):
            slots = (pages[at, torch.arange(end + 1) // page]) * page + torch.arange(end + 1) % page
            for held, given in zip(stores, (k, v), strict=True):
                held[slots] = given[at, : end + 1]
        return attention.attention(
            q, *stores, torch.arange(len(last) + 1), torch.tensor(last), pages * page, page, scale
        )

    return run


@pytest.mark.parametrize(
    ("last", "page", "width", "dtype"),
    [
        ([0, 63, 64, 127, 128, 300, 1023], 16, 64, torch.bfloat16),
        ([5, 1023, 1024, 1151, 1300], 64, 128, torch.bfloat16),
        ([70, 1023, 1500], 128, 64, torch.float16),
        ([70, 200], 32, 256, torch.bfloat16),  # an online softmax
    ],
)
@pytest.mark.parametrize("leap", [(), (1,), (100,), (180,), (62, 1010), (1280,)])
def test_bits_are_those_of_the_kernel_for_every_gpu(attend, last, page, width, dtype, leap) -> None:
    """Keys at `leap` have a score for some heads that is 80 powers of two above others."""
    heads, groups, longest, scale = 4, 2, max(last) + 1, 0.125 * math.log(2)
    q = 0.1 * drawn(len(last), heads, width, seed=0)
    k, v = (drawn(len(last), longest, groups, width, seed=seed) for seed in (1, 2))
    k *= 0.1
    q[:, ::2, 0], k[..., 0] = 8, 0
    q[:, 1::2, 0] = 0
    for at in leap:
        if at < longest:
            k[:, at, :, 0] = 80
    q, k, v = (x.to(dtype) for x in (q, k, v))
    made = attend(q, k, v, last, page, False, scale)
    same(made, attend(q, k, v, last, page, True, scale))
    ones = exact(q * (scale * width**0.5), k, v, [1] * len(last), last)
    torch.testing.assert_close(made[0].double(), ones, atol=0.02, rtol=0.02)
