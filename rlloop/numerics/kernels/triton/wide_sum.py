"""The float32 sum of two narrow tensors, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import cdiv

NUMBERS = 4096  # a program adds so many


# `size` is specialised: unless it is known to be a multiple of 16, numbers are loaded one by one.
@triton.jit
def _wide_sum(left, right, out, size, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < size
    sums = tl.load(left + at, inside, 0.0).to(tl.float32) + tl.load(right + at, inside, 0.0).to(tl.float32)
    tl.store(out + at, sums, inside)


def wide_sum(left: Tensor, right: Tensor) -> Tensor:
    left, right = left.contiguous(), right.contiguous()
    out = torch.empty(left.shape, device=left.device)
    if size := left.numel():
        _wide_sum[(cdiv(size, NUMBERS),)](left, right, out, size, NUMBERS=NUMBERS, num_warps=8)
    return out
