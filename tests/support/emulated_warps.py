"""Attention's kernels by warpgroups on CPU tensors: their sources, with stand-ins for Gluon, and a thread for each
warpgroup.

One thread runs at a time; at every barrier another one may go on, drawn by a seed. If none can, that is a deadlock.
Shared memory begins as NaN. A product of the tensor cores reads shared memory when it is waited for, so what is written
there too early is seen.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from types import FunctionType, SimpleNamespace

import numpy as np
import torch

from rlloop.numerics.kernels.triton import (
    backward_by_key,
    backward_by_query,
    backward_loads,
    decode,
    prefill,
    prefill_loads,
    prefill_sums,
)
from tests.support.emulated_gluon import GLUON, Pointer, Values, load, multiplied, nothing, values

WARPGROUP = 128
KERNELS = {  # with the modules that hold what they call
    prefill._prefill: (decode, prefill_loads, prefill_sums, prefill),
    backward_by_query.by_query: (prefill_loads, prefill, backward_loads, backward_by_query),
    backward_by_key.by_key: (prefill_loads, prefill, backward_loads, backward_by_key),
}


class Shared(Values):
    def store(self, numbers):
        self[...] = numbers

    def load(self, layout):
        return values(self.clone())


class Barrier:
    def __init__(self):
        self.phase = self.bytes = 0
        self.count = self.missing = 0

    def init(self, count):
        self.count = self.missing = count

    def arrive(self, count=1, size=0):
        self.missing, self.bytes = self.missing - count, self.bytes + size
        self.turn()

    def turn(self):
        assert self.missing >= 0, "more threads arrive than belong to a phase"
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


class Barriers:
    def __init__(self, count):
        self._each = [Barrier() for _ in range(count)]

    def index(self, at):
        return self._each[int(at)]


class Warpgroups:
    """Runs functions in threads, one at a time."""

    def __init__(self, seed: int) -> None:
        self._draw, self._turn = random.Random(seed), threading.Condition()
        self._waits: dict[int, tuple[Barrier, int] | None] = {}
        self._now, self._failed, self._of = 0, list[BaseException](), threading.local()

    @property
    def products(self) -> deque:
        """The thread's products under way."""
        return self._of.products

    def run(self, works) -> None:
        self._waits = dict.fromkeys(range(len(works)))
        self._failed.clear()
        threads = [
            threading.Thread(target=self._thread, args=(at, *work), daemon=True) for at, work in enumerate(works)
        ]
        self._now = self._draw.randrange(len(works))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed[0]

    def wait(self, barrier: Barrier, parity) -> None:
        self._waits[self._of.index] = (barrier, int(parity))
        self._hand_on()
        self._waits[self._of.index] = None

    def _thread(self, index: int, function, arguments) -> None:
        self._of.index, self._of.products = index, deque()
        try:
            with self._turn:
                self._turn.wait_for(lambda: self._now == index or self._failed)
            if not self._failed:
                function(*arguments)
            assert not self._of.products, "a product is never waited for"
        except BaseException as error:
            self._failed.append(error)
        del self._waits[index]
        if self._waits:
            self._hand_on(ends=True)

    def _hand_on(self, ends: bool = False) -> None:
        ready = [at for at, held in self._waits.items() if held is None or held[0].phase % 2 != held[1]]
        with self._turn:
            if not ready:
                self._failed.append(AssertionError("all warpgroups wait: a deadlock"))
            else:
                self._now = self._draw.choice(ready)
            self._turn.notify_all()
            if not ends:
                self._turn.wait_for(lambda: self._now == self._of.index or self._failed)
        if self._failed and not ends:
            raise self._failed[0]


class Address(Pointer):
    def to(self, dtype):
        return values(0)


class Memory:
    """Sums, tops and totals that warpgroups keep in global memory, of each by the lowest of its addresses."""

    def __init__(self):
        self._kept = {}

    def store(self, sums, kept):
        self._kept[int(kept.min())] = sums.clone()

    def add(self, sums, part_fade, fade, kept):
        at = int(kept.min())
        self._kept[at] = added(self._kept[at] * fade, sums * part_fade)

    def load(self, kept, width):
        assert kept.shape[1] == width
        return self._kept[int(kept.min())].clone()

    def put(self, part, at):
        self._kept[int(at.min())] = [each.clone() for each in part]

    def get(self, at):
        return tuple(values(each.clone()) for each in self._kept[int(at.min())])


def of_numpy(function):
    """What Triton's interpreter computes."""

    def of(x, **options):
        with np.errstate(all="ignore"):
            return values(torch.from_numpy(function(x.numpy(), **options)))

    return of


def flushed(x):
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, x * 0, x)


def added(a, b):
    """An addition in memory."""
    return values(flushed(flushed(a) + flushed(b)))


class Product:
    def __init__(self, a, b, sums, use_acc=True):
        self._terms, self.value = (a, b, sums if use_acc else torch.zeros_like(sums)), None

    def end(self):
        a, b, sums = self._terms
        self.value = multiplied(a, b, sums)


class Kernel:
    """In place of one of `KERNELS`."""

    def __init__(self, seed: int, kernel=prefill._prefill, **constants: int) -> None:
        """`constants`: other values of the modules'."""
        groups = self._groups = Warpgroups(seed)

        def shared(dtype, shape, layout):
            if dtype == torch.int64:
                return Barriers(shape[0])
            return torch.full(shape, 0 if dtype == torch.int32 else torch.nan, dtype=dtype).as_subclass(Shared)

        def tma(described, at, barrier, tile):
            (row, column), (height, width) = map(int, at), described.block_shape
            matrix = described.base.as_strided(described.shape, described.strides)
            part = matrix[row : row + height, column : column + width]
            assert tile.shape == (height, width)
            tile.zero_()
            tile[: part.shape[0], : part.shape[1]] = part
            barrier.bytes -= tile.numel() * tile.element_size()
            barrier.turn()

        def product(a, b, sums, use_acc=True, is_async=False):
            groups.products.append(made := Product(a, b, sums, use_acc))
            return made

        def landed(count, deps):
            while len(groups.products) > count:
                groups.products.popleft().end()
            got = [each.value if isinstance(each, Product) else each for each in deps]
            return got[0] if len(got) == 1 else tuple(got)

        def taken(pointer, count):
            old = pointer.memory[0].clone()
            pointer.memory[0] += count
            return values(old)

        def extreme(name):
            def of(a, b):
                return values(getattr(torch, name)(*(torch.as_tensor(each) for each in (a, b))))

            return of

        gl = SimpleNamespace(
            **{
                **vars(GLUON),
                "allocate_shared_memory": shared,
                "convert_layout": lambda x, layout: x,
                "exp2": of_numpy(np.exp2),
                "log2": of_numpy(np.log2),
                "fma": lambda a, b, c: values((a.double() * b + c).float()),
                "div_rn": torch.div,
                "sum": lambda x, axis: of_numpy(np.sum)(x, axis=axis),
                "maximum": extreme("maximum"),
                "minimum": extreme("minimum"),
                "atomic_add": taken,
                "reshape": lambda x, shape: x.reshape(shape),
                "split": lambda x: x.unbind(-1),
                "num_programs": lambda axis: values(self._programs),
                "warp_specialize": lambda works, warps, registers: groups.run(works),
                "constexpr": object,
                **dict.fromkeys(("DotOperandLayout", "DistributedLinearLayout", "SwizzledSharedLayout"), nothing),
            }
        )
        names = {name: each for module in KERNELS[kernel] for name, each in vars(module).items()}
        names.update({name: each.value for name, each in names.items() if type(each).__name__ == "constexpr"})
        names.update(
            constants,
            gl=gl,
            mbarrier=SimpleNamespace(
                init=lambda barrier, count: barrier.init(count),
                expect=lambda barrier, size: barrier.arrive(1, size),
                arrive=lambda barrier, count=1: barrier.arrive(count),
                wait=groups.wait,
                MBarrierLayout=nothing,
            ),
            tma=SimpleNamespace(async_copy_global_to_shared=tma),
            async_copy=SimpleNamespace(
                async_copy_global_to_shared=lambda tile, at, mask: tile.copy_(load(at, mask)),
                mbarrier_arrive=lambda barrier, increment_count: barrier.arrive(WARPGROUP),
            ),
            warpgroup_mma=product,
            warpgroup_mma_wait=landed,
            fence_async_shared=nothing,
            barrier=nothing,
        )
        for name, each in list(names.items()):
            if hasattr(each, "fn") and hasattr(each.fn, "__code__"):
                names[name] = FunctionType(each.fn.__code__, names, name, each.fn.__defaults__)
        place = names["place"]  # numbers of a kernel have `to`, those of Python do not
        names["divided"] = lambda sums, total: sums / total[:, None]  # it asks for layouts
        names["place"] = lambda *given: tuple(map(values, place(*given)))
        memory = Memory()
        names.update(
            _store=memory.store, _add=memory.add, _load=memory.load, _added=added, _put=memory.put, _get=memory.get
        )
        self._gl, self._programs = gl, 1
        self._run = FunctionType(kernel.fn.__code__, names, kernel.fn.__name__, kernel.fn.__defaults__)

    def __getitem__(self, grid):
        def launch(*given, num_warps, maxnreg, enable_fp_fusion, **constants):
            self._programs = int(grid[0])
            arguments = [
                each if hasattr(each, "block_shape") else Address(each) if isinstance(each, torch.Tensor) else each
                for each in given
            ]
            for program in range(self._programs):
                self._gl.program_id = lambda axis, program=program: values(program)
                self._run(*arguments, **constants)

        return launch
