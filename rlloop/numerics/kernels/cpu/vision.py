"""Operations of vision towers on CPU tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu.compiled import vision as kernels
from rlloop.numerics.kernels.cpu.compiled.elementwise import ROWS
from rlloop.numerics.kernels.cpu.compiled.jit import flat, threads_for
from rlloop.numerics.kernels.cpu.products import sum_of_rows


def gelu(x: Tensor, tanh: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    (kernels.gelu_tanh if tanh else kernels.gelu_erf)(threads_for(64 * x.numel()), flat(x), flat(out))
    return out


def gelu_backward(x: Tensor, tanh: bool, grad: Tensor) -> Tensor:
    x, grad = x.contiguous(), grad.contiguous()
    grad_x = torch.empty_like(x)
    backward = kernels.gelu_tanh_backward if tanh else kernels.gelu_erf_backward
    backward(threads_for(64 * x.numel()), flat(x), flat(grad), flat(grad_x))
    return grad_x


def layer_norm_backward(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width, x, grad = x.shape[-1], x.contiguous(), grad.contiguous()
    grad_x, blocks = torch.empty_like(x), -(-(x.numel() // width) // ROWS)
    partial_sums = [np.empty((blocks, width), np.float32) for _ in range(2)]
    kernels.layer_norm_backward(
        threads_for(16 * x.numel()), flat(x), flat(weight.detach().float().contiguous()), flat(grad), np.float32(eps),
        flat(grad_x), *(sums.reshape(-1) for sums in partial_sums), width,
    )  # fmt: skip
    of_weight, of_bias = (sum_of_rows(torch.from_numpy(sums)).to(weight.dtype) for sums in partial_sums)
    return grad_x, of_weight, of_bias
