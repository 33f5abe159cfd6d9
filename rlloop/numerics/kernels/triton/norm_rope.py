"""Norms and rotations of queries and keys in training, forward and backward, in one kernel each. Results have the bits
of `rms_norm` and `rope`, one after the other; gradients repeat theirs, which may differ in their last bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, power_of_two
from rlloop.numerics.kernels.triton.norms import NORM_NUMBERS, backward_tiles, sums_of_parts
from rlloop.numerics.kernels.triton.qkv_cache_write import turned


@triton.jit(do_not_specialize=["tokens"])
def _norm_rope(
    q, k, q_weight, k_weight, positions, cos, sin, q_out, k_out, q_scales, k_scales, tokens, eps, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program has rows of queries or of keys."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) == 0:
        turned(
            q, HEADS * WIDTH, q_weight, positions, cos, sin, q_out, row, (row // HEADS).to(tl.int64), tokens * HEADS,
            eps, q_scales, HEADS, WIDTH, BLOCK, True, True,
        )  # fmt: skip
    elif tl.program_id(0) * ROWS < tokens * GROUPS:
        turned(
            k, GROUPS * WIDTH, k_weight, positions, cos, sin, k_out, row, (row // GROUPS).to(tl.int64), tokens * GROUPS,
            eps, k_scales, GROUPS, WIDTH, BLOCK, True, True,
        )  # fmt: skip


def norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, positions: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = aligned(q), aligned(k)
    (tokens, heads, width), groups = q.shape, k.shape[1]
    outputs = torch.empty_like(q), torch.empty_like(k)
    scales = torch.empty(tokens * heads, device=q.device), torch.empty(tokens * groups, device=q.device)
    if tokens:
        block = power_of_two(width, 2)
        height = max(1, NORM_NUMBERS // block)  # as `rms_norm` has it: the order of a sum follows the tile
        _norm_rope[(cdiv(tokens * max(heads, groups), height), 2)](
            q, k, aligned(q_weight), aligned(k_weight), positions.contiguous(), aligned(cos), aligned(sin),
            *outputs, *scales, tokens, eps, HEADS=heads, GROUPS=groups, WIDTH=width, BLOCK=block, ROWS=height,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return *outputs, *scales


@triton.jit
def _gradients(
    x, weight, scales, positions, cos, sin, grad, grad_x, weight_parts, rows, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH // 2
    half = tl.arange(0, BLOCK // 2)
    own = half < HALF
    low_gain = tl.load(weight + half, own, 0.0).to(tl.float32)[None, :]
    high_gain = tl.load(weight + HALF + half, own, 0.0).to(tl.float32)[None, :]
    low_total, high_total = tl.zeros((ROWS, BLOCK // 2), tl.float32), tl.zeros((ROWS, BLOCK // 2), tl.float32)
    for begin in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & own[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + half[None, :]
        low, high = tl.load(grad + at, inside, 0.0), tl.load(grad + at + HALF, inside, 0.0)
        low_normed, high_normed = tl.load(x + at, inside, 0.0), tl.load(x + at + HALF, inside, 0.0)
        scale = tl.load(scales + row, row < rows, 0.0)[:, None]
        position = tl.load(positions + row // HEADS, row < rows, 0)
        table = position[:, None] * HALF + half[None, :]
        c, s = tl.load(cos + table, inside, 0.0), tl.load(sin + table, inside, 0.0)
        low_out, high_out = _turned_back(low, high, c, s)
        low_normed, high_normed = low_normed.to(tl.float32) * scale, high_normed.to(tl.float32) * scale
        low_total += low_out * low_normed
        high_total += high_out * high_normed
        low_slope, high_slope = low_out * low_gain, high_out * high_gain
        mean = (tl.sum(low_slope * low_normed + high_slope * high_normed, 1) / WIDTH)[:, None]
        tl.store(grad_x + at, (scale * (low_slope - low_normed * mean)).to(grad_x.dtype.element_ty), inside)
        tl.store(grad_x + at + HALF, (scale * (high_slope - high_normed * mean)).to(grad_x.dtype.element_ty), inside)
    parts = weight_parts + tl.program_id(0) * WIDTH + half
    tl.store(parts, tl.sum(low_total, 0), own)
    tl.store(parts + HALF, tl.sum(high_total, 0), own)


@triton.jit
def _turned_back(low, high, c, s):
    """Gradients of what was rotated, rounded as a rotation on its own rounds them."""
    one, other = low.to(tl.float32), high.to(tl.float32)
    return (one * c + other * s).to(low.dtype).to(tl.float32), (other * c - one * s).to(low.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _norm_rope_backward(
    q, k, q_weight, k_weight, q_scales, k_scales, positions, cos, sin, grad_q, grad_k, q_out, k_out, weight_parts,
    tokens, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`weight_parts` [2, programs, WIDTH]: the queries', then the keys'."""
    if tl.program_id(1) == 0:
        _gradients(
            q, q_weight, q_scales, positions, cos, sin, grad_q, q_out, weight_parts, tokens * HEADS, HEADS, WIDTH,
            BLOCK, ROWS,
        )  # fmt: skip
    else:
        _gradients(
            k, k_weight, k_scales, positions, cos, sin, grad_k, k_out, weight_parts + tl.num_programs(0) * WIDTH,
            tokens * GROUPS, GROUPS, WIDTH, BLOCK, ROWS,
        )  # fmt: skip


def norm_rope_backward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, q_scales: Tensor, k_scales: Tensor, positions: Tensor,
    cos: Tensor, sin: Tensor, grad_q: Tensor, grad_k: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k = aligned(q), aligned(k)
    (tokens, heads, width), groups = q.shape, k.shape[1]
    outputs = torch.empty_like(q), torch.empty_like(k)
    block, height, programs = backward_tiles(tokens * max(heads, groups), width)
    weight_parts = torch.empty(2, programs, width, device=q.device)
    _norm_rope_backward[(programs, 2)](
        q, k, aligned(q_weight), aligned(k_weight), q_scales, k_scales, positions.contiguous(), aligned(cos),
        aligned(sin), aligned(grad_q), aligned(grad_k), *outputs, weight_parts, tokens, HEADS=heads, GROUPS=groups,
        WIDTH=width, BLOCK=block, ROWS=height, num_warps=4, **EXACT,
    )  # fmt: skip
    of_q, of_k = sums_of_parts(weight_parts, q_weight.dtype)
    return *outputs, of_q, of_k
