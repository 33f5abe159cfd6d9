"""Norms, activations and rotary embedding of CPU tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu.compiled import elementwise as kernels
from rlloop.numerics.kernels.cpu.compiled import sparse
from rlloop.numerics.kernels.cpu.compiled.jit import flat, threads_for
from rlloop.numerics.kernels.cpu.products import sum_of_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    width, x = x.shape[-1], x.contiguous()
    out, scales = torch.empty_like(x), torch.empty(x.numel() // width)
    stream, source = x.new_empty(0 if residual is None else x.shape), flat(x)
    added, total = (source, source) if residual is None else (flat(residual.contiguous()), flat(stream))
    kernels.rms_norm(
        threads_for(4 * len(source)), source, added, flat(weight), np.float32(eps), residual is not None, total,
        flat(out), flat(scales), width,
    )  # fmt: skip
    return out, stream, scales


def rms_norm_backward(
    stream: Tensor, weight: Tensor, scales: Tensor, grad: Tensor, grad_stream: Tensor | None
) -> tuple[Tensor, Tensor]:
    width, stream, grad = stream.shape[-1], stream.contiguous(), grad.contiguous()
    grad_x, partial_sums = torch.empty_like(stream), np.empty((-(-len(scales) // kernels.ROWS), width), np.float32)
    kernels.rms_norm_backward(
        threads_for(8 * stream.numel()), flat(stream), flat(weight), flat(scales), flat(grad),
        flat(grad if grad_stream is None else grad_stream.contiguous()), grad_stream is not None, flat(grad_x),
        partial_sums.reshape(-1), width,
    )  # fmt: skip
    return grad_x, sum_of_rows(torch.from_numpy(partial_sums)).to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    out, width = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    wide = [flat(tensor.detach().float().contiguous()) for tensor in (weight, bias)]
    sparse.layer_norm(threads_for(8 * x.numel()), flat(x.contiguous()), *wide, np.float32(eps), flat(out), width)
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    kernels.silu_mul(threads_for(32 * out.numel()), flat(gate), flat(up), flat(out))
    return out


def silu_mul_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    threads = threads_for(32 * gate.numel())
    kernels.silu_mul_backward(threads, flat(gate), flat(up), flat(grad), flat(grad_gate), flat(grad_up))
    return grad_gate, grad_up


def sigmoid_mul(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(up)
    kernels.sigmoid_mul(threads_for(32 * out.numel()), flat(gate), flat(up), flat(out))
    return out


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _, heads, width = x.shape
    kernels.rope(
        threads_for(4 * x.numel()), flat(x), flat(positions.contiguous()), flat(cos), flat(sin), np.float32(sign),
        flat(out), heads, width // 2,
    )  # fmt: skip
    return out
