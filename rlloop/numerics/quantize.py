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

E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # fp4's magnitudes, by code


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
        scale = _e4m3(scale / whole) * whole
    scale = _not_zero(scale)
    rounded = _round(grouped / scale, kind) * scale
    return (rounded.flatten(-2)[..., :inputs] if granularity == "block" else rounded).to(weight.dtype)


def rounded_activation(x: Tensor, kind: str) -> Tensor:
    """`x` [..., D] as an engine keeps it: bf16, or fp8 (e4m3) under one scale a token."""
    wide = x.float()
    if kind == "bf16":
        return wide.bfloat16().to(x.dtype)
    scale = _not_zero(wide.abs().amax(-1, keepdim=True) / E4M3_MAX)
    return (_e4m3(wide / scale) * scale).to(x.dtype)


def _largest(kind: str) -> float:
    if kind in INTEGER_BITS:
        return 2.0 ** (INTEGER_BITS[kind] - 1) - 1
    return {"fp8": E4M3_MAX, "fp4": E2M1[-1]}[kind]


def _round(scaled: Tensor, kind: str) -> Tensor:
    if kind in INTEGER_BITS:
        return scaled.round().clamp(-_largest(kind), _largest(kind))
    return _e4m3(scaled) if kind == "fp8" else _e2m1(scaled)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _e2m1(x: Tensor) -> Tensor:
    magnitudes = torch.tensor(E2M1, device=x.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    below, above = (torch.bucketize(x.abs(), middles, right=right) for right in (False, True))
    code = torch.where(below % 2 == 0, below, above)  # they differ at a tie only, where the even code has it
    return magnitudes[code] * x.sign()


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)
