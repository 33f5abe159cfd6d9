"""The contracts' operations for CPU tensors, as opaque torch operators with explicit gradients.

Shapes, meaning and signatures are those of `rlloop.numerics.ops.Ops`. Forwards are our kernels, in float32 with one
rounding to the tensors' type. Backwards need only be the same from run to run, so their matrix products are torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.cpu import attention as attention_kernels
from rlloop.numerics.cpu import elementwise
from rlloop.numerics.cpu import linear as linear_kernels
from rlloop.numerics.cpu.jit import flat
from rlloop.numerics.layout import AttentionLayout

ROWS_IN_LANES = 64  # below so many rows of x, they are the lanes and the weight is broadcast: no weight is repacked
CHUNK = 96  # rows of a task of the matrix product
ELEMENTS = 1 << 14  # of a task of an elementwise kernel

_library = torch.library.Library("rlloop", "FRAGMENT")


def _operator(schema: str, cpu: Any, fake: Any, backward: Any = None, setup: Any = None) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"rlloop::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"rlloop::{name}", backward, setup_context=setup, lib=_library)
    return getattr(torch.ops.rlloop, name).default


def _product(x: Tensor, weight: Tensor) -> Tensor:
    (rows, width), outputs = x.shape, len(weight)
    out = torch.empty(rows, outputs, dtype=torch.float32)
    if rows == 0:
        return out
    source, matrix = flat(x.contiguous()), flat(weight.contiguous())
    if rows >= ROWS_IN_LANES:
        linear_kernels.product(matrix, outputs, _wide(source), rows, width, flat(out), 1, outputs, CHUNK)
    else:
        linear_kernels.product(source, rows, matrix, outputs, width, flat(out), outputs, 1, CHUNK)
    return out


def _wide(array: np.ndarray) -> np.ndarray:
    """Float32: each row is broadcast many times, and widened once."""
    if array.dtype == np.float32:
        return array
    wide = np.empty(len(array), np.float32)
    linear_kernels.widen(array, wide, ELEMENTS)
    return wide


def _linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = _product(x, weight)
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, *bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bool(bias) and bias[0] is not None


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wide = grad.float()
    grad_x = (wide @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
    grad_weight = (wide.t() @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
    grad_bias = wide.sum(0).to(weight.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return grad_x, grad_weight, grad_bias


_linear = _operator(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _linear_cpu,
    lambda x, weight, bias: x.new_empty(len(x), len(weight)),
    _linear_backward,
    _linear_setup,
)
_linear_float32 = _operator(
    "linear_float32(Tensor x, Tensor weight) -> Tensor",
    _product,
    lambda x, weight: x.new_empty(len(x), len(weight), dtype=torch.float32),
    lambda ctx, grad: _linear_backward(ctx, grad)[:2],
    _linear_setup,
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _linear(x, weight, bias)


def linear_out_float32(x: Tensor, weight: Tensor) -> Tensor:
    """The float32 sums themselves, not rounded to the type of x: logits. [T, K], [N, K] -> [T, N] float32."""
    return _linear_float32(x, weight)


def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    width, x = x.shape[-1], x.contiguous()
    rows = x.numel() // width
    stream, out = torch.empty_like(x), torch.empty_like(x)
    scales = torch.empty(rows, dtype=torch.float32)
    added, read = (x, x) if residual is None else (residual.contiguous(), stream)
    elementwise.rms_norm(
        flat(x), flat(added), flat(weight), np.float32(eps), residual is not None, flat(read), flat(out), flat(scales),
        width, max(1, ELEMENTS // width),
    )  # fmt: skip
    return out, stream if residual is not None else x.clone(), scales


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, weight, _, residual = inputs
    _, stream, scales = output
    ctx.save_for_backward(stream, weight, scales)
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(scales)


def _rms_norm_backward(ctx: Any, grad_out: Tensor, grad_stream: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    stream, weight, scales = ctx.saved_tensors
    scale = scales.view(*stream.shape[:-1], 1)
    normed = stream.float() * scale
    wide = grad_out.float()
    grad_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
    inner = wide * weight.float()
    grad = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    grad = (grad + grad_stream.float()).to(stream.dtype)
    return grad, grad_weight, None, grad if ctx.has_residual else None


_rms_norm = _operator(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual) -> (Tensor, Tensor, Tensor)",
    _rms_norm_cpu,
    lambda x, weight, eps, residual: (
        torch.empty_like(x), torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    ),
    _rms_norm_backward,
    _rms_norm_setup,
)  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    out, stream, _ = _rms_norm(x, weight, eps, residual)
    return out, stream


def _silu_mul_cpu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    elementwise.silu_mul(flat(gate), flat(up), flat(out), ELEMENTS)
    return out


def _silu_mul_backward_cpu(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    elementwise.silu_mul_backward(flat(gate), flat(up), flat(grad), flat(grad_gate), flat(grad_up), ELEMENTS)
    return grad_gate, grad_up


_silu_mul_gradients = _operator(
    "silu_mul_backward(Tensor gate, Tensor up, Tensor grad) -> (Tensor, Tensor)",
    _silu_mul_backward_cpu,
    lambda gate, up, grad: (torch.empty_like(gate), torch.empty_like(up)),
)
_silu_mul = _operator(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    _silu_mul_cpu,
    lambda gate, up: torch.empty_like(gate),
    lambda ctx, grad: _silu_mul_gradients(*ctx.saved_tensors, grad),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _silu_mul(gate, up)


def _rope_cpu(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _, heads, width = x.shape
    elementwise.rope(
        flat(x), flat(positions), flat(cos), flat(sin), np.float32(sign), flat(out), heads, width // 2,
        max(1, ELEMENTS // (heads * width)),
    )  # fmt: skip
    return out


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *tables, ctx.sign = inputs
    ctx.save_for_backward(*tables)


def _rope_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _rope(grad, *ctx.saved_tensors, -ctx.sign), None, None, None, None


_rope = _operator(
    "rope(Tensor x, Tensor positions, Tensor cos, Tensor sin, float sign) -> Tensor",
    _rope_cpu,
    lambda x, positions, cos, sin, sign: torch.empty_like(x),
    _rope_backward,
    _rope_setup,
)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rope(x, positions, cos, sin, 1.0)


def _attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, sequences: Tensor, positions: Tensor, block_start: Tensor,
    block_size: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, heads, width = q.shape
    _, groups, v_width = v.shape
    out, lse = q.new_empty(tokens, heads, v_width), torch.empty(tokens, heads, dtype=torch.float32)
    rows = np.arange(tokens)
    attention_kernels.forward(
        flat(q.contiguous()), flat(k.contiguous()), flat(v.contiguous()), rows, flat(sequences), flat(positions),
        flat(block_start.contiguous()), block_size, block_start.shape[1], heads, groups, width, v_width,
        np.float32(scale), flat(out), flat(lse), min(64, tokens * groups),
    )  # fmt: skip
    return out, lse


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, starts, _, _, _, _, ctx.scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, starts, out, lse)
    ctx.mark_non_differentiable(lse)


def _attention_backward_cpu(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = [tensor.float().contiguous() for tensor in (q, k, v, out, lse, grad)]
    gradients = [torch.zeros_like(tensor) for tensor in wide[:3]]
    attention_kernels.backward(
        *map(flat, wide), flat(starts), q.shape[1], k.shape[1], q.shape[2], v.shape[2], np.float32(scale),
        *map(flat, gradients),
    )  # fmt: skip
    return gradients[0].to(q.dtype), gradients[1].to(k.dtype), gradients[2].to(v.dtype)


_attention_gradients = _operator(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor out, Tensor lse, Tensor grad, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _attention_backward_cpu,
    lambda q, k, v, starts, out, lse, grad, scale: tuple(map(torch.empty_like, (q, k, v))),
)


def _attention_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_attention_gradients(*ctx.saved_tensors, grad, ctx.scale), None, None, None, None, None, None


_attention = _operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor sequences, Tensor positions, Tensor block_start,"
    " int block_size, float scale) -> (Tensor, Tensor)",
    _attention_cpu,
    lambda q, k, v, starts, sequences, positions, block_start, block_size, scale: (
        q.new_empty(len(q), q.shape[1], v.shape[2]), q.new_empty(len(q), q.shape[1], dtype=torch.float32)
    ),
    _attention_backward,
    _attention_setup,
)  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    if not layout.contiguous and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("attention over a paged cache has no gradient; train with AttentionLayout.of_sequences")
    return _attention(
        q, k, v, layout.query_start, layout.sequences, layout.positions, layout.block_start, layout.block_size, scale
    )[0]
