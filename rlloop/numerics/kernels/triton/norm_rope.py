"""Norms and rotations of queries and keys in training, forward and backward, in one kernel each. Results have the bits
of `rms_norm` and `rope`, one after the other; gradients repeat theirs, which may differ in their last bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.elementwise import NORM_NUMBERS, backward_tiles, norm_gradient
from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, power_of_two
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
    column = tl.arange(0, BLOCK)
    low = column < HALF
    gain = tl.load(weight + column, column < WIDTH, 0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        first = row.to(tl.int64)[:, None] * WIDTH
        at = first + column[None, :]
        position = tl.load(positions + row // HEADS, row < rows, 0)
        table = position[:, None] * HALF + tl.where(low, column, column - HALF)[None, :]
        c, s = tl.load(cos + table, inside, 0.0), tl.load(sin + table, inside, 0.0)
        own = tl.load(grad + at, inside, 0.0).to(tl.float32)
        other = first + tl.where(low, column + HALF, column - HALF)[None, :]
        back = own * c + tl.load(grad + other, inside, 0.0).to(tl.float32) * tl.where(low[None, :], s, -s)
        grad_out = back.to(grad.dtype.element_ty).to(tl.float32)
        scale = tl.load(scales + row, row < rows, 0.0)[:, None]
        normed = tl.load(x + at, inside, 0.0).to(tl.float32) * scale
        total += grad_out * normed
        gradient = norm_gradient(normed, grad_out, gain, scale, WIDTH)
        tl.store(grad_x + at, gradient.to(grad_x.dtype.element_ty), inside)
    tl.store(weight_parts + tl.program_id(0) * WIDTH + column, tl.sum(total, 0), column < WIDTH)


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
    of_q, of_k = weight_parts.sum(1).to(q_weight.dtype)
    return *outputs, of_q, of_k
