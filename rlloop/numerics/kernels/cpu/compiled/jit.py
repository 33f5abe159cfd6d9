"""Compiling, caching and launching kernels.

A parallel kernel takes tasks off a shared counter until none is left. Several threads run it at once, each on what the
others have not taken. Tasks write disjoint memory and read nothing that another writes, so the order in which
threads take them cannot change a bit.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator

from rlloop.numerics.folders import kernel_folder
from rlloop.numerics.kernels.cpu.compiled.simd import intrinsic

GRAIN = 1 << 20  # multiply-adds that are worth waking another thread for, which takes some 50 us


def _sources() -> str:
    # Numba compiles a cached kernel again when its own file changes, and not when one does that it calls into. So a
    # change to any of them leads to another cache.
    digest, folder = hashlib.sha256(numba.__version__.encode()), Path(__file__).parent
    for file in (folder.parents[2] / "random.py", *sorted(folder.glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


CACHE = str(kernel_folder(_sources()))


class _Place(UserProvidedCacheLocator):
    """A folder named by the source's content. Numba's own locators name it by the source's path, so that each checkout
    would compile all kernels anew."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._lineno = function.__code__.co_firstlineno
        content = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
        self._folder = Path(CACHE, f"{Path(file).stem}-{content}")

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> bytes:
        return self._folder.name.encode()

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Place:
        return cls(py_func, py_file)


class _Stored(CompileResultCacheImpl):
    _locator_classes: ClassVar = [_Place]


class KernelCache(FunctionCache):
    """Numba's cache of one kernel, in a folder of all checkouts with these sources, and for several processes at once:
    of two that save a kernel for other types, one would write its code under the other's name."""

    _impl_class = _Stored

    def save_overload(self, sig: Any, data: Any) -> None:
        self._impl.locator.ensure_cache_path()
        with Path(self.cache_path, "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().save_overload(sig, data)


def target_features() -> Mapping[str, bool]:
    """Features of the processor that kernels are compiled for: this one, or what NUMBA_CPU_FEATURES says."""
    named: str | None = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    if named is None:
        return binding.get_host_cpu_features()
    return {feature[1:]: feature[0] == "+" for feature in named.split(",") if feature}


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function for kernels to call, or to run as a whole."""
    compiled: Any = njit(nogil=True, error_model="numpy")(function)
    compiled._cache = KernelCache(function)  # where cache=True puts numba's own
    return compiled


inlined = njit(nogil=True, error_model="numpy", inline="always")


class parallel_kernel:
    """Compiles a kernel whose first argument is the counter that it takes its tasks from.

    The result takes the number of threads in its place, and may be called from any thread. The pool is Python's own:
    kernels do not hold the interpreter's lock, and unlike an OpenMP barrier it never waits for a thread that has not
    begun, so a busy machine costs little. `part`: the kernel itself, for another one to call with a counter at 0.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.part = kernel(function)

    def __call__(self, threads: int, *args: Any) -> None:
        args = (np.zeros(1, np.int64), *args)
        if threads == 1:
            self.part(*args)
        else:
            _POOL.run(threads - 1, self.part, args)


def threads_for(work: int) -> int:
    """The number of threads to use for so many multiply-adds."""
    return max(1, min(torch.get_num_threads(), work // GRAIN))


class _Pool:
    def __init__(self) -> None:
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        self.size = 0
        self.growing = threading.Lock()

    def run(self, helpers: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Calls function(*args) here and, for as long as that takes, in up to `helpers` other threads.

        Raises what one of them raised, as for want of memory.
        """
        if self.size < helpers:
            self._grow(helpers)
        permits, done = [None] * helpers, SimpleQueue()
        for _ in range(helpers):
            self.jobs.put((function, args, permits, done))
        try:
            function(*args)
        finally:  # also after an error: nobody writes into the arguments once the caller goes on
            begun = helpers
            while permits:  # a helper that has not begun finds no permit left and turns to the next job
                with suppress(IndexError):
                    permits.pop()
                    begun -= 1
            errors = [done.get() for _ in range(begun)]
        for error in errors:
            if error is not None:
                raise error

    def _grow(self, size: int) -> None:
        with self.growing:
            for _ in range(size - self.size):
                threading.Thread(target=self._help, daemon=True, name="rlloop-kernel").start()
            self.size = max(size, self.size)

    def _help(self) -> None:
        while True:
            function, args, permits, done = self.jobs.get()
            takes_part, result = True, None
            try:
                permits.pop()
            except IndexError:
                takes_part = False
            else:
                try:
                    function(*args)
                except BaseException as error:  # raised by the caller
                    result = error
            del function, args, permits  # before the caller goes on: an idle helper holds no tensors
            if takes_part:
                done.put(result)
            del done, result


_POOL = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.__init__)  # a child has none of the threads


@intrinsic
def stay_apart(typing):
    """Keeps the kernel that calls it from being inlined: a large one would be compiled again at each of its uses."""

    def generate(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def take(typing, counter):
    """The number in `counter` (int64 [1]), which then grows by one: atomically, so that each worker gets another."""

    def generate(context, builder, signature, args):
        address = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0]).data
        return builder.atomic_rmw("add", address, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), generate


_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def flat(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous tensor's memory as a flat array; bfloat16 as uint16 bits, float16 as int16 bits (see `simd`)."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    bits = _BITS.get(tensor.dtype)
    array = (tensor if bits is None else tensor.view(bits)).numpy()
    return array if array.ndim == 1 else array.reshape(-1)
