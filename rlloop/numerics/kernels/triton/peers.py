"""Copies into the memory of other GPUs of this host, over NVLink, and the barrier that says they have arrived.

A rank writes its columns straight into every rank's buffer, then all meet. Nothing is added, so bits are the writers'.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.attention import attention, decodes
from rlloop.numerics.kernels.triton.launch import EXACT, ROOM, aligned, cdiv, hopper, power_of_two
from rlloop.numerics.kernels.triton.linear import few_rows, product
from rlloop.numerics.kernels.triton.meeting import Meeting, begin, meet, met, place
from rlloop.numerics.kernels.triton.multi_linear import few_rows_gated
from rlloop.numerics.kernels.triton.norms import rms_norm
from rlloop.numerics.layout import AttentionLayout

__all__ = [
    "Meeting",
    "attention_into",
    "begin",
    "decodes",
    "gated_linear_into",
    "linear_into",
    "meet",
    "rms_norm",
    "write",
    "write_chosen",
]
NUMBERS = 4096  # that a program copies at a time
# Of more rows half of a gated product's travel while the other half is multiplied. No step that is recorded as a CUDA
# graph has more, so that those stay on one stream.
WHOLE_ROWS = 2048
SENDERS = 32  # programs that send the first half: enough for most of NVLink's bandwidth, and few multiprocessors


@triton.jit(do_not_specialize=["rows", "first_row", "rank", "index"])
def _write(
    x, gate, addresses, rows, width, x_stride, stride, first_row, flags, round, rank, index, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, GATED: tl.constexpr, MEETS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if MEETS:
        theirs, mine, now = place(flags, round, rank, index, PLACES)
    targets = ()
    for other in tl.static_range(PLACES):
        targets = targets + (tl.multiple_of(tl.load(addresses + other).to(x.dtype), 16),)  # noqa: RUF005
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    across = tl.cdiv(width, BLOCK)
    # Row by row: column by column took 1.4 times as long over NVLink.
    for task in range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0)):
        row, column = task // across * ROWS + tl.arange(0, ROWS), task % across * BLOCK + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * x_stride + column[None, :]
        values = tl.load(x + at, inside)
        if GATED:
            g = tl.load(gate + at, inside).to(tl.float32)
            values = (g / (1.0 + tl.exp(-g)) * values.to(tl.float32)).to(x.dtype.element_ty)
        to = (row + first_row).to(tl.int64)[:, None] * stride + column[None, :]
        for other in tl.static_range(PLACES):
            tl.store(targets[other] + to, values, inside)
    if MEETS:
        tl.debug_barrier()  # the flags tell of all threads' copies
        met(theirs, mine, now)


def write(
    x: Tensor, addresses: Tensor, stride: int, gate: Tensor | None = None, first_row: int = 0, programs: int = 1 << 20,
    meeting: Meeting | None = None,
) -> None:  # fmt: skip
    """x [T, N], whose rows may lie apart, to each of `addresses` [P] int64, rows `stride` numbers apart there,
    from row `first_row` on, by at most so many programs.

    `gate` [T, N], of x's strides: `silu_mul(gate, x)` in place of x. `meeting`: then `meet`, by the same launch where
    one program copies all.
    """
    rows, width = x.shape
    block = min(1024 if rows > 1 else NUMBERS, power_of_two(width))
    height = max(1, min(NUMBERS // block, power_of_two(rows)))
    tasks = cdiv(rows, height) * cdiv(width, block)
    early = hopper(x.device) and programs >= tasks  # fewer are on a stream of their own
    one, places = meeting is not None and tasks == 1, len(addresses)
    flags, round, rank, index = meeting or (addresses, addresses, 0, 0)
    if rows:
        _write[(min(programs, tasks),)](
            x, x if gate is None else gate, addresses, rows, width, x.stride(0), stride, first_row, flags, round, rank,
            index, ROWS=height, BLOCK=block, PLACES=places, GATED=gate is not None, MEETS=one, EARLY=early,
            num_warps=8, launch_pdl=early, **EXACT,
        )  # fmt: skip
    if meeting is not None and not one:
        meet(meeting)


@triton.jit(do_not_specialize=["begin", "end"])
def _write_chosen(
    x, chosen, addresses, begin, end, width, BLOCK: tl.constexpr, PLACES: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(chosen + row)
    if (expert >= begin) & (expert < end):
        inside, at = column < width, row * width + column
        values = tl.load(x + at, inside)
        for index in tl.static_range(PLACES):
            tl.store(tl.multiple_of(tl.load(addresses + index).to(x.dtype), 16) + at, values, inside)


def write_chosen(x: Tensor, chosen: Tensor, begin: int, end: int, addresses: Tensor) -> None:
    """Rows of x [..., N] whose number of chosen [...] is from `begin` to `end` - 1, to the same rows at each of
    `addresses` [P] int64."""
    x, chosen, width = aligned(x), chosen.contiguous(), x.shape[-1]
    block = min(1024, power_of_two(width))
    if chosen.numel():
        _write_chosen[(chosen.numel(), cdiv(width, block))](
            x, chosen, addresses, begin, end, width, BLOCK=block, PLACES=len(addresses), EARLY=hopper(x.device),
            num_warps=4, launch_pdl=hopper(x.device),
        )  # fmt: skip


def attention_into(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, addresses: Tensor, stride: int
) -> None:
    """Attention that `decodes`, of q [T, H, D] over k, v [slots, G, D]: a token's results [H D] to each of `addresses`,
    tokens `stride` numbers apart."""
    attention(
        q, k, v, layout.query_start, layout.context, layout.block_start, layout.block_size, scale, addresses=addresses,
        stride=stride,
    )  # fmt: skip


def linear_into(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, addresses: Tensor, meeting: Meeting | None = None
) -> None:
    """x [T, K], weight [N, K], bias [N]: the outputs to each of `addresses`, whose rows lie as those of `out`
    [T, ...]. `meeting`: `meet`, before x is read."""
    if few := few_rows(x, len(weight)):
        few(x, weight, bias, out, addresses=addresses, meeting=meeting)
        return
    if meeting is not None:
        meet(meeting)
    # from here on cuBLAS and a copy are faster than our kernel and its copies
    write(product(x, weight, bias, x.dtype), addresses, out.stride(0))


def gated_linear_into(x: Tensor, gate: Tensor, up: Tensor, out: Tensor, addresses: Tensor) -> None:
    """`silu_mul` of x [T, K] times gate and up [F, K], as `linear_into`."""
    if few := few_rows_gated(x, gate, up):
        few(x, gate, up, out, addresses=addresses)
        return

    def made(rows: Tensor) -> tuple[Tensor, Tensor]:
        return product(rows, up, None, x.dtype), product(rows, gate, None, x.dtype)

    split = len(x) // 2 // ROOM * ROOM if len(x) > WHOLE_ROWS else 0
    if split:
        first, main, side = made(x[:split]), torch.cuda.current_stream(), _side_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            write(first[0], addresses, out.stride(0), first[1], programs=SENDERS)
    last = made(x[split:])
    write(last[0], addresses, out.stride(0), last[1], split)
    if split:
        main.wait_stream(side)  # before the memory of `first` is another's


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
