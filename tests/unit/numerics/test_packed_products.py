"""Products by packed weights: the arithmetic that unpacks int4, and kernels for GPUs in Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from rlloop.numerics.ops import ops_for
from rlloop.numerics.packed import FP8, INT4, MXFP4, NVFP4, PackedWeight, Packing
from rlloop.numerics.profile import NumericsProfile

interpreted = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="kernels are not interpreted")
OPS = ops_for(NumericsProfile())


def rounded(exact: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16s to float64 numbers, ties to even: of their own integers, not by PyTorch."""
    size = np.abs(exact)
    exponent = np.maximum(np.frexp(np.where(np.isfinite(size), size, 1.0))[1] - 8, -133)  # of the last bit
    units = np.rint(np.ldexp(size, -exponent))
    nearest = np.where(np.isfinite(size), np.ldexp(units, exponent), size)
    nearest = np.where(nearest >= 2.0**128, np.inf, nearest).astype(np.float32)  # exact
    return (np.where(np.signbit(exact), -nearest, nearest).view(np.uint32) >> 16).astype(np.uint16)


def test_int4_is_unpacked_exactly_by_arithmetic_of_bfloat16():
    """What `triton.packed.UNPACK` does, for every code in both places of a byte and every scale."""
    scales = np.arange(1 << 16, dtype=np.uint32)
    values = (scales << 16).view(np.float32)
    finite = np.isfinite(values)
    for code in range(16):
        byte = np.uint32(code | code << 4)
        pair = byte * np.uint32(0x1001) & np.uint32(0x000F000F) | np.uint32(0x43004300)
        assert pair >> 16 == pair & 0xFFFF
        magic = np.array([pair << 16], np.uint32).view(np.float32)[0]
        assert magic == 128 + code
        q = np.float64(magic) - 136  # fma(magic, 1, -136) of a tie is +0, and the others are bfloat16s
        assert q == code - 8
        assert q or not np.signbit(q)
        with np.errstate(invalid="ignore"):
            product = q * values.astype(np.float64)  # and fma's -0 changes nothing
        contract = (torch.tensor(float(code - 8)) * torch.from_numpy(values)).bfloat16()
        bits = contract.view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(rounded(product[finite]), bits[finite])
        assert np.array_equal(np.isnan(product), contract.isnan().numpy())
        assert np.array_equal(product[np.isinf(values)], contract.double().numpy()[np.isinf(values)], equal_nan=True)


def packed(packing: Packing, *shape: int) -> PackedWeight:
    """A random weight, [..., N, K]."""
    generator = torch.Generator().manual_seed(len(shape))
    *rows, width = shape
    each = torch.randint(-(2**31), 2**31 - 1, (*rows, width * (8 if packing is FP8 else 4) // 32), generator=generator)
    codes = each.int().view(packing.codes)
    scales = torch.randn(*rows, -(-width // packing.group), generator=generator) / 16
    if packing is FP8:
        codes = (torch.randn(*rows, width, generator=generator) * 3).to(torch.float8_e4m3fn)
    if packing is MXFP4:
        scales = torch.randint(118, 126, scales.shape, generator=generator, dtype=torch.uint8)
    scale = torch.full((*rows, 1), 0.3) if packing is NVFP4 else None
    return PackedWeight(codes, scales.to(packing.scales), packing, tensor_scale=scale)


@interpreted
@pytest.mark.parametrize("packing", [INT4, MXFP4, NVFP4, FP8], ids=["int4", "mxfp4", "nvfp4", "fp8"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@torch.no_grad()
def test_experts_have_the_bits_of_plain_ones(packing, tokens):
    up, down = packed(packing, 4, 128, 192), packed(packing, 4, 192, 64)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 192, generator=generator).bfloat16()
    chosen = torch.rand(tokens, 4, generator=generator).topk(2).indices
    made, plain = (OPS.experts(x, *each, chosen) for each in ((up, down), (up.dequantised(), down.dequantised())))
    assert torch.equal(made.view(torch.int16), plain.view(torch.int16))
    assert made.any()


@interpreted
@pytest.mark.parametrize("width", [64, 96, 192, 256])
@torch.no_grad()
def test_int4_products_have_the_bits_of_plain_ones(width):
    weight = packed(INT4, 100, width)
    for rows in (1, 17, 40):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
        assert torch.equal(OPS.logits(x, weight), OPS.logits(x, weight.dequantised()))
