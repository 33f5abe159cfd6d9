"""Parameters that PyTorch's own operations hand to every token, with gradients that sum over tokens as products do.

PyTorch's own sums over tokens are long chains, in bfloat16 where the parameter is, and some depend on threads. On other
devices, and in float64, they stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu.contract import sum_of_rows
from rlloop.numerics.kernels.cpu.mixture import rows_by_rows


def _stays(x: Tensor) -> bool:
    return x.is_cuda or x.dtype == torch.float64


class _EachRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: int) -> Tensor:
        return weight.expand(rows, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return grad.sum(0) if _stays(grad) else sum_of_rows(grad).to(grad.dtype), None


def each_row(weight: Tensor, rows: int) -> Tensor:
    """[N] -> [rows, N]: the weight, as often as there are rows."""
    return _EachRow.apply(weight, rows)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = weight.shape
        return torch.nn.functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,), (grad,) = ctx.saved_tensors, grads
        order = tokens.argsort(stable=True)
        ids, counts = tokens[order].unique_consecutive(return_counts=True)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        sums = rows_by_rows(torch.ones(len(grad), 1), grad[order], offsets.numpy(), grad.dtype)[:, 0]
        return None, grad.new_zeros(ctx.shape).index_copy_(0, ids, sums)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of the weight. [T] int64, [V, D] -> [T, D]."""
    if _stays(weight):
        return torch.nn.functional.embedding(tokens, weight)
    return _Embedding.apply(tokens, weight)
