"""The contracts' operations as opaque torch operators with explicit gradients, and their kernels for CPU tensors.

Shapes, meaning and signatures are those of `rlloop.numerics.ops.Ops`. Forwards are our kernels, in float32 with one
rounding to the tensors' type; so are the backwards, whose bits depend on no thread either. CUDA tensors go to the
kernels of `rlloop.numerics.kernels.triton.contract`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu import attention as attention_kernels
from rlloop.numerics.kernels.cpu import attention_backward as attention_backward_kernels
from rlloop.numerics.kernels.cpu import elementwise
from rlloop.numerics.kernels.cpu import linear as linear_kernels
from rlloop.numerics.kernels.cpu.jit import flat, threads_for
from rlloop.numerics.kernels.cpu.linear import FORWARD, GRADIENT
from rlloop.numerics.layout import WHOLE, AttentionLayout, Reach

_library = torch.library.Library("rlloop", "FRAGMENT")


def on_cuda(name: str) -> Callable[..., Any]:
    """An operator's kernel for CUDA tensors. Triton is imported when the first one comes: few machines have it."""

    def call(*args: Any) -> Any:
        from rlloop.numerics.kernels.triton import contract

        return getattr(contract, name)(*args)

    return call


def _operator(schema: str, cpu: Any, fake: Any, backward: Any = None, setup: Any = None) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, cpu, "CPU")
    _library.impl(name, on_cuda(name), "CUDA")
    torch.library.register_fake(f"rlloop::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"rlloop::{name}", backward, setup_context=setup, lib=_library)
    return getattr(torch.ops.rlloop, name).default


def product_cpu(
    rows: Tensor, by_row: bool, lanes: Tensor, lanes_by_row: bool, dtype: torch.dtype, bias: Tensor | None = None,
    segment: np.int64 = GRADIENT,
) -> Tensor:  # fmt: skip
    """Each row of `rows` times each row of `lanes`, or their columns where not by row. [M, K], [N, K] -> [M, N]."""
    (num_rows, width), columns = rows.shape if by_row else rows.T.shape, lanes.shape[0 if lanes_by_row else 1]
    if rows.numel() == 0:
        return torch.zeros(num_rows, columns, dtype=dtype)
    out, matrix = torch.empty(num_rows, columns, dtype=dtype), flat(lanes.contiguous())
    threads = threads_for(num_rows * columns * width)
    tiles, chunk = linear_kernels.plan(num_rows, columns, width, threads, by_row, lanes_by_row)
    linear_kernels.product(
        threads, matrix, lanes_by_row, flat(rows.float().contiguous()), by_row, matrix if bias is None else flat(bias),
        bias is not None, flat(out), num_rows, columns, width, segment, tiles, chunk,
    )  # fmt: skip
    return out


_product = _operator(
    "product(Tensor rows, bool by_row, Tensor lanes, bool lanes_by_row, ScalarType dtype) -> Tensor",
    product_cpu,
    lambda rows, by_row, lanes, lanes_by_row, dtype: rows.new_empty(
        rows.shape[0 if by_row else 1], lanes.shape[0 if lanes_by_row else 1], dtype=dtype
    ),
)


def sum_of_rows(x: Tensor) -> Tensor:
    """[T, N] -> [N] float32, by the product with ones; PyTorch's own order depends on threads. For CPU tensors."""
    return product_cpu(torch.ones(1, len(x)), True, x, False, torch.float32)[0]


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
    grad_x = _product(grad, True, weight, False, x.dtype) if needs[0] else None
    grad_weight = _product(grad, False, x, False, weight.dtype) if needs[1] else None
    if len(needs) == 2:
        return grad_x, grad_weight
    ones = torch.ones(1, len(grad), device=grad.device)
    return grad_x, grad_weight, _product(ones, True, grad, False, weight.dtype)[0] if needs[2] else None


_linear = _operator(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, bias: product_cpu(x, True, weight, True, x.dtype, bias, FORWARD),
    lambda x, weight, bias: x.new_empty(len(x), len(weight)),
    _linear_backward,
    _linear_setup,
)
_linear_float32 = _operator(
    "linear_float32(Tensor x, Tensor weight) -> Tensor",
    lambda x, weight: product_cpu(x, True, weight, True, torch.float32, None, FORWARD),
    lambda x, weight: x.new_empty(len(x), len(weight), dtype=torch.float32),
    _linear_backward,
    _linear_setup,
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _linear(x, weight, bias)


def linear_out_float32(x: Tensor, weight: Tensor) -> Tensor:
    """The float32 sums themselves, not rounded to the type of x: logits. [T, K], [N, K] -> [T, N] float32."""
    return _linear_float32(x, weight)


def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, x + residual, 1 / rms of each row); the second is empty where there is no residual."""
    width, x = x.shape[-1], x.contiguous()
    out, scales = torch.empty_like(x), torch.empty(x.numel() // width)
    stream, source = x.new_empty(0 if residual is None else x.shape), flat(x)
    added, made = (source, source) if residual is None else (flat(residual.contiguous()), flat(stream))
    elementwise.rms_norm(
        threads_for(4 * len(source)), source, added, flat(weight), np.float32(eps), residual is not None, made,
        flat(out), flat(scales), width,
    )  # fmt: skip
    return out, stream, scales


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, residual = inputs
    _, stream, scales = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(stream if ctx.has_residual else x, weight, scales)
    ctx.set_materialize_grads(False)


def _rms_norm_backward(ctx: Any, grad: Tensor | None, grad_stream: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    stream, weight, scales = ctx.saved_tensors
    if grad is None:
        return grad_stream, None, None, grad_stream
    grad_x, grad_weight = _rms_norm_gradients(stream, weight, scales, grad, grad_stream)
    return grad_x, grad_weight, None, grad_x if ctx.has_residual else None


def _rms_norm_gradients_cpu(
    stream: Tensor, weight: Tensor, scales: Tensor, grad: Tensor, grad_stream: Tensor | None
) -> tuple[Tensor, Tensor]:
    width, stream, grad = stream.shape[-1], stream.contiguous(), grad.contiguous()
    grad_x, parts = torch.empty_like(stream), np.empty((-(-len(scales) // elementwise.ROWS), width), np.float32)
    elementwise.rms_norm_backward(
        threads_for(8 * stream.numel()), flat(stream), flat(weight), flat(scales), flat(grad),
        flat(grad if grad_stream is None else grad_stream.contiguous()), grad_stream is not None, flat(grad_x),
        parts.reshape(-1), width,
    )  # fmt: skip
    return grad_x, sum_of_rows(torch.from_numpy(parts)).to(weight.dtype)


_rms_norm_gradients = _operator(
    "rms_norm_backward(Tensor stream, Tensor weight, Tensor scales, Tensor grad, Tensor? grad_stream)"
    " -> (Tensor, Tensor)",
    _rms_norm_gradients_cpu,
    lambda stream, weight, scales, grad, grad_stream: (torch.empty_like(stream), torch.empty_like(weight)),
)
_rms_norm = _operator(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual) -> (Tensor, Tensor, Tensor)",
    _rms_norm_cpu,
    lambda x, weight, eps, residual: (
        torch.empty_like(x), x.new_empty(0 if residual is None else x.shape),
        x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32),
    ),
    _rms_norm_backward,
    _rms_norm_setup,
)  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    out, stream, _ = _rms_norm(x, weight, eps, residual)
    return out, x if residual is None else stream


def _silu_mul_cpu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    elementwise.silu_mul(threads_for(32 * out.numel()), flat(gate), flat(up), flat(out))
    return out


def _silu_mul_backward_cpu(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    threads = threads_for(32 * gate.numel())
    elementwise.silu_mul_backward(threads, flat(gate), flat(up), flat(grad), flat(grad_gate), flat(grad_up))
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


def _sigmoid_mul_cpu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(up)
    elementwise.sigmoid_mul(threads_for(32 * out.numel()), flat(gate), flat(up), flat(out))
    return out


def sigmoid(x: Tensor) -> Tensor:
    """Of float32. On a CPU, PyTorch's own has other bits at the end of each thread's share of the numbers."""
    return torch.sigmoid(x) if x.is_cuda else _sigmoid_mul_cpu(x, torch.ones_like(x))


def _sigmoid_mul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    gates, wide = sigmoid(gate.float()), grad.float()
    return (wide * up.float() * gates * (1 - gates)).to(gate.dtype), (wide * gates).to(up.dtype)


_sigmoid_mul = _operator(
    "sigmoid_mul(Tensor gate, Tensor up) -> Tensor",
    _sigmoid_mul_cpu,
    lambda gate, up: torch.empty_like(up),
    _sigmoid_mul_backward,
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def sigmoid_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _sigmoid_mul(gate, up)


def _rope_cpu(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _, heads, width = x.shape
    elementwise.rope(
        threads_for(4 * x.numel()), flat(x), flat(positions.contiguous()), flat(cos), flat(sin), np.float32(sign),
        flat(out), heads, width // 2,
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


def value_rows(v: Tensor) -> tuple[np.ndarray, int]:
    """The memory of values [slots, G, D], and how far one row is from the next. Latents are part of wider rows."""
    if v.shape[1] == 1 and v.stride(2) == 1 and v.stride(0) >= v.shape[2] and len(v) > 0:
        return flat(v.detach().as_strided(((len(v) - 1) * v.stride(0) + v.shape[2],), (1,))), v.stride(0)
    return flat(v.contiguous()), v.shape[2]


NO_SINKS = np.empty(0, np.float32)


def _attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, context: Tensor, block_start: Tensor, block_size: int,
    scale: float, split: int = 0, window: int = 0, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, log-sum-exp of the scaled scores [T, H] float32)."""
    (tokens, heads, width), (_, groups, v_width) = q.shape, v.shape
    out, lse = q.new_empty(tokens, heads, v_width), torch.empty(tokens, heads)
    starts, contexts = flat(query_start), flat(context)
    counts = starts[1:] - starts[:-1]
    pairs = int(counts @ (contexts + counts)) * heads  # of a query and a key, about
    threads = threads_for(pairs * (width + v_width))
    attention_kernels.forward(
        threads, flat(q.contiguous()), flat(k.contiguous()), *value_rows(v), starts, contexts,
        flat(block_start.contiguous()), block_start.shape[1], block_size,
        *attention_kernels.plan(counts, heads, groups, threads), heads, groups, width, v_width, np.float32(scale),
        split, window, NO_SINKS if sinks is None else flat(sinks.float()), flat(out), flat(lse),
    )  # fmt: skip
    return out, lse


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, query_start, _, _, _, ctx.scale, *reach = inputs
    _, ctx.window, sinks = reach or (0, 0, None)
    out, lse = output
    ctx.save_for_backward(q, k, v, query_start, out, lse, sinks)
    ctx.mark_non_differentiable(lse)
    ctx.plain = not reach


def _attention_gradients_cpu(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    gradients, starts = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)), flat(query_start)
    (_, heads, width), (_, groups, v_width) = q.shape, v.shape
    counts = starts[1:] - starts[:-1]
    pairs = int(counts @ counts) * heads
    attention_backward_kernels.backward(
        threads_for(pairs * (width + v_width)), *map(flat, (q, k, v, out, lse, grad.contiguous())), starts, heads,
        groups, width, v_width, np.float32(scale), window, *map(flat, gradients),
    )  # fmt: skip
    return gradients


_attention_gradients = _operator(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor query_start, Tensor out, Tensor lse, Tensor grad,"
    " float scale) -> (Tensor, Tensor, Tensor)",
    _attention_gradients_cpu,
    lambda q, k, v, query_start, out, lse, grad, scale: tuple(map(torch.empty_like, (q, k, v))),
)


_attention_gradients_in_reach = _operator(
    "attention_backward_in_reach(Tensor q, Tensor k, Tensor v, Tensor query_start, Tensor out, Tensor lse, Tensor grad,"
    " float scale, int window) -> (Tensor, Tensor, Tensor)",
    _attention_gradients_cpu,
    lambda q, k, v, *_: tuple(map(torch.empty_like, (q, k, v))),
)


def _attention_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    if ctx.plain:
        return *_attention_gradients(*saved, grad, ctx.scale), *[None] * 5
    gradients = _attention_gradients_in_reach(*saved, grad, ctx.scale, ctx.window)
    if sinks is None:
        return *gradients, *[None] * 8
    *_, out, lse = saved  # a sink takes mass from every key, and what that mass would have read is `out`
    lost = torch.exp(sinks.float() - lse) * (grad.float() * out.float()).sum(-1)
    return *gradients, *[None] * 7, -sum_of_rows(lost).to(sinks.dtype)


def attention_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(len(q), q.shape[1], v.shape[2]), q.new_empty(len(q), q.shape[1], dtype=torch.float32)


_attention = _operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor query_start, Tensor context, Tensor block_start, int block_size,"
    " float scale) -> (Tensor, Tensor)",
    _attention_cpu,
    attention_shapes,
    _attention_backward,
    _attention_setup,
)
_attention_in_reach = _operator(
    "attention_in_reach(Tensor q, Tensor k, Tensor v, Tensor query_start, Tensor context, Tensor block_start,"
    " int block_size, float scale, int split, int window, Tensor? sinks) -> (Tensor, Tensor)",
    _attention_cpu,
    attention_shapes,
    _attention_backward,
    _attention_setup,
)


def attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, reach: Reach = WHOLE) -> Tensor:
    if not layout.contiguous and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("attention over a paged cache has no gradient; train with AttentionLayout.of_sequences")
    rest = (layout.query_start, layout.context, layout.block_start, layout.block_size, scale)
    if reach.whole:
        return _attention(q, k, v, *rest)[0]
    split = 0 if reach.window else reach.split
    return _attention_in_reach(q, k, v, *rest, split, reach.window, reach.sinks)[0]
