"""Changed elements as (class, rank within the class, step), and back, on the device: integers only.

A class is a pattern's exponent, its sign aside; a step is a difference in the order of values. A table counts each
class's elements in every block of `BLOCK`; its running sum says how many lie before a block, so a change needs only its
own block to find its rank, or its place. The blocks of a class lie side by side, since PyTorch sums along the last
dimension in parallel, and along any other by one thread for each of its rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import cdiv

BLOCK = 512  # elements
CLASSES = 256
_FOUND = 16  # changes of a program
_COUNTED = 8  # blocks of a program


class Order(NamedTuple):
    """The order of a type's patterns, which lie in signed integers of `bits` bits."""

    bits: int
    floating: bool  # sign and magnitude; False: two's complement
    shift: int  # the class is (pattern without sign) >> shift

    @property
    def mask(self) -> int:
        return (1 << (self.bits - 1)) - 1


class Located(NamedTuple):
    """The n changes of some chunks, by place."""

    keys: Tensor  # [n] int16: chunk * 256 + class
    ranks: Tensor  # [n] int32: elements of the class before it in its chunk
    zigzags: Tensor  # [n] int32, unsigned


@triton.jit
def _class(pattern, MASK: tl.constexpr, SHIFT: tl.constexpr):
    return (pattern.to(tl.int32) & MASK) >> SHIFT


@triton.jit
def _ordered(pattern, BITS: tl.constexpr, FLOATING: tl.constexpr):
    value = pattern.to(tl.int32)  # sign-extended
    if FLOATING:
        value = tl.where(value < 0, ~(value & ((1 << (BITS - 1)) - 1)), value)
    return value


@triton.jit
def _within(value, BITS: tl.constexpr):
    return (value << (32 - BITS)) >> (32 - BITS)


@triton.jit(do_not_specialize=["n"])
def _changed(old, new, counts, n, BLOCK: tl.constexpr, COUNTED: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * COUNTED + tl.arange(0, COUNTED)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < n
    differ = inside & (tl.load(old + at, inside, 0) != tl.load(new + at, inside, 0))
    tl.store(counts + block, tl.sum(differ.to(tl.int32), 1), block * BLOCK < n)


def changed(old: Tensor, new: Tensor) -> Tensor:
    """[blocks] int32: changes in each block. `old` and `new` are flat."""
    blocks = cdiv(len(old), BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=old.device)
    if blocks:
        _changed[(cdiv(blocks, _COUNTED),)](old, new, counts, len(old), BLOCK=BLOCK, COUNTED=_COUNTED, num_warps=8)
    return counts


@triton.jit(do_not_specialize=["n"])
def _list(old, new, before, indices, n, BLOCK: tl.constexpr, COUNTED: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * COUNTED + tl.arange(0, COUNTED)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < n
    differ = inside & (tl.load(old + at, inside, 0) != tl.load(new + at, inside, 0))
    first = tl.load(before + block, block * BLOCK < n, 0)
    rank = first[:, None] + tl.cumsum(differ.to(tl.int32), 1) - 1
    tl.store(indices + rank, at, differ)


def places_of(old: Tensor, new: Tensor, counts: Tensor, count: int) -> Tensor:
    """[count] int64: where flat patterns differ, ascending. `counts` is `changed` of them, and `count` its sum."""
    indices = torch.empty(count, dtype=torch.int64, device=old.device)
    before = counts.cumsum(0) - counts
    _list[(cdiv(len(counts), _COUNTED),)](
        old, new, before, indices, len(old), BLOCK=BLOCK, COUNTED=_COUNTED, num_warps=8
    )
    return indices


@triton.jit
def _classes(patterns, block, n, MASK: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, CLASSES: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    return tl.histogram(_class(tl.load(patterns + at, inside, 0), MASK, SHIFT), CLASSES, inside)


@triton.jit(do_not_specialize=["n"])
def _count(
    patterns, table, n, MASK: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, PER_CHUNK: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Eight blocks, whose counts of a class fill a sector of memory."""
    block = tl.program_id(0).to(tl.int64) * 8
    h0 = _classes(patterns, block, n, MASK, SHIFT, BLOCK, CLASSES)
    h1 = _classes(patterns, block + 1, n, MASK, SHIFT, BLOCK, CLASSES)
    h2 = _classes(patterns, block + 2, n, MASK, SHIFT, BLOCK, CLASSES)
    h3 = _classes(patterns, block + 3, n, MASK, SHIFT, BLOCK, CLASSES)
    h4 = _classes(patterns, block + 4, n, MASK, SHIFT, BLOCK, CLASSES)
    h5 = _classes(patterns, block + 5, n, MASK, SHIFT, BLOCK, CLASSES)
    h6 = _classes(patterns, block + 6, n, MASK, SHIFT, BLOCK, CLASSES)
    h7 = _classes(patterns, block + 7, n, MASK, SHIFT, BLOCK, CLASSES)
    even = tl.join(tl.join(h0, h4), tl.join(h2, h6))
    odd = tl.join(tl.join(h1, h5), tl.join(h3, h7))
    counts = tl.reshape(tl.join(even, odd), (CLASSES, 8))
    first = (block // PER_CHUNK) * CLASSES * PER_CHUNK + block % PER_CHUNK
    to = tl.arange(0, CLASSES)[:, None] * PER_CHUNK + tl.arange(0, 8)[None, :]
    tl.store(table + first + to, counts)


def before_blocks(patterns: Tensor, order: Order, chunk: int) -> Tensor:
    """[chunks, 256, blocks] int32: elements of each class in a chunk's earlier blocks. `patterns` is flat."""
    assert chunk % (8 * BLOCK) == 0, chunk
    chunks, blocks = cdiv(len(patterns), chunk), chunk // BLOCK
    table = torch.empty(chunks, CLASSES, blocks, dtype=torch.int32, device=patterns.device)
    _count[(chunks * blocks // 8,)](
        patterns, table, len(patterns), MASK=order.mask, SHIFT=order.shift, BLOCK=BLOCK, PER_CHUNK=blocks,
        CLASSES=CLASSES, num_warps=4,
    )  # fmt: skip
    return table.cumsum(2, dtype=torch.int32).sub_(table)


@triton.jit(do_not_specialize=["n", "count"])
def _locate(
    old, new, indices, before, keys, ranks, zigzags, n, count, BITS: tl.constexpr, FLOATING: tl.constexpr,
    MASK: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, PER_CHUNK: tl.constexpr, CLASSES: tl.constexpr,
    FOUND: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(0).to(tl.int64) * FOUND + tl.arange(0, FOUND)
    inside = one < count
    index = tl.load(indices + one, inside, 0).to(tl.int32)  # a batch has fewer than 2**31 elements
    block, lane = index // BLOCK, tl.arange(0, BLOCK)
    was = tl.load(old + index, inside, 0)
    which = _class(was, MASK, SHIFT)
    first = lane[None, :] < (index % BLOCK)[:, None]
    others = _class(tl.load(old + ((block * BLOCK)[:, None] + lane[None, :]), first & inside[:, None], 0), MASK, SHIFT)
    earlier = tl.sum((first & (others == which[:, None])).to(tl.int32), 1)
    row = (block // PER_CHUNK) * CLASSES + which
    rank = tl.load(before + row * PER_CHUNK + block % PER_CHUNK, inside, 0) + earlier
    step = _within(_ordered(tl.load(new + index, inside, 0), BITS, FLOATING) - _ordered(was, BITS, FLOATING), BITS)
    tl.store(keys + one, row.to(tl.int16), inside)
    tl.store(ranks + one, rank, inside)
    tl.store(zigzags + one, tl.where(step > 0, 2 * step - 2, -2 * step - 1), inside)


def locate(old: Tensor, new: Tensor, indices: Tensor, before: Tensor, order: Order) -> Located:
    """The changes at `indices`, [n] int64 ascending, of flat patterns; `before` is `before_blocks` of `old`."""
    count = len(indices)
    assert before.numel() < 1 << 31, "places in the table have 32 bits"
    assert before.shape[0] * CLASSES <= 1 << 15, "keys have 16 bits"
    keys = torch.empty(count, dtype=torch.int16, device=old.device)
    ranks, zigzags = (torch.empty(count, dtype=torch.int32, device=old.device) for _ in range(2))
    if count:
        _locate[(cdiv(count, _FOUND),)](
            old, new, indices, before, keys, ranks, zigzags, len(old), count, BITS=order.bits, FLOATING=order.floating,
            MASK=order.mask, SHIFT=order.shift, BLOCK=BLOCK, PER_CHUNK=before.shape[2], CLASSES=CLASSES, FOUND=_FOUND,
            num_warps=4,
        )  # fmt: skip
    return Located(keys, ranks, zigzags)


@triton.jit(do_not_specialize=["n"])
def _close(keys, order, ranks, zigzags, gaps, sorted_zigzags, n, BLOCK: tl.constexpr):
    one = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, later = one < n, (one < n) & (one > 0)
    source = tl.load(order + one, inside, 0)
    rank, previous = tl.load(ranks + source, inside, 0), tl.load(ranks + tl.load(order + one - 1, later, 0), later, 0)
    follows = later & (tl.load(keys + one, inside, 0) == tl.load(keys + one - 1, later, 0))
    tl.store(gaps + one, tl.where(follows, rank - previous - 1, rank), inside)
    tl.store(sorted_zigzags + one, tl.load(zigzags + source, inside, 0), inside)


def gaps_of(located: Located) -> Located:
    """The changes by key, stably, with gaps in place of ranks: elements of the class since its last change."""
    keys, order = torch.sort(located.keys, stable=True)
    gaps, zigzags = torch.empty_like(located.ranks), torch.empty_like(located.zigzags)
    if len(keys):
        _close[(cdiv(len(keys), 1024),)](
            keys, order, located.ranks, located.zigzags, gaps, zigzags, len(keys), BLOCK=1024, num_warps=4
        )
    return Located(keys, gaps, zigzags)


@triton.jit(do_not_specialize=["n", "count"])
def _place(
    old, before, keys, ranks, zigzags, indices, values, n, count, BITS: tl.constexpr, FLOATING: tl.constexpr,
    MASK: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, PER_CHUNK: tl.constexpr, STEPS: tl.constexpr,
    CLASSES: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(0).to(tl.int64) * FOUND + tl.arange(0, FOUND)
    inside = one < count
    key, rank = tl.load(keys + one, inside, 0).to(tl.int64), tl.load(ranks + one, inside, 0)
    which = (key % CLASSES).to(tl.int32)
    low, high = tl.zeros((FOUND,), tl.int64), tl.full((FOUND,), PER_CHUNK - 1, tl.int64)
    for _ in range(STEPS):  # the last block with no more than `rank` before it
        middle = (low + high + 1) // 2
        reached = tl.load(before + key * PER_CHUNK + middle, inside, 0) <= rank
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle - 1)
    rank -= tl.load(before + key * PER_CHUNK + low, inside, 0)
    block, lane = (key // CLASSES) * PER_CHUNK + low, tl.arange(0, BLOCK)
    at = (block * BLOCK)[:, None] + lane[None, :]
    valid = (at < n) & inside[:, None]
    own = ((_class(tl.load(old + at, valid, 0), MASK, SHIFT) == which[:, None]) & valid).to(tl.int32)
    hit = own * (tl.cumsum(own, 1) == rank[:, None] + 1).to(tl.int32)
    there = inside & (tl.sum(hit, 1) == 1)
    index = block * BLOCK + tl.sum(hit * lane[None, :], 1)
    zigzag = tl.load(zigzags + one, inside, 0)
    half = (zigzag >> 1) & 0x7FFFFFFF
    step = tl.where((zigzag & 1) != 0, ~half, half + 1)
    value = _within(_ordered(tl.load(old + index, there, 0), BITS, FLOATING) + step, BITS)
    if FLOATING:
        value = tl.where(value < 0, ~(value & MASK), value)
    tl.store(indices + one, tl.where(there, index, -1), inside)
    tl.store(values + one, value.to(values.dtype.element_ty), inside)


def place(old: Tensor, before: Tensor, located: Located, order: Order) -> tuple[Tensor, Tensor]:
    """Places [n] int64 (−1: there is no such element) and new patterns [n] of changes."""
    count = len(located.keys)
    indices, values = torch.empty(count, dtype=torch.int64, device=old.device), old.new_empty(count)
    if count:
        _place[(cdiv(count, _FOUND),)](
            old, before, *located, indices, values, len(old), count, BITS=order.bits, FLOATING=order.floating,
            MASK=order.mask, SHIFT=order.shift, BLOCK=BLOCK, PER_CHUNK=before.shape[2],
            STEPS=before.shape[2].bit_length(), CLASSES=CLASSES, FOUND=_FOUND, num_warps=4,
        )  # fmt: skip
    return indices, values


@triton.jit(do_not_specialize=["n"])
def _put(addresses, values, n, BLOCK: tl.constexpr):
    one = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = one < n
    value = tl.load(values + one, inside, 0)
    tl.store(tl.load(addresses + one, inside, 0).to(tl.pointer_type(values.dtype.element_ty)), value, inside)


@triton.jit(do_not_specialize=["n"])
def _compare(addresses, values, wrong, n, BLOCK: tl.constexpr):
    one = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = one < n
    held = tl.load(tl.load(addresses + one, inside, 0).to(tl.pointer_type(values.dtype.element_ty)), inside, 0)
    count = tl.sum((inside & (held != tl.load(values + one, inside, 0))).to(tl.int32), 0)
    tl.atomic_add(wrong, count, count > 0)


def put(addresses: Tensor, values: Tensor) -> Tensor:
    """Write [n] values to [n] addresses (int64) of the device. Returns how many do not hold theirs, [1] int32."""
    wrong, n = torch.zeros(1, dtype=torch.int32, device=values.device), len(values)
    if n:
        for kernel, options in ((_put, ()), (_compare, (wrong,))):
            kernel[(cdiv(n, 1024),)](addresses, values, *options, n, BLOCK=1024, num_warps=4)
    return wrong
