"""Parameters read by every token through PyTorch's own operations; their gradients sum over tokens like products'.

On a CPU, PyTorch's own sums over tokens are long chains, in bfloat16 for bfloat16 parameters, and some depend on
threads. PyTorch's sums are kept in float64, and on CUDA, where they are deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.kernels import kernels_for


def _stays(x: Tensor) -> bool:
    return x.dtype == torch.float64 or x.is_cuda


class _EachRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: int) -> Tensor:
        return weight.expand(rows, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        total = grad.sum(0) if _stays(grad) else kernels_for(grad.device).sum_of_rows(grad)
        return total.to(grad.dtype), None


def each_row(weight: Tensor, rows: int) -> Tensor:
    """[N] -> [rows, N]: the weight, repeated for each row."""
    return _EachRow.apply(weight, rows)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocabulary = len(weight)
        if weight.device.type != "cpu" or not len(tokens):  # NumPy's empty arrays have no strides to view as a type
            return torch.nn.functional.embedding(tokens, weight)
        # Copied by NumPy: PyTorch would wake its threads, which takes far longer than to copy a step's rows.
        rows = weight.detach().view(torch.uint8).numpy().take(tokens.numpy(), axis=0)
        return torch.from_numpy(rows).view(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,), (grad,) = ctx.saved_tensors, grads
        return None, kernels_for(grad.device).embedding_backward(grad, tokens, ctx.vocabulary)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of the weight. [T] int64, [V, D] -> [T, D]."""
    if _stays(weight):
        return torch.nn.functional.embedding(tokens, weight)
    return _Embedding.apply(tokens, weight)
