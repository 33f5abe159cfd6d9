"""Norm and rotation of queries and keys, and the write of keys and values into their cache, in one kernel. Bits are
those of `rms_norm` and `rope`, one after the other."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.launch import ALIGNMENT, EXACT, aligned, cdiv, hopper, power_of_two
from rlloop.numerics.kernels.triton.norms import NORM_NUMBERS


@triton.jit
def turned(
    x, STEP: tl.constexpr, weight, positions, cos, sin, out, row, target, rows, eps, scales, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Rows of heads, of tokens STEP numbers apart, to their targets, tokens of `out`. KEPT: `scales` [rows] gets 1 /
    rms of each."""
    HALF: tl.constexpr = WIDTH // 2
    at = x + ((row // HEADS).to(tl.int64) * STEP + row % HEADS * WIDTH)[:, None]
    half = tl.arange(0, BLOCK // 2)
    inside = (row < rows)[:, None] & (half < HALF)[None, :]
    low, high = tl.load(at + half[None, :], inside, 0.0), tl.load(at + HALF + half[None, :], inside, 0.0)
    if NORMED:
        column = tl.arange(0, BLOCK)
        values = tl.load(at + column[None, :], (row < rows)[:, None] & (column < WIDTH)[None, :], 0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / WIDTH + eps)
        if KEPT:
            tl.store(scales + row, scale, row < rows)
        gain = tl.load(weight + half, half < HALF, 0.0).to(tl.float32)
        low = (low.to(tl.float32) * scale[:, None] * gain[None, :]).to(low.dtype)
        gain = tl.load(weight + HALF + half, half < HALF, 0.0).to(tl.float32)
        high = (high.to(tl.float32) * scale[:, None] * gain[None, :]).to(high.dtype)
    position = tl.load(positions + row // HEADS, row < rows, 0)
    table = position[:, None] * HALF + half[None, :]
    c, s = tl.load(cos + table, inside, 0.0), tl.load(sin + table, inside, 0.0)
    one, other = low.to(tl.float32), high.to(tl.float32)
    to = out + (target * HEADS + row % HEADS)[:, None] * WIDTH + half[None, :]
    tl.store(to, (one * c - other * s).to(low.dtype), inside)
    tl.store(to + HALF, (other * c + one * s).to(low.dtype), inside)


@triton.jit(do_not_specialize=["tokens"])
def _cache_write(
    q, k, v, q_weight, k_weight, positions, cos, sin, slots, out, keys, values, tokens, eps, Q_STEP: tl.constexpr,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, NORMED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program has rows of queries, of keys or of values."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    kind, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if kind == 0:
        target = (row // HEADS).to(tl.int64)
        turned(
            q, Q_STEP, q_weight, positions, cos, sin, out, row, target, tokens * HEADS, eps, q, HEADS, WIDTH, BLOCK,
            NORMED, False,
        )  # fmt: skip
    elif tl.program_id(0) * ROWS < tokens * GROUPS:
        rows = tokens * GROUPS
        target = tl.load(slots + row // GROUPS, row < rows, 0)
        if kind == 1:
            turned(
                k, K_STEP, k_weight, positions, cos, sin, keys, row, target, rows, eps, k, GROUPS, WIDTH, BLOCK, NORMED,
                False,
            )  # fmt: skip
        else:
            column = tl.arange(0, BLOCK)[None, :]
            inside = (row < rows)[:, None] & (column < WIDTH)
            at = (row // GROUPS).to(tl.int64) * V_STEP + row % GROUPS * WIDTH
            moved = tl.load(v + at[:, None] + column, inside, 0.0)
            tl.store(values + (target * GROUPS + row % GROUPS)[:, None] * WIDTH + column, moved, inside)


def _apart(x: Tensor) -> tuple[Tensor, int]:
    """x [T, H, D] and the numbers from one token to the next: it may be a part of a wider tensor."""
    tokens, _, width = x.shape
    step, head, number = x.stride()
    whole = number == 1 and head == width  # a token's numbers lie one behind the other
    if tokens > 1 and whole and x.data_ptr() % ALIGNMENT == 0 and step * x.itemsize % ALIGNMENT == 0:
        return x, step
    return aligned(x), x.shape[1] * x.shape[2]


def qkv_cache_write(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, positions: Tensor,
    cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    (q, q_step), (k, k_step), (v, v_step), out = _apart(q), _apart(k), _apart(v), q.new_empty(q.shape)
    (tokens, heads, width), groups, early = q.shape, k.shape[1], hopper(q.device)
    if tokens == 0:
        return out
    normed = q_weight is not None and k_weight is not None
    block = power_of_two(width, 2)
    height = max(1, NORM_NUMBERS // block)  # as `rms_norm` has it: the order of a sum follows the tile
    _cache_write[(cdiv(tokens * heads, height), 3)](
        q, k, v, aligned(q_weight) if normed else q, aligned(k_weight) if normed else k, positions.contiguous(),
        aligned(cos), aligned(sin), slots.contiguous(), out, keys, values, tokens, eps, Q_STEP=q_step, K_STEP=k_step,
        V_STEP=v_step, HEADS=heads, GROUPS=groups, WIDTH=width, BLOCK=block, ROWS=height, NORMED=normed, EARLY=early,
        num_warps=4, launch_pdl=early, **EXACT,
    )  # fmt: skip
    return out
