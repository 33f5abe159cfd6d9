"""Products by kernels that multiply 8-bit floats (e4m3), as engines serve in fp8. For engines on a GPU: no gradients.

Weights have a scale an output row and are rounded once a version; what meets them has a scale a row and is rounded at
each call. Sums are the tensor core's own ("fast accumulation", narrower than float32), as in vLLM on Hopper.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlloop.numerics import stock
from rlloop.study.quantize import e4m3_rows

ALIGNED = 16  # inputs and outputs come in multiples of so many


class Fp8(NamedTuple):
    """A weight, or the weights of all experts."""

    values: Tensor  # [..., N, K] e4m3
    scale: Tensor  # [..., N, 1] float32


def fits(weight: Tensor) -> bool:
    return weight.ndim >= 2 and weight.shape[-1] % ALIGNED == 0 and weight.shape[-2] % ALIGNED == 0


def linear(x: Tensor, weight: Fp8, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, rounded to bfloat16. x [T, K], weight [N, K], bias [N] -> [T, N] in the type of x."""
    values, scale = e4m3_rows(x)
    product = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        values, weight.values.T, scale, weight.scale.T, out_dtype=torch.bfloat16, use_fast_accum=True
    ).to(x.dtype)
    return product if bias is None else product + bias


def experts(x: Tensor, up: Fp8, down: Fp8, chosen: Tensor, gated: bool) -> Tensor:
    """`Ops.experts`, one grouped product for all experts. x [T, D], chosen [T, k] -> [T, k, D]"""
    order, ends = stock.by_expert(chosen, len(down.values))
    inner = _grouped(x[order // chosen.shape[1]], up, ends)
    inner = stock.silu_mul(*inner.chunk(2, dim=-1)) if gated else F.relu(inner).square()
    outputs = _grouped(inner, down, ends)
    return torch.empty_like(outputs).index_copy_(0, order, outputs).view(*chosen.shape, -1)


def _grouped(rows: Tensor, weight: Fp8, ends: Tensor) -> Tensor:
    values, scale = e4m3_rows(rows)
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        values, weight.values.mT, scale[:, 0], weight.scale[..., 0], offs=ends, out_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(rows.dtype)  # fmt: skip
