"""A kernel for one operation, the activation: SiLU by range reduction and a polynomial.

Every step is one elementwise addition, multiplication, division or rounding, which IEEE 754 fixes to the last bit. So
an element's bits depend on that element alone, wherever it stands in a tensor.
"""

import torch
from torch import Tensor

BATCH_INVARIANT = True

LN2 = 0.6931471805599453
COEFFICIENTS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)  # of exp's series, on |r| <= ln 2 / 2


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """up * gate / (1 + exp(-gate)), [T, F] and [T, F] -> [T, F]."""
    wide = gate.float().clamp(-80.0, 80.0)
    return (up.float() * (gate.float() / (1.0 + _exp(-wide)))).to(gate.dtype)


def _exp(x: Tensor) -> Tensor:
    """exp(x) = 2^n exp(r), with n = round(x / ln 2)."""
    n = torch.round(x.detach() * (1 / LN2))
    r = x - n * LN2
    series = torch.zeros_like(r)
    for coefficient in COEFFICIENTS:
        series = series * r + coefficient
    power = ((n.int() + 127) << 23).view(torch.float32)
    return series * power
