"""Launch options, and capabilities of the device, that all kernels share."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

EXACT: dict[str, Any] = {"enable_fp_fusion": False}  # a * b + c is one rounding only where the source says fma
ALIGNMENT = 16  # bytes
GLUON = ("3.6", "3.7")  # the Tritons that kernels in Gluon run with; Gluon is experimental
HOPPER = 9  # of `generation`


@functools.cache
def generation(device: torch.device) -> int:
    """The GPU's major compute capability; 0: this is none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@functools.cache
def gluon_runs(device: torch.device) -> bool:
    """True if kernels in Gluon run there."""
    return ".".join(triton.__version__.split(".")[:2]) in GLUON and generation(device) == HOPPER


@functools.cache
def hopper(device: torch.device) -> bool:
    """True if tiles can be fetched by descriptors there, and a launch can begin before its predecessor ends."""
    return generation(device) >= HOPPER


@functools.cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def aligned(x: Tensor) -> Tensor:
    """x, contiguous, at an address that vectors can be loaded from.

    The compiler lays a tile out by what it knows of the address, and sums follow the layout: a slice of a tensor must
    not be summed in another order than the tensor.
    """
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


ROOM = 256  # rows
ROOMY = 1024  # rows from which on there is room


def rows_like(x: Tensor, rows: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [rows, ...] of x's device, whose memory goes on to a multiple of `ROOM` rows where there are many."""
    made = x.new_empty(-(-rows // ROOM) * ROOM if rows >= ROOMY else rows, *shape, dtype=dtype or x.dtype)
    return made.resize_(rows, *shape)  # which keeps the memory, and makes no view


def with_room(x: Tensor, rows: int) -> Tensor | None:
    """x [T, K] and what lies in memory behind it, of any values: [rows, K]. None where its memory ends before."""
    end = (x.storage_offset() + rows * x.shape[1]) * x.itemsize
    if not x.is_contiguous() or x.untyped_storage().nbytes() < end:
        return None
    return x.as_strided((rows, x.shape[1]), (x.shape[1], 1))


def cdiv(n: int, each: int) -> int:
    """n / each, rounded up: on the host ten times as fast as `triton.cdiv`, which kernels can call, too."""
    return -(-n // each)


def power_of_two(n: int, least: int = 1) -> int:
    return max(least, 1 << (n - 1).bit_length())


def strict_products() -> None:
    """No TensorFloat-32 and no partial sums in bfloat16 or float16, for the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
