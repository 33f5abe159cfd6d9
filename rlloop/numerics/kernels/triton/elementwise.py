"""Activations and rotary embedding: float32 inside, one rounding out; sums of squares in float64. Rows are
independent.

The GELU by the error function is computed in float64, since float32 would lose its small values below 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, power_of_two, rows_like

NUMBERS = 2048  # a program of the activation has so many


@triton.jit
def _gelu_share(x, TANH: tl.constexpr):
    """The share of x that GELU passes. By the tanh it is the sigmoid of 2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    if TANH:
        inner = 1.5957691216057308 * x * tl.fma(x * x, tl.full(x.shape, 0.044715, tl.float32), 1.0)
        return 1.0 / (1.0 + tl.exp(-inner))
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu(x, out, count, TANH: tl.constexpr, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    number = tl.load(x + at, at < count, 0.0).to(tl.float32)
    if not TANH:
        number = number.to(tl.float64)
    output = (number * _gelu_share(number, TANH)).to(tl.float32)
    tl.store(out + at, output.to(out.dtype.element_ty), at < count)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    x = aligned(x)
    out = torch.empty_like(x)
    if out.numel():
        _gelu[(cdiv(out.numel(), NUMBERS),)](x, out, out.numel(), tanh, NUMBERS, num_warps=4, **EXACT)
    return out


@triton.jit
def _gelu_backward(x, grad, grad_x, count, TANH: tl.constexpr, NUMBERS: tl.constexpr):
    """With s the share, the slope is s + x s'; by the tanh s' is s (1 - s) times the slope of the sigmoid's argument,
    by the error function the normal density."""
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    number = tl.load(x + at, at < count, 0.0).to(tl.float32)
    if not TANH:
        number = number.to(tl.float64)
    share = _gelu_share(number, TANH)
    if TANH:
        rise = 1.5957691216057308 * (1.0 + 0.134145 * number * number)
        slope = share + number * share * (1.0 - share) * rise
    else:
        slope = (share + number * 0.3989422804014327 * tl.exp(-0.5 * number * number)).to(tl.float32)
    grad_out = tl.load(grad + at, at < count, 0.0).to(tl.float32)
    tl.store(grad_x + at, (grad_out * slope).to(grad_x.dtype.element_ty), at < count)


def gelu_backward(x: Tensor, tanh: bool, grad: Tensor) -> Tensor:
    x, grad = aligned(x), aligned(grad)
    grad_x = torch.empty_like(x)
    if x.numel():
        _gelu_backward[(cdiv(x.numel(), NUMBERS),)](x, grad, grad_x, x.numel(), tanh, NUMBERS, num_warps=4)
    return grad_x


@triton.jit
def _silu_mul(gate, up, out, count, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    x = tl.load(gate + at, at < count, 0.0).to(tl.float32)
    y = tl.load(up + at, at < count, 0.0).to(tl.float32)
    tl.store(out + at, (x / (1.0 + tl.exp(-x)) * y).to(out.dtype.element_ty), at < count)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = aligned(gate), aligned(up)
    out = rows_like(gate, *gate.shape)
    if out.numel():
        _silu_mul[(cdiv(out.numel(), NUMBERS),)](gate, up, out, out.numel(), NUMBERS, num_warps=4, **EXACT)
    return out


@triton.jit
def _silu_mul_backward(gate, up, grad, grad_gate, grad_up, remade, count, NUMBERS: tl.constexpr, REMADE: tl.constexpr):
    """REMADE: `remade` gets what `_silu_mul` makes."""
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    x = tl.load(gate + at, at < count, 0.0).to(tl.float32)
    y = tl.load(up + at, at < count, 0.0).to(tl.float32)
    slope = tl.load(grad + at, at < count, 0.0).to(tl.float32)
    if REMADE:
        tl.store(remade + at, (x / (1.0 + tl.exp(-x)) * y).to(remade.dtype.element_ty), at < count)
    sigmoid = 1.0 / (1.0 + tl.exp(-x))
    by_gate = slope * y * sigmoid * (1.0 + x * (1.0 - sigmoid))
    tl.store(grad_gate + at, by_gate.to(grad_gate.dtype.element_ty), at < count)
    tl.store(grad_up + at, (slope * x * sigmoid).to(grad_up.dtype.element_ty), at < count)


def silu_mul_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _silu_mul_gradients(gate, up, grad, None)


def silu_mul_remade(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    remade = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return *_silu_mul_gradients(gate, up, grad, remade), remade


def _silu_mul_gradients(gate: Tensor, up: Tensor, grad: Tensor, remade: Tensor | None) -> tuple[Tensor, Tensor]:
    gate, up, grad = aligned(gate), aligned(up), aligned(grad)
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        _silu_mul_backward[(cdiv(gate.numel(), NUMBERS),)](
            gate, up, grad, grad_gate, grad_up, gate if remade is None else remade, gate.numel(), NUMBERS,
            REMADE=remade is not None, num_warps=4,
        )  # fmt: skip
    return grad_gate, grad_up


@triton.jit
def _sigmoid_mul(gate, up, out, count, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    x = tl.load(gate + at, at < count, 0.0).to(tl.float32)
    y = tl.load(up + at, at < count, 0.0).to(tl.float32)
    tl.store(out + at, (y / (1.0 + tl.exp(-x))).to(out.dtype.element_ty), at < count)


def sigmoid_mul(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = aligned(gate), aligned(up)
    out = rows_like(up, *up.shape)
    if out.numel():
        _sigmoid_mul[(cdiv(out.numel(), NUMBERS),)](gate, up, out, out.numel(), NUMBERS, num_warps=4, **EXACT)
    return out


@triton.jit(do_not_specialize=["rows"])
def _rope(
    x, stride, positions, cos, sin, sign, out, rows, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A row is one head of one token; tokens of x are `stride` numbers apart."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < HALF)[None, :]
    position = tl.load(positions + row // HEADS, row < rows, 0)
    table = position[:, None] * HALF + column[None, :]
    c = tl.load(cos + table, inside, 0.0)
    s = tl.load(sin + table, inside, 0.0) * sign
    source = (row // HEADS).to(tl.int64) * stride + row % HEADS * (2 * HALF)
    low = tl.load(x + source[:, None] + column[None, :], inside, 0.0).to(tl.float32)
    high = tl.load(x + source[:, None] + column[None, :] + HALF, inside, 0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * (2 * HALF) + column[None, :]
    tl.store(out + at, (low * c - high * s).to(out.dtype.element_ty), inside)
    tl.store(out + at + HALF, (high * c + low * s).to(out.dtype.element_ty), inside)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Queries or keys may be part of wider rows, as a product of all three makes them, and are not copied first."""
    tokens, heads, width = x.shape
    if x.stride(2) != 1 or x.stride(1) != width:
        x = x.contiguous()
    out = x.new_empty(x.shape)
    if out.numel():
        block = power_of_two(width // 2)
        height = max(1, 1024 // block)
        _rope[(cdiv(tokens * heads, height),)](
            x, x.stride(0), positions.contiguous(), cos.contiguous(), sin.contiguous(), float(sign), out,
            tokens * heads, HEADS=heads, HALF=width // 2, BLOCK=block, ROWS=height, num_warps=4, **EXACT,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "width"])
def _squares_of_rows(x, out, rows, width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float64)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        values = tl.load(x + row.to(tl.int64)[:, None] * width + column[None, :], inside, 0.0).to(tl.float64)
        total += values * values
    tl.store(out + row, tl.sum(total, 1), row < rows)


def squares_of_rows(x: Tensor) -> Tensor:
    """[N, K] -> [N] float64. Tiles are chosen by K, and neither by N nor by the address."""
    x, (rows, width) = aligned(x), x.shape
    out = torch.empty(rows, dtype=torch.float64, device=x.device)
    if rows:
        block = min(1024, power_of_two(width))
        height = 1024 // block
        _squares_of_rows[(cdiv(rows, height),)](x, out, rows, width, BLOCK=block, ROWS=height, num_warps=4, **EXACT)
    return out
