"""Matrix products whose every output is one float32 chain over ascending K.

Tiles, and which operand is the tensor core's left one, leave the bits alone, so both follow the shape. Nothing splits
K. Few rows have a kernel of their own (`small_batch_linear`). Of more than `OUR_ROWS` rows cuBLAS does most of the work
where it gives the same bits for that very shape, which is tried once on numbers that tell orders apart: its choice of
kernel hangs on the shape alone, and with a bias on how far addresses are aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton import small_batch_tiles
from rlloop.numerics.kernels.triton.launch import (
    ROOM,
    ROOMY,
    aligned,
    cdiv,
    gluon_runs,
    power_of_two,
    rows_like,
    with_room,
)

FEW_ROWS = 256
# Up to `OUR_ROWS` rows our kernel is as fast as cuBLAS, or faster; up to `FEW_ROWS` also where rows fill its tiles and
# outputs are at most `OUR_OUTPUTS`, where a weight has fewer numbers than `LARGE_WEIGHT`, and where cuBLAS has other
# bits, since it splits K. Up to `FILLED_ROWS` rows are filled up to a multiple of `OUR_ROWS` for it: 72 rows, where a
# tile reaches beyond their end, took up to a third longer than 128 on an H200.
OUR_ROWS = 64
OUR_MULTIPLE, OUR_OUTPUTS = 128, 4096
FILLED_ROWS = 192
LARGE_WEIGHT = 3 << 20
MANY_ROWS = ROOMY
# Of `MANY_ROWS` rows and more cuBLAS gets multiples of `ROOM`, of fewer those of `paddings`: else every batch would be
# a shape never tried. Of many rows it also gets what lies behind them in memory, to fill up a multiple; where memory
# ends before, what is left over goes to our kernel. Where there are fewer than `MANY_ROWS`, copies of rows fill it up.
VENDOR_ALIGNMENT = 256  # bytes, beyond which cuBLAS does not look
TRIED_OUTPUTS = 1 << 22  # numbers that a shape is tried on, if 8 draws make them
COMPARED = 1 << 26  # of our numbers at a time: a trial of a whole vocabulary would need twice its logits


class Tiles(NamedTuple):
    rows: int
    outputs: int
    width: int  # of K at a time
    swapped: bool  # weights on the left: their rows fill the tensor core's 64 where tokens are few
    warps: int
    stages: int


HALF = (  # of 16-bit numbers: (up to so many rows, up to so many outputs, the tiles); measured on an H200
    (16, 8191, Tiles(16, 64, 128, True, 4, 6)),
    (16, 65536, Tiles(16, 128, 128, True, 4, 4)),
    (16, None, Tiles(16, 128, 128, True, 4, 3)),
    (32, 65536, Tiles(32, 64, 128, True, 4, 5)),
    (32, None, Tiles(32, 64, 128, True, 4, 3)),
    (64, 8191, Tiles(32, 64, 128, True, 4, 5)),
    (64, 65536, Tiles(64, 128, 128, True, 4, 4)),
    (64, None, Tiles(64, 128, 64, True, 4, 3)),
    (128, 2048, Tiles(32, 64, 128, True, 4, 4)),
    (128, 4096, Tiles(64, 64, 128, False, 4, 4)),
    (128, 65536, Tiles(64, 64, 64, True, 4, 4)),
    (512, 1024, Tiles(64, 32, 128, False, 4, 4)),
    (512, 2048, Tiles(64, 64, 128, False, 4, 4)),
    (512, 4096, Tiles(64, 128, 128, False, 4, 4)),
    (512, 65536, Tiles(64, 128, 64, False, 4, 3)),
    (512, None, Tiles(128, 128, 64, False, 4, 3)),
    (1024, 1024, Tiles(64, 128, 64, False, 4, 4)),  # or most multiprocessors would have none; not measured
    (1024, 2048, Tiles(128, 128, 64, False, 8, 4)),
    (2048, 1024, Tiles(128, 128, 64, False, 8, 4)),
    (None, None, Tiles(128, 256, 64, False, 8, 3)),
)
DEEP = Tiles(32, 64, 256, True, 4, 4)  # for 17 to 64 rows where K is 4096 or more and outputs are few
FLOAT32 = ((16, None, Tiles(16, 64, 32, False, 4, 2)), (None, None, Tiles(64, 64, 16, False, 4, 2)))


def tiles_for(rows: int, outputs: int, width: int, dtype: torch.dtype) -> Tiles:
    if dtype != torch.float32 and 16 < rows <= 64 and width >= 4096 and outputs <= 4096:
        return DEEP
    table = FLOAT32 if dtype == torch.float32 else HALF
    return next(
        tiles
        for most_rows, most_outputs, tiles in table
        if (most_rows is None or rows <= most_rows) and (most_outputs is None or outputs <= most_outputs)
    )


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, rows, outputs, width, addresses, stride, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr, SWAPPED: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """`WHOLE`: the width is a multiple of WIDTH, so that no load needs a mask. `PLACES`: the number of
    `addresses` that the outputs are written to, rows `stride` apart, in place of `out`; 0: to `out`."""
    row_tiles, output_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    # Eight tiles of rows share what they read of the weights before the next outputs come.
    task, band = tl.program_id(0), 8 * output_tiles
    first = task // band * 8
    height = min(row_tiles - first, 8)
    row = (first + task % band % height) * ROWS + tl.arange(0, ROWS)
    output = task % band // height * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, WIDTH)
    x_at = x + (row % rows).to(tl.int64)[:, None] * width + k[None, :]
    w_at = weight + (output % outputs).to(tl.int64)[:, None] * width + k[None, :]
    if SWAPPED:
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    else:
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for begin in range(0, width, WIDTH):
        if WHOLE:
            xs, ws = tl.load(x_at), tl.load(w_at)
        else:
            inside = (k < width - begin)[None, :]
            xs, ws = tl.load(x_at, inside, 0.0), tl.load(w_at, inside, 0.0)
        if SWAPPED:
            sums = tl.dot(ws, xs.T, sums, input_precision="ieee")
        else:
            sums = tl.dot(xs, ws.T, sums, input_precision="ieee")
        x_at += WIDTH
        w_at += WIDTH
    if SWAPPED:
        sums = sums.T
    if HAS_BIAS:
        sums += tl.load(bias + output, output < outputs, 0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * stride + output[None, :]
    inside, sums = (row < rows)[:, None] & (output < outputs)[None, :], sums.to(out.dtype.element_ty)
    if PLACES == 0:
        tl.store(out + at, sums, inside)
    for index in tl.static_range(PLACES):
        tl.store(tl.multiple_of(tl.load(addresses + index).to(out.dtype), 16) + at, sums, inside)


def few_rows(x: Tensor, outputs: int, rows: int | None = None) -> Callable[..., None] | None:
    """The kernel for few rows (those of x, or so many), or None: it copies rows of 16-bit numbers that begin at
    multiples of 16 bytes."""
    rows, width = rows or x.shape[0], x.shape[1]
    if rows > FEW_ROWS or x.itemsize != 2 or width == 0 or width % 8 or not gluon_runs(x.device):
        return None
    from rlloop.numerics.kernels.triton import small_batch_linear

    tiles = small_batch_tiles.tiles_for(rows, outputs, width)
    return tiles and partial(small_batch_linear.product, tiles=tiles)


def chain(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, tiles: Tiles | None = None,
    out: Tensor | None = None, addresses: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [T, K], weight [N, K], bias [N] -> [T, N] in `dtype`, by our kernels.

    `addresses` [P] int64, multiples of 16, of memory with the strides of `out`, that all get the outputs; then
    `out` is one of them.
    """
    (rows, width), outputs = x.shape, len(weight)
    if out is None:
        out = x.new_empty(rows, outputs, dtype=dtype)
    if out.numel() == 0:
        return out
    if tiles is None and (small_batch := few_rows(x, outputs)):
        small_batch(x, weight, bias, out, addresses=addresses)
        return out
    tiles = tiles or tiles_for(rows, outputs, width, x.dtype)
    grid = (cdiv(rows, tiles.rows) * cdiv(outputs, tiles.outputs),)
    _linear[grid](
        aligned(x), aligned(weight), weight if bias is None else aligned(bias), out, rows, outputs, width,
        out if addresses is None else addresses, out.stride(0), ROWS=tiles.rows, OUTPUTS=tiles.outputs,
        WIDTH=tiles.width, SWAPPED=tiles.swapped, WHOLE=width % tiles.width == 0, HAS_BIAS=bias is not None,
        PLACES=0 if addresses is None else len(addresses), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def vendor(
    x: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in `dtype`, by cuBLAS. With a bias, `dtype` must be that of x."""
    if bias is not None:
        return torch.addmm(bias, x, weight.T, out=out)
    if dtype == x.dtype:
        return torch.mm(x, weight.T, out=out)
    return torch.mm(x, weight.T, out_dtype=dtype, out=out)


_agreed: dict[tuple, bool] = {}


def vendor_agrees(
    rows: int, outputs: int, width: int, dtype: torch.dtype, out: torch.dtype, device: int, biased: bool = False
) -> bool:
    """True if cuBLAS gives our bits for this shape. Tried once a process; never while a graph is captured, nor on a CPU
    (`device` −1, in Triton's interpreter)."""
    key = (rows, outputs, width, dtype, out, device, biased)
    if key not in _agreed and device >= 0 and not torch.cuda.is_current_stream_capturing():
        generator = torch.Generator(f"cuda:{device}").manual_seed(0)
        bits = torch.int16 if out.itemsize == 2 else torch.int32
        draws = max(1, min(8, TRIED_OUTPUTS // (rows * outputs)))
        tiles, part = tiles_for(rows, outputs, width, dtype), max(1, COMPARED // outputs)

        def same() -> bool:
            x, weight = _cancelling(rows, outputs, width, dtype, generator)
            bias = _spread(outputs, dtype, generator) if biased else None
            theirs = vendor(x, weight, out, bias=bias).split(part)
            ours = (chain(each, weight, bias, out, tiles) for each in x.split(part))
            return all(torch.equal(a.view(bits), b.view(bits)) for a, b in zip(theirs, ours, strict=True))

        _agreed[key] = all(same() for _ in range(draws))
    return _agreed.get(key, False)


def _cancelling(
    rows: int, outputs: int, width: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random factors whose products add up to almost nothing: what is left is rounding, and so the order of the sum,
    which the rounding to 16 bits of an ordinary result would hide."""
    device, half = generator.device, width // 2
    x, weight = (torch.randn(n, width, dtype=dtype, device=device, generator=generator) for n in (rows, outputs))
    other = torch.randperm(half, device=device, generator=generator)
    x[:, half : 2 * half], weight[:, half : 2 * half] = -x[:, other], weight[:, other]
    x[:, 2 * half :] = 0
    return x, weight


def _spread(outputs: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Biases from far smaller to far larger than what cancelling products leave, so that both the order of a sum and
    one that is rounded before its bias would show."""
    exponents = torch.arange(outputs, device=generator.device) % 24
    bias = torch.randn(outputs, device=generator.device, generator=generator)
    return (bias * 2.0**-exponents).to(dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in `dtype`."""
    (rows, width), outputs = x.shape, weight.shape[0]
    small = (rows % OUR_MULTIPLE == 0 and outputs <= OUR_OUTPUTS) or outputs * width < LARGE_WEIGHT
    if rows <= OUR_ROWS or outputs == 0 or (small and few_rows(x, outputs)):
        return chain(x, weight, bias, dtype)
    x, weight = aligned(x), aligned(weight)
    if bias is not None and not (dtype == x.dtype == bias.dtype and _well_aligned(x, weight, bias)):
        return chain(x, weight, bias, dtype)

    agrees = partial(_agrees, x, outputs, dtype, bias is not None)
    if rows >= MANY_ROWS:
        return _many_rows(x, weight, bias, dtype, agrees)
    full, counts = -(-rows // OUR_ROWS) * OUR_ROWS, paddings(rows)
    filled = full if rows <= FILLED_ROWS or outputs <= OUR_OUTPUTS else rows
    few = few_rows(x, outputs, filled)
    # Of as many rows cuBLAS takes as long as our kernel, or longer.
    count = next((each for each in counts if (not few or each == counts[0] or each < full) and agrees(each)), 0)
    if count:
        return _with_copies(lambda more: vendor(more, weight, dtype, bias=bias), x, count)
    return _with_copies(lambda more: chain(more, weight, bias, dtype), x, filled if few else rows)


def by_vendor(x: Tensor, weight: Tensor) -> Tensor | None:
    """x [T, K], T from 65 to 1,023, weight [N, K] -> [T, N] in the type of x, by cuBLAS; None if it has other bits."""
    x = aligned(x)
    count = next(filter(partial(_agrees, x, len(weight), x.dtype, False), paddings(len(x))), 0)
    return _with_copies(lambda more: vendor(more, weight, x.dtype), x, count) if count else None


def _agrees(x: Tensor, outputs: int, dtype: torch.dtype, biased: bool, count: int) -> bool:
    """True if cuBLAS gives our bits for so many rows like those of x."""
    return vendor_agrees(count, outputs, x.shape[1], x.dtype, dtype, x.get_device(), biased)


def _with_copies(multiply: Callable[[Tensor], Tensor], x: Tensor, count: int) -> Tensor:
    """`multiply` of x [T, K], filled up to so many rows by copies of its own, of which T are at least half."""
    rows = len(x)
    return multiply(torch.cat([x, x[: count - rows]]))[:rows] if count > rows else multiply(x)


def paddings(rows: int) -> range:
    """Numbers of rows that cuBLAS may get in place of 65 to 1,023: multiples of 8, 16 or 32, to which an engine pads
    its steps (`graph_sizes.rounded`, finely), up to a third more: where it splits K for so many it may not for more."""
    step = min(32, power_of_two(rows) // 16)
    return range(-(-rows // step) * step, min(rows + rows // 3, MANY_ROWS) + 1, step)


def _many_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, agrees: Callable[[int], bool]
) -> Tensor:
    rows, outputs = x.shape[0], weight.shape[0]
    whole = rows // ROOM * ROOM
    if rows > whole and (filled := with_room(x, whole + ROOM)) is not None and agrees(whole + ROOM):
        out = rows_like(x, rows, outputs, dtype=dtype)
        vendor(filled, weight, dtype, out=with_room(out, whole + ROOM), bias=bias)
        return out
    if not agrees(whole):
        return chain(x, weight, bias, dtype)
    if rows == whole:
        return vendor(x, weight, dtype, bias=bias)
    out = x.new_empty(rows, outputs, dtype=dtype)
    vendor(x[:whole], weight, dtype, out=out[:whole], bias=bias)
    chain(x[whole:], weight, bias, dtype, out=out[whole:])
    return out


def _well_aligned(*tensors: Tensor) -> bool:
    """True if tensors are aligned like those that a shape is tried on."""
    return all(each.is_contiguous() and each.data_ptr() % VENDOR_ALIGNMENT == 0 for each in tensors)


def gradient(rows: Tensor, by_row: bool, lanes: Tensor, lanes_by_row: bool, dtype: torch.dtype) -> Tensor:
    """By cuBLAS, in the type of `lanes`, with float32 sums. rows [M, K] if by_row, lanes [N, K] if by row -> [M, N]."""
    left, right = rows if by_row else rows.T, lanes.T if lanes_by_row else lanes
    left = left.to(right.dtype)
    return torch.mm(left, right) if dtype == right.dtype else torch.mm(left, right, out_dtype=dtype)


def add_product(total: Tensor, rows: Tensor, lanes: Tensor) -> None:
    """total [M, N] += rows [M, K] times lanes [K, N], by cuBLAS, in float32 and rounded once."""
    torch.addmm(total, rows.to(lanes.dtype), lanes, out=total)
