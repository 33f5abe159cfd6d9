"""RMS and layer norms: float32 inside, one rounding out. Rows are independent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, hopper, power_of_two, rows_like
from rlloop.numerics.kernels.triton.meeting import Meeting, meet, met, place

NORM_NUMBERS = 2048  # a program has about so many
NARROW = 1024  # width up to which a norm lets the next launch begin at once: at 4,096 one row loses 2%, 32 gain 1%
WAITING = 512  # programs that look at one flag at a time
BACKWARD_PROGRAMS = 768  # of a norm's backward: the weight's gradient is the sum of so many parts, in order
NARROW_PROGRAMS = 1 << 16  # the same for widths of up to 512, over the width
PART_ROWS, PART_COLUMNS = 512, 8  # of the parts, that one program of their sum has at a time


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


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward(
    stream, weight, scales, grad, grad_stream, grad_x, weight_parts, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, HAS_GRAD_STREAM: tl.constexpr,
):  # fmt: skip
    """grad_x = scale (g - n mean(g n)), with n the normed row, scale what normed it and g = grad * weight."""
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
        slope = grad_out * gain[None, :]
        gradient = scale * (slope - normed * (tl.sum(slope * normed, 1) / WIDTH)[:, None])
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
