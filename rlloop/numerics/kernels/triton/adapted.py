"""Products whose sums go on over the terms of adapters, on CUDA.

The product leaves its float32 sums, by whichever kernel suits its shape, and one more kernel continues them: z B' a
further 16 terms of K at a time, for each of a tile's adapters in turn. Rows of another adapter get zeros there, which
leave a sum as it is, so a row's bits do not depend on its neighbours. Its tiles are one constant shape.

Where nothing has a gradient, rows are sorted by adapter once a forward (`adapted_rows`): a tile has one adapter then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.terms import Products
from rlloop.numerics.kernels.triton import grouped, small_batch_tiles
from rlloop.numerics.kernels.triton import linear as products
from rlloop.numerics.kernels.triton.launch import aligned, cdiv, gluon_runs
from rlloop.numerics.kernels.triton.packed import sums
from rlloop.numerics.kernels.triton.several_adapters import several_adapters
from rlloop.numerics.kernels.triton.sorting import Groups, sorted_by_group
from rlloop.numerics.layout import AdapterSlots, Factors

ROWS, OUTPUTS, TERMS = 64, 64, 16
SMALL = 1 << 23  # numbers of weights whose product of many rows takes the GPU less time than several launches the host


@triton.jit(do_not_specialize=["rows"])
def _continue(
    sums, z, up, slots, ranks, bias, out, rows, outputs, width, up_slot, up_output, up_term, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, TERMS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    NONE: tl.constexpr = 2147483647
    output_tiles = tl.cdiv(outputs, OUTPUTS)
    row = tl.program_id(0) // output_tiles * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) % output_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = (row < rows)[:, None] & (output < outputs)[None, :]
    at = row.to(tl.int64)[:, None] * outputs + output[None, :]
    total = tl.load(sums + at, inside, 0.0)
    slot = tl.load(slots + row, row < rows, 0).to(tl.int32)
    has = (row < rows) & (tl.load(ranks + slot) > 0)
    slot = tl.where(has, slot, NONE)
    current = tl.min(slot, 0)
    while current < NONE:
        mine, matrix = slot == current, up + current.to(tl.int64) * up_slot
        for begin in range(0, tl.load(ranks + current).to(tl.int32), TERMS):
            k = begin + tl.arange(0, TERMS)
            zs = tl.load(z + row.to(tl.int64)[:, None] * width + k[None, :], mine[:, None] & (k < width)[None, :], 0.0)
            us = tl.load(
                matrix + output.to(tl.int64)[None, :] * up_output + k.to(tl.int64)[:, None] * up_term,
                (output < outputs)[None, :] & (k < width)[:, None], 0.0,
            )  # fmt: skip
            total = tl.dot(zs, us, total, input_precision="ieee")
        current = tl.min(tl.where(slot > current, slot, NONE), 0)
    if HAS_BIAS:
        total += tl.load(bias + output, output < outputs, 0.0).to(tl.float32)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), inside)


def continued(
    base: Tensor, bias: Tensor | None, dtype: torch.dtype, z: Tensor, up: Tensor, by_row: bool, slots: Tensor,
    ranks: Tensor,
) -> Tensor:  # fmt: skip
    """Sums `base` [R, N] float32 with each row's terms and the bias, rounded to `dtype`; see `layout.AdapterTerms`."""
    (rows, outputs), z = base.shape, aligned(z)
    up = up.to(z.dtype)
    out = base if dtype == torch.float32 else base.new_empty(rows, outputs, dtype=dtype)
    if out.numel():
        up_slot, up_output, up_term = up.stride() if by_row else (up.stride(0), up.stride(2), up.stride(1))
        grid = (cdiv(rows, ROWS) * cdiv(outputs, OUTPUTS),)
        _continue[grid](
            base, z, up, slots.contiguous(), ranks, base if bias is None else aligned(bias), out, rows, outputs,
            z.shape[1], up_slot, up_output, up_term, ROWS=ROWS, OUTPUTS=OUTPUTS, TERMS=TERMS,
            HAS_BIAS=bias is not None, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tasks"])
def _continue_sorted(
    sums, z, up, order, offsets, table, ranks, bias, out, tasks, outputs, width, up_slot, up_output, up_term,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TERMS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """As `_continue`, a tile's rows being of one slot: those from the table's row on in the order."""
    tile, output = tl.program_id(0) % tasks, tl.program_id(0) // tasks * OUTPUTS + tl.arange(0, OUTPUTS)
    slot, begin = tl.load(table + tile * 2), tl.load(table + tile * 2 + 1)
    if slot >= 0:
        row = begin + tl.arange(0, ROWS)
        valid = row < tl.load(offsets + slot + 1)
        row = tl.load(order + row, valid, 0).to(tl.int64)
        inside = valid[:, None] & (output < outputs)[None, :]
        at = row[:, None] * outputs + output[None, :]
        total = tl.load(sums + at, inside, 0.0)
        matrix = up + slot.to(tl.int64) * up_slot
        for first in range(0, tl.load(ranks + slot).to(tl.int32), TERMS):
            k = first + tl.arange(0, TERMS)
            zs = tl.load(z + row[:, None] * width + k[None, :], valid[:, None] & (k < width)[None, :], 0.0)
            us = tl.load(
                matrix + output.to(tl.int64)[None, :] * up_output + k.to(tl.int64)[:, None] * up_term,
                (output < outputs)[None, :] & (k < width)[:, None], 0.0,
            )  # fmt: skip
            total = tl.dot(zs, us, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + output, output < outputs, 0.0).to(tl.float32)[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), inside)


def _sorted(factors: Factors, which: AdapterSlots, dtype: torch.dtype) -> tuple[Tensor, Groups]:
    """Rows by slot, once a forward."""
    count = len(factors.ranks)
    return which.kept(lambda slots: sorted_by_group(slots, count, dtype), count, dtype)


def adapted_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, factors: Factors, which: AdapterSlots
) -> Tensor:
    """x [T, K] times weight [N, K], each row with its slot's adapter -> [T, N] in `dtype`; for forwards alone."""
    order, groups = _sorted(factors, which, x.dtype)
    z = grouped.product(x, factors.down, groups, len(x), order=order, gather=1, scatter=True)
    base = sums(x, weight, True, None, torch.float32)
    out = base if dtype == torch.float32 else base.new_empty(base.shape, dtype=dtype)
    if out.numel():
        tasks, outputs, up = len(groups.table), base.shape[1], factors.up.to(z.dtype)
        _continue_sorted[(tasks * cdiv(outputs, OUTPUTS),)](
            base, z, up, order, groups.offsets, groups.table, factors.ranks, base if bias is None else aligned(bias),
            out, tasks, outputs, z.shape[1], *up.stride(), ROWS=groups.height.rows, OUTPUTS=OUTPUTS, TERMS=TERMS,
            HAS_BIAS=bias is not None, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


def one_rank(factors: Sequence[Factors]) -> bool:
    """True if one launch can multiply by weights with these factors."""
    if any(each.down.dim() != 3 for each in factors):
        return False
    downs, ups = ([getattr(each, name) for each in factors] for name in ("down", "up"))
    rank = downs[0].shape[1]
    return rank % 8 == 0 and rank <= 128 and all(
        down.shape[1] == rank and down.is_contiguous() and up.is_contiguous() and up.itemsize == 2
        for down, up in zip(downs, ups, strict=True)
    )  # fmt: skip


def adapted_products(
    x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None, dtype: torch.dtype, factors: tuple[Factors, ...],
    which: AdapterSlots, gated: bool,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Few rows of x [T, K] times weights [N, K] with one adapter -> [T, N] each, or [T, F] if `gated`. Rows with
    adapters of their own have that of several weights."""
    (rows, width), outputs = x.shape, sum(map(len, weights))
    same = all(weight.dtype == x.dtype for weight in (*weights, *(each.up for each in factors)))
    if not (same and rows and x.itemsize == 2 and width and width % 8 == 0 and one_rank(factors)):
        return None
    if not which.single:
        if len(weights) == 1 or rows > products.FEW_ROWS or dtype != x.dtype:
            return None
        return several_adapters(x, weights, factors, *_sorted(factors[0], which, x.dtype), gated)
    if not gluon_runs(x.device) or (rows > products.FEW_ROWS and outputs * width > SMALL):
        return None
    from rlloop.numerics.kernels.triton import small_batch_linear as few

    slots = None if which.uniform else which.slots(x)
    ahead = slots is None or which.keeps("sole")
    sole = None if slots is None else which.kept(lambda slots: slots.amin(0, keepdim=True), "sole")
    adapter = few.Adapter(factors, which, slots, sole, ahead)
    tiles = small_batch_tiles.adapted_tiles(x, weights, factors[0].down.shape[1], gated)
    if tiles is None:
        return None
    if len(weights) == 3:
        return few.products(x, weights, tiles, adapter)
    out = x.new_empty(rows, len(weights[0]), dtype=dtype)
    if gated:
        few.gated(x, *weights, out, tiles, adapter=adapter)
    else:
        few.product(x, weights[0], bias, out, tiles, adapter=adapter)
    return (out,)


def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, z: Tensor, up: Tensor, up_by_row: bool,
    slots: Tensor, ranks: Tensor,
) -> Tensor:  # fmt: skip
    return continued(sums(x, weight, True, None, torch.float32), bias, dtype, z, up, up_by_row, slots, ranks)


def adapted_grouped_linear(
    rows: Tensor, weight: Tensor, by_row: bool, offsets: Tensor, z: Tensor, up: Tensor, up_by_row: bool, slots: Tensor,
    ranks: Tensor,
) -> Tensor:  # fmt: skip
    base = sums(_narrowed(rows, weight), weight, by_row, offsets, torch.float32)
    return continued(base, None, rows.dtype, z, up, up_by_row, slots, ranks)


def grouped_linear(rows: Tensor, weight: Tensor, by_row: bool, offsets: Tensor) -> Tensor:
    return sums(_narrowed(rows, weight), weight, by_row, offsets, rows.dtype)


def _narrowed(rows: Tensor, weight: Tensor) -> Tensor:
    """Wider rows than the weight are multiplied in its type: they hold its numbers, or are gradients."""
    return rows.to(weight.dtype) if weight.dtype.itemsize < rows.dtype.itemsize else rows


PRODUCTS = Products(products.gradient, grouped_linear, grouped.weight_gradient)
