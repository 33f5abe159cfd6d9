"""Norms, activations and rotary embedding: float32 inside, one rounding out. Rows are independent.

The GELU by the error function is computed in float64, since float32 would lose its small values below 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, hopper, power_of_two, rows_like
from rlloop.numerics.kernels.triton.meeting import Meeting, meet, met, place

NUMBERS = 2048  # a program of the activation has so many
NORM_NUMBERS = 2048  # a program of the norm has about so many
NARROW = 1024  # width up to which a norm lets the next launch begin at once: at 4,096 one row loses 2%, 32 gain 1%
WAITING = 512  # programs of a norm that look at one flag at a time
BACKWARD_PROGRAMS = 768  # of a norm's backward: the weight's gradient is the sum of so many parts, in order
PART_ROWS, PART_COLUMNS = 512, 8  # of the parts, that one program of their sum has at a time
NARROW_PROGRAMS = 1 << 16  # the same for widths of up to 512, over the width


@triton.jit(do_not_specialize=["rows", "rank", "index"])
def _rms_norm(
    x, residual, weight, stream, out, scales, rows, eps, flags, round, rank, index, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """`RANKS`: of the meeting before x is read; 0: none. AHEAD: no predecessor has written the weight. NARROW: what
    comes next is launched as early as this is, and fetches its weights beside what comes before: what it reads before
    its `gdc_wait` must be there since before that, too."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    if RANKS > 0:
        theirs, mine, now = place(flags, round, rank, index, RANKS)
    if AHEAD:
        gain = tl.load(weight + column, column < WIDTH, 0.0)
    if EARLY and NARROW:
        gdc_launch_dependents()
        gdc_wait()
    elif EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if not AHEAD:
        gain = tl.load(weight + column, column < WIDTH, 0.0)
    if RANKS > 0:
        met(theirs, mine, now)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    values = tl.load(x + at, inside, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        kept = (values + tl.load(residual + at, inside, 0.0).to(tl.float32)).to(stream.dtype.element_ty)
        tl.store(stream + at, kept, inside)
        values = kept.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / WIDTH + eps)
    tl.store(scales + row, scale, row < rows)
    normed = values * scale[:, None] * gain.to(tl.float32)[None, :]
    tl.store(out + at, normed.to(out.dtype.element_ty), inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, meeting: Meeting | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`meeting`: `meet`, before x is read."""
    # A copy of the weight would be the predecessor's work; and before other norms a layer's weights may be gathered.
    ahead = meeting is not None and isinstance(weight, Parameter) and aligned(weight) is weight
    x, weight, width, early = aligned(x), aligned(weight), x.shape[-1], hopper(x.device)
    rows = x.numel() // width
    out, scales = rows_like(x, *x.shape), torch.empty(rows, device=x.device)
    stream = x.new_empty(0 if residual is None else x.shape)
    if rows:
        block = power_of_two(width)
        height = max(1, NORM_NUMBERS // block)
        if meeting is not None and cdiv(rows, height) > WAITING:
            meet(meeting)
            meeting = None
        _rms_norm[(cdiv(rows, height),)](
            x, x if residual is None else aligned(residual), weight, x if residual is None else stream, out, scales,
            rows, eps, *(meeting or (x, x, 0, 0)), WIDTH=width, BLOCK=block, ROWS=height,
            HAS_RESIDUAL=residual is not None, RANKS=0 if meeting is None else len(meeting.flags), AHEAD=ahead,
            EARLY=early, NARROW=width <= NARROW, num_warps=4, launch_pdl=early, **EXACT,
        )  # fmt: skip
    return out, stream, scales


@triton.jit
def norm_gradient(normed, grad_out, gain, scale, WIDTH: tl.constexpr):
    """scale (g - n mean(g n)), with n the normed rows, scale [rows, 1] what normed them and g = grad_out * gain."""
    slope = grad_out * gain[None, :]
    return scale * (slope - normed * (tl.sum(slope * normed, 1) / WIDTH)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward(
    stream, weight, scales, grad, grad_stream, grad_x, weight_parts, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, HAS_GRAD_STREAM: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    gain = tl.load(weight + column, column < WIDTH, 0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        scale = tl.load(scales + row, row < rows, 0.0)[:, None]
        normed = tl.load(stream + at, inside, 0.0).to(tl.float32) * scale
        grad_out = tl.load(grad + at, inside, 0.0).to(tl.float32)
        total += grad_out * normed
        gradient = norm_gradient(normed, grad_out, gain, scale, WIDTH)
        if HAS_GRAD_STREAM:
            gradient += tl.load(grad_stream + at, inside, 0.0).to(tl.float32)
        tl.store(grad_x + at, gradient.to(grad_x.dtype.element_ty), inside)
    tl.store(weight_parts + tl.program_id(0) * WIDTH + column, tl.sum(total, 0), column < WIDTH)


@triton.jit(do_not_specialize=["count"])
def _sums_of_parts(parts, out, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = parts + (tl.program_id(1) * count + row) * WIDTH + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, count, ROWS):
        total += tl.load(at + begin * WIDTH, (begin + row < count) & (column < WIDTH)[None, :], 0.0)
    sums = tl.sum(total, 0).to(out.dtype.element_ty)
    tl.store(out + tl.program_id(1) * WIDTH + column, sums, column < WIDTH)


def sums_of_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., P, W] float32 -> [..., W]."""
    *outer, count, width = parts.shape
    out = parts.new_empty(*outer, width, dtype=dtype)
    grid = (cdiv(width, PART_COLUMNS), out.numel() // width)
    _sums_of_parts[grid](parts, out, count, width, PART_ROWS, PART_COLUMNS, num_warps=8)
    return out


def backward_tiles(rows: int, width: int) -> tuple[int, int, int]:
    """(columns, rows of a tile, programs)."""
    block = power_of_two(width)
    height = max(1, NORM_NUMBERS // block)
    programs = BACKWARD_PROGRAMS if block >= 1024 else NARROW_PROGRAMS // block
    return block, height, max(1, min(programs, cdiv(rows, height)))


def rms_norm_backward(
    stream: Tensor, weight: Tensor, scales: Tensor, grad: Tensor, grad_stream: Tensor | None
) -> tuple[Tensor, Tensor]:
    stream, width = aligned(stream), stream.shape[-1]
    rows, grad_x = stream.numel() // width, torch.empty_like(stream)
    block, height, programs = backward_tiles(rows, width)
    weight_parts = torch.empty(programs, width, device=stream.device)
    _rms_norm_backward[(programs,)](
        stream, aligned(weight), scales, aligned(grad), stream if grad_stream is None else aligned(grad_stream),
        grad_x, weight_parts, rows, WIDTH=width, BLOCK=block, ROWS=height, HAS_GRAD_STREAM=grad_stream is not None,
        num_warps=4,
    )  # fmt: skip
    return grad_x, sums_of_parts(weight_parts, weight.dtype)


@triton.jit
def _layer_norm(
    x, residual, weight, bias, stream, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * WIDTH + column, inside, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total = values + tl.load(residual + row * WIDTH + column, inside, 0.0).to(tl.float32)
        kept = total.to(stream.dtype.element_ty)
        tl.store(stream + row * WIDTH + column, kept, inside)
        values = kept.to(tl.float32)
    away = tl.where(inside, values - tl.sum(values, 0) / WIDTH, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(away * away, 0) / WIDTH + eps)
    gain = tl.load(weight + column, inside, 0.0).to(tl.float32)
    output = away * scale * gain + tl.load(bias + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, output.to(out.dtype.element_ty), inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _layer_normed(x, None, weight, bias, eps)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _layer_normed(x, residual, weight, bias, eps)


def _layer_normed(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(normed, what was normed)."""
    x, width = aligned(x), x.shape[-1]
    out, stream = rows_like(x, *x.shape), x if residual is None else torch.empty_like(x)
    if out.numel():
        _layer_norm[(out.numel() // width,)](
            x, x if residual is None else aligned(residual), aligned(weight), aligned(bias), stream, out, eps,
            WIDTH=width, BLOCK=power_of_two(width), HAS_RESIDUAL=residual is not None, num_warps=4, **EXACT,
        )  # fmt: skip
    return out, stream


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_backward(
    x, weight, grad, grad_x, weight_parts, bias_parts, rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """grad_x = scale (g - mean(g) - n mean(g n)), with n the normed row, scale = 1 / its deviation and g = grad *
    weight."""
    column = tl.arange(0, BLOCK)
    gain = tl.load(weight + column, column < WIDTH, 0.0).to(tl.float32)
    by_weight, by_bias = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        values = tl.load(x + at, inside, 0.0).to(tl.float32)
        away = tl.where(inside, values - (tl.sum(values, 1) / WIDTH)[:, None], 0.0)
        scale = (1.0 / tl.sqrt_rn(tl.sum(away * away, 1) / WIDTH + eps))[:, None]
        normed = away * scale
        grad_out = tl.load(grad + at, inside, 0.0).to(tl.float32)
        by_weight += grad_out * normed
        by_bias += grad_out
        slope = grad_out * gain[None, :]
        shift, turn = tl.sum(slope, 1) / WIDTH, tl.sum(slope * normed, 1) / WIDTH
        gradient = scale * (slope - shift[:, None] - normed * turn[:, None])
        tl.store(grad_x + at, gradient.to(grad_x.dtype.element_ty), inside)
    offset = tl.program_id(0) * WIDTH + column
    tl.store(weight_parts + offset, tl.sum(by_weight, 0), column < WIDTH)
    tl.store(bias_parts + offset, tl.sum(by_bias, 0), column < WIDTH)


def layer_norm_backward(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, width = aligned(x), x.shape[-1]
    rows, grad_x = x.numel() // width, torch.empty_like(x)
    block, height, programs = backward_tiles(rows, width)
    partials = torch.empty(2, programs, width, device=x.device)
    _layer_norm_backward[(programs,)](
        x, aligned(weight), aligned(grad), grad_x, partials[0], partials[1], rows, eps, WIDTH=width, BLOCK=block,
        ROWS=height, num_warps=4,
    )  # fmt: skip
    of_weight, of_bias = sums_of_parts(partials, weight.dtype)
    return grad_x, of_weight, of_bias


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
