"""BLAKE3 of tensors' bytes on the device (the BLAKE3 paper, O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020).

A lane hashes a chunk of 1,024 bytes; then pairs of nodes are joined, a level of all tensors' trees at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import cdiv

_LANES = 64
_BYTES = 1024  # of a chunk


@triton.jit
def _initial(WORD: tl.constexpr, LANES: tl.constexpr):
    words: tl.constexpr = (
        0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
    )  # fmt: skip
    return tl.full((LANES,), words[WORD], tl.uint32)


@triton.jit
def _turned(x, BY: tl.constexpr):
    return (x >> BY) | (x << (32 - BY))


@triton.jit
def _mix(a, b, c, d, x, y):
    a = a + b + x
    d = _turned(d ^ a, 16)
    c = c + d
    b = _turned(b ^ c, 12)
    a = a + b + y
    d = _turned(d ^ a, 8)
    c = c + d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _round(v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, va, vb, vc, vd, ve, vf,
           m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, ma, mb, mc, md, me, mf):  # fmt: skip
    v0, v4, v8, vc = _mix(v0, v4, v8, vc, m0, m1)
    v1, v5, v9, vd = _mix(v1, v5, v9, vd, m2, m3)
    v2, v6, va, ve = _mix(v2, v6, va, ve, m4, m5)
    v3, v7, vb, vf = _mix(v3, v7, vb, vf, m6, m7)
    v0, v5, va, vf = _mix(v0, v5, va, vf, m8, m9)
    v1, v6, vb, vc = _mix(v1, v6, vb, vc, ma, mb)
    v2, v7, v8, vd = _mix(v2, v7, v8, vd, mc, md)
    v3, v4, v9, ve = _mix(v3, v4, v9, ve, me, mf)
    return v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, va, vb, vc, vd, ve, vf


@triton.jit
def _compress(h0, h1, h2, h3, h4, h5, h6, h7, m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, ma, mb, mc, md, me, mf,
              low, high, length, flags, LANES: tl.constexpr):  # fmt: skip
    """The first eight words of the compression function."""
    v0, v1, v2, v3, v4, v5, v6, v7 = h0, h1, h2, h3, h4, h5, h6, h7
    v8, v9, va, vb = _initial(0, LANES), _initial(1, LANES), _initial(2, LANES), _initial(3, LANES)
    vc, vd, ve, vf = low, high, length, flags
    for _turn in tl.static_range(7):
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, va, vb, vc, vd, ve, vf = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, va, vb, vc, vd, ve, vf,
            m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, ma, mb, mc, md, me, mf,
        )  # fmt: skip
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, ma, mb, mc, md, me, mf = (
            m2, m6, m3, ma, m7, m0, m4, md, m1, mb, mc, m5, m9, me, mf, m8,
        )  # fmt: skip
    return v0 ^ v8, v1 ^ v9, v2 ^ va, v3 ^ vb, v4 ^ vc, v5 ^ vd, v6 ^ ve, v7 ^ vf


@triton.jit
def _word(words, at, inside):
    return tl.load(words + at, inside, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _keep(nodes, at, h0, h1, h2, h3, h4, h5, h6, h7, inside):
    tl.store(nodes + at, h0.to(tl.int32, bitcast=True), inside)
    tl.store(nodes + at + 1, h1.to(tl.int32, bitcast=True), inside)
    tl.store(nodes + at + 2, h2.to(tl.int32, bitcast=True), inside)
    tl.store(nodes + at + 3, h3.to(tl.int32, bitcast=True), inside)
    tl.store(nodes + at + 4, h4.to(tl.int32, bitcast=True), inside)
    tl.store(nodes + at + 5, h5.to(tl.int32, bitcast=True), inside)
    tl.store(nodes + at + 6, h6.to(tl.int32, bitcast=True), inside)
    tl.store(nodes + at + 7, h7.to(tl.int32, bitcast=True), inside)


@triton.jit(do_not_specialize=["size", "chunks"])
def _chunks(words, nodes, size, chunks, LANES: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    here, end = chunk < chunks, (size + 3) // 4
    h0, h1, h2, h3 = _initial(0, LANES), _initial(1, LANES), _initial(2, LANES), _initial(3, LANES)
    h4, h5, h6, h7 = _initial(4, LANES), _initial(5, LANES), _initial(6, LANES), _initial(7, LANES)
    low, high = chunk.to(tl.uint32), (chunk >> 32).to(tl.uint32)
    for block in range(16):
        left = size - chunk * 1024 - block * 64  # bytes of the tensor from this block on
        active = here & ((left > 0) | (block == 0))
        at = chunk * 256 + block * 16
        last = (left <= 64) | (block == 15)
        flags = tl.where(last, 2, 0) + tl.where(block == 0, 1, 0) + tl.where(last & (chunks == 1), 8, 0)
        length = tl.minimum(tl.maximum(left, 0), 64).to(tl.uint32)
        g0, g1, g2, g3, g4, g5, g6, g7 = _compress(
            h0, h1, h2, h3, h4, h5, h6, h7,
            _word(words, at + 0, active & (at + 0 < end)), _word(words, at + 1, active & (at + 1 < end)),
            _word(words, at + 2, active & (at + 2 < end)), _word(words, at + 3, active & (at + 3 < end)),
            _word(words, at + 4, active & (at + 4 < end)), _word(words, at + 5, active & (at + 5 < end)),
            _word(words, at + 6, active & (at + 6 < end)), _word(words, at + 7, active & (at + 7 < end)),
            _word(words, at + 8, active & (at + 8 < end)), _word(words, at + 9, active & (at + 9 < end)),
            _word(words, at + 10, active & (at + 10 < end)), _word(words, at + 11, active & (at + 11 < end)),
            _word(words, at + 12, active & (at + 12 < end)), _word(words, at + 13, active & (at + 13 < end)),
            _word(words, at + 14, active & (at + 14 < end)), _word(words, at + 15, active & (at + 15 < end)),
            low, high, length, flags.to(tl.uint32), LANES,
        )  # fmt: skip
        h0, h1 = tl.where(active, g0, h0), tl.where(active, g1, h1)
        h2, h3 = tl.where(active, g2, h2), tl.where(active, g3, h3)
        h4, h5 = tl.where(active, g4, h4), tl.where(active, g5, h5)
        h6, h7 = tl.where(active, g6, h6), tl.where(active, g7, h7)
    _keep(nodes, chunk * 8, h0, h1, h2, h3, h4, h5, h6, h7, here)


@triton.jit(do_not_specialize=["count"])
def _parents(nodes, lefts, kinds, out, count, LANES: tl.constexpr):
    """`kinds`: 0 a node without a partner, which goes up as it is; 4 a parent; 12 a root."""
    one = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = one < count
    at, kind = tl.load(lefts + one, inside, 0) * 8, tl.load(kinds + one, inside, 0)
    pair = inside & (kind != 0)
    a0, a1, a2, a3 = (
        _word(nodes, at, inside),
        _word(nodes, at + 1, inside),
        _word(nodes, at + 2, inside),
        _word(nodes, at + 3, inside),
    )
    a4, a5, a6, a7 = (
        _word(nodes, at + 4, inside),
        _word(nodes, at + 5, inside),
        _word(nodes, at + 6, inside),
        _word(nodes, at + 7, inside),
    )
    zero = tl.zeros((LANES,), tl.uint32)
    h0, h1, h2, h3, h4, h5, h6, h7 = _compress(
        _initial(0, LANES), _initial(1, LANES), _initial(2, LANES), _initial(3, LANES),
        _initial(4, LANES), _initial(5, LANES), _initial(6, LANES), _initial(7, LANES),
        a0, a1, a2, a3, a4, a5, a6, a7,
        _word(nodes, at + 8, pair), _word(nodes, at + 9, pair),
        _word(nodes, at + 10, pair), _word(nodes, at + 11, pair),
        _word(nodes, at + 12, pair), _word(nodes, at + 13, pair),
        _word(nodes, at + 14, pair), _word(nodes, at + 15, pair),
        zero, zero, zero + 64, kind.to(tl.uint32), LANES,
    )  # fmt: skip
    h0, h1, h2, h3 = tl.where(pair, h0, a0), tl.where(pair, h1, a1), tl.where(pair, h2, a2), tl.where(pair, h3, a3)
    h4, h5, h6, h7 = tl.where(pair, h4, a4), tl.where(pair, h5, a5), tl.where(pair, h6, a6), tl.where(pair, h7, a7)
    _keep(out, one * 8, h0, h1, h2, h3, h4, h5, h6, h7, inside)


def _words(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor's bytes as int32, and their number: its own memory where that is possible."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    size = raw.numel()
    if size % 4 or raw.data_ptr() % 4 or size == 0:
        padded = torch.zeros(max(4, cdiv(size, 4) * 4), dtype=torch.uint8, device=raw.device)
        padded[:size] = raw
        raw = padded
    return raw.view(torch.int32), size


def digests(tensors: Sequence[Tensor]) -> list[bytes]:
    """blake3 of each tensor's bytes, 32 bytes each. All tensors are on one device."""
    if not tensors:
        return []
    device = tensors[0].device
    counts = [max(1, cdiv(tensor.numel() * tensor.element_size(), _BYTES)) for tensor in tensors]
    nodes, start = torch.empty(sum(counts), 8, dtype=torch.int32, device=device), 0
    for tensor, count in zip(tensors, counts, strict=True):
        words, size = _words(tensor)
        _chunks[(cdiv(count, _LANES),)](words, nodes[start:], size, count, LANES=_LANES, num_warps=2)
        start += count
    each = torch.tensor(counts, device=device)
    for _ in range((max(counts) - 1).bit_length()):
        above, starts = (each + 1) // 2, each.cumsum(0) - each
        counts = [(count + 1) // 2 for count in counts]
        total = sum(counts)
        tree = torch.repeat_interleave(torch.arange(len(each), device=device), above, output_size=total)
        index = 2 * (torch.arange(total, device=device) - (above.cumsum(0) - above)[tree])
        kinds = (index + 1 < each[tree]).int() * torch.where(each == 2, 12, 4)[tree].int()
        out = torch.empty(total, 8, dtype=torch.int32, device=device)
        _parents[(cdiv(total, _LANES),)](nodes, starts[tree] + index, kinds, out, total, LANES=_LANES, num_warps=2)
        nodes, each = out, above
    plain = nodes.cpu().numpy().tobytes()
    return [plain[at : at + 32] for at in range(0, len(plain), 32)]
