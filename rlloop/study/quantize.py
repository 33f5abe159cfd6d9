"""Rounding weights and activations to the narrow types that engines serve in, and back: quantise-dequantise.

Symmetric, to nearest (ties to even), with a scale that maps the largest magnitude of a group to the type's largest:

    tensor    one scale a matrix
    channel   one an output row, the usual choice for weights
    block     one for each `BLOCK` inputs of a row
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

INTEGER_BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4}
BLOCK = 16  # inputs, as NVFP4's

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def quantized(weight: Tensor, kind: str, granularity: str = "channel") -> Tensor:
    """`weight` [..., N, K] as an engine that stores it as `kind` computes with it; the same shape and dtype.

    fp8 is e4m3. fp4 is e2m1; in blocks it is NVFP4, whose block scales are e4m3 themselves under one scale a matrix.
    Scales are float32 otherwise. bf16 has no scale, so no granularity.
    """
    wide = weight.float()
    if kind == "bf16":
        return wide.bfloat16().to(weight.dtype)
    inputs = wide.shape[-1]
    if granularity == "block":
        grouped = F.pad(wide, (0, -inputs % BLOCK)).unflatten(-1, (-1, BLOCK))  # [..., N, blocks, BLOCK]
        largest = grouped.abs().amax(-1, keepdim=True)
    else:
        grouped = wide
        largest = wide.abs().amax((-2, -1) if granularity == "tensor" else -1, keepdim=True)
    scale = largest / _largest(kind)
    if kind == "fp4" and granularity == "block":
        whole = _not_zero(wide.abs().amax((-2, -1), keepdim=True)[..., None] / (_largest("fp4") * E4M3_MAX))
        scale = e4m3(scale / whole) * whole
    scale = _not_zero(scale)
    rounded = _round(grouped / scale, kind) * scale
    return (rounded.flatten(-2)[..., :inputs] if granularity == "block" else rounded).to(weight.dtype)


def rounded_activation(x: Tensor, kind: str) -> Tensor:
    """`x` [..., D] as an engine keeps it: bf16, fp8 (e4m3) under one scale a token, or a token's NVFP4."""
    if kind == "bf16":
        return x.bfloat16().to(x.dtype)
    if kind == "fp4":
        return quantized(x[..., None, :], "fp4", "block")[..., 0, :]
    values, scale = e4m3_rows(x)
    return (values.float() * scale).to(x.dtype)


def e4m3_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [..., K] as e4m3 numbers of the same shape, and the float32 scale of each row [..., 1]."""
    wide = x.float()
    scale = _not_zero(wide.abs().amax(-1, keepdim=True) / E4M3_MAX)
    return (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def e4m3(x: Tensor) -> Tensor:
    """`x` as an e4m3 number without a scale, in its own type: to nearest, no further than the largest."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def _largest(kind: str) -> float:
    if kind in INTEGER_BITS:
        return 2.0 ** (INTEGER_BITS[kind] - 1) - 1
    return {"fp8": E4M3_MAX, "fp4": E2M1_MAX}[kind]


def _round(scaled: Tensor, kind: str) -> Tensor:
    if kind in INTEGER_BITS:
        return scaled.round().clamp(-_largest(kind), _largest(kind))
    return e4m3(scaled) if kind == "fp8" else _e2m1(scaled)


def _e2m1(x: Tensor) -> Tensor:
    """0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their negatives. Ties go to the even multiple of a step: to the even code."""
    size = x.abs()
    step = 0.5 + 0.5 * (size >= 2).float() + (size >= 4).float()
    return ((x / step).round() * step).clamp(-E2M1_MAX, E2M1_MAX)


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)
