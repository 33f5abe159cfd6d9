"""Kernels for GPUs on CPU tensors, in Triton's interpreter; as a pytest plugin, for every test of a process.

pytest -p tests.support.interpreted_kernels tests/unit/numerics/test_vision_operations.py
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined

from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from rlloop.numerics.kernels import register_kernels
from rlloop.numerics.kernels.cpu.backend import embedding_backward  # noqa: F401  the Triton backend leaves it to PyTorch
from rlloop.numerics.kernels.triton.backend import *  # noqa: F403


def _chain(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
    """One float32 chain over ascending K, as a tensor core's is whatever the tile; numpy's goes by the shape."""
    total = d.data.astype(np.float32)
    for left, right in zip(np.moveaxis(_wide(a), -1, 0), np.moveaxis(_wide(b), -2, 0), strict=True):
        total += left[..., None] * right[..., None, :]
    return TensorHandle(total, d.dtype.scalar)


def _wide(x: TensorHandle) -> np.ndarray:
    if x.dtype.scalar.is_bf16():  # kept as its bits
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    return x.data.astype(np.float32)


def _fused(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, c: TensorHandle) -> TensorHandle:
    """a * b + c, rounded once; the interpreter rounds twice."""
    if c.data.dtype != np.float32:
        return _fma(self, a, b, c)
    return TensorHandle((a.data.astype(np.float64) * b.data + c.data).astype(np.float32), c.dtype.scalar)


_fma = InterpreterBuilder.create_fma
_patch_tensor = interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    """Arrays of one number as bounds of loops, which numpy 2.4 takes no longer."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


_cast = InterpreterBuilder.cast_impl


def _nearest(self: InterpreterBuilder, source: TensorHandle, to: Any) -> TensorHandle:
    """Rounds to the nearest bfloat16, as a GPU does and PyTorch; the interpreter cuts the last 16 bits off."""
    if not (source.dtype.scalar.is_fp32() and to.scalar.is_bf16()):
        return _cast(self, source, to)
    bits = np.ascontiguousarray(source.data).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(source.data), np.uint16(0x7FC0), rounded), to.scalar)


np.seterr(all="ignore")  # a device does not warn
InterpreterBuilder.create_dot, interpreter._patch_lang_tensor = _chain, _with_index
InterpreterBuilder.cast_impl, InterpreterBuilder.create_fma = _nearest, _fused
register_kernels("cpu", __name__, packages=("triton",))
