"""Mixture of experts: router, experts, their sum, and products by head, with their kernels for CPU tensors.

Shapes, meaning and signatures are those of `rlloop.numerics.ops.Ops`. CUDA tensors go to
`rlloop.numerics.kernels.triton`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu import routing as kernels
from rlloop.numerics.kernels.cpu.contract import _operator, linear, linear_out_float32, sigmoid_mul, silu_mul
from rlloop.numerics.kernels.cpu.grouped import grouped_product, plan
from rlloop.numerics.kernels.cpu.jit import flat, threads_for
from rlloop.numerics.kernels.cpu.linear import FORWARD, GRADIENT
from rlloop.numerics.routing import Clamped, Routing

NO_BIAS = torch.zeros(0)


def router_logits(x: Tensor, weight: Tensor, exact: bool, bias: Tensor | None = None) -> Tensor:
    logits = linear_out_float32(x, weight) if exact else linear(x, weight, None).float()
    if bias is None:
        return logits
    logits = _AddBias.apply(logits, bias.float()[None], torch.tensor([0, len(x)]))
    return logits if exact else logits.to(x.dtype).float()


# -------------------------------------------------------------------------------------------------------- routing


def _route_cpu(
    logits: Tensor, bias: Tensor, given: Tensor, top_k: int, sigmoid: bool, groups: int, top_groups: int,
    normalise: bool, epsilon: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, count = logits.shape
    scores, weights = torch.empty_like(logits), torch.empty(tokens, top_k)
    chosen = given.to(torch.int64, copy=True) if len(given) else torch.empty(tokens, top_k, dtype=torch.int64)
    kernels.route(
        threads_for(32 * logits.numel()), flat(logits.contiguous()), flat(bias), len(bias) > 0, count, top_k, sigmoid,
        groups, top_groups, normalise, np.float32(epsilon), np.float32(scale), len(given) > 0, flat(scores),
        flat(chosen), flat(weights),
    )  # fmt: skip
    return weights, chosen, scores


def _route_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, _, _, ctx.sigmoid, _, _, ctx.normalise, ctx.epsilon, ctx.scale = inputs
    _, chosen, scores = output
    ctx.save_for_backward(chosen, scores)
    ctx.mark_non_differentiable(chosen)
    ctx.set_materialize_grads(False)


def route_gradient(
    scores: Tensor, chosen: Tensor, grad_weights: Tensor | None, grad_scores: Tensor | None, *, sigmoid: bool,
    normalise: bool, epsilon: float, scale: float,
) -> Tensor:  # fmt: skip
    """Of the logits, from those of the weights and of the scores. The choice itself has none."""
    slopes = torch.zeros_like(scores) if grad_scores is None else grad_scores
    if grad_weights is not None:
        picked, slope = scores.gather(1, chosen), grad_weights * scale
        if normalise:
            total = picked.sum(-1, keepdim=True) + epsilon
            slope = (slope - (slope * picked).sum(-1, keepdim=True) / total) / total
        slopes = slopes.scatter_add(1, chosen, slope)
    if sigmoid:
        return slopes * scores * (1 - scores)
    return scores * (slopes - (slopes * scores).sum(-1, keepdim=True))


def _route_backward(
    ctx: Any, grad_weights: Tensor | None, _: Any, grad_scores: Tensor | None
) -> tuple[Tensor | None, ...]:
    chosen, scores = ctx.saved_tensors
    rule = {"sigmoid": ctx.sigmoid, "normalise": ctx.normalise, "epsilon": ctx.epsilon, "scale": ctx.scale}
    return route_gradient(scores, chosen, grad_weights, grad_scores, **rule), *[None] * 9


_route = _operator(
    "route(Tensor logits, Tensor bias, Tensor given, int top_k, bool sigmoid, int groups, int top_groups,"
    " bool normalise, float epsilon, float scale) -> (Tensor, Tensor, Tensor)",
    _route_cpu,
    lambda logits, bias, given, top_k, *rule: (
        logits.new_empty(len(logits), top_k), logits.new_empty(len(logits), top_k, dtype=torch.int64),
        torch.empty_like(logits),
    ),
    _route_backward,
    _route_setup,
)  # fmt: skip


def route(logits: Tensor, bias: Tensor | None, routing: Routing, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return _route(
        logits, NO_BIAS if bias is None else bias, torch.zeros(0) if given is None else given, routing.top_k,
        routing.score == "sigmoid", routing.groups, routing.top_groups, routing.normalise, routing.epsilon,
        routing.scale,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- grouped products


def _flat_span(weight: Tensor) -> np.ndarray:
    """The memory of [G, A, B] whose matrices are each contiguous, whatever lies between one and the next."""
    length = (weight.shape[0] - 1) * weight.stride(0) + weight.shape[1] * weight.shape[2]
    return flat(weight.detach().as_strided((length,), (1,)))


def _whole_matrices(weight: Tensor) -> Tensor:
    whole = weight.stride(2) == 1 and weight.stride(1) == weight.shape[2] and weight.stride(0) >= weight[0].numel()
    return weight if whole else weight.contiguous()


def _rows_times(rows: Tensor, weight: Tensor, by_row: bool, offsets: np.ndarray, segment: np.int64) -> Tensor:
    """Each group's rows times each row of its matrix, or each column. rows [R, K], weight [G, N, K] -> [R, N]."""
    weight, columns = _whole_matrices(weight), weight.shape[1 if by_row else 2]
    out, width, counts = rows.new_empty(len(rows), columns), rows.shape[1], np.diff(offsets)
    if out.numel():
        first_task, tiles, chunk = plan(counts, columns, True)
        grouped_product(
            threads_for(out.numel() * width), _flat_span(weight), np.arange(len(weight)) * weight.stride(0), by_row,
            flat(rows.float().contiguous()), offsets[:-1] * width, True, flat(out), offsets[:-1] * columns, counts,
            np.full(len(counts), width), first_task, columns, segment, tiles, chunk,
        )  # fmt: skip
    return out


def rows_by_rows(left: Tensor, right: Tensor, offsets: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Sum over each group's rows of left times right: [R, N], [R, K] -> [G, N, K]. Zero where there are no rows."""
    (_, outputs), (_, columns), widths = left.shape, right.shape, np.diff(offsets)
    out = left.new_empty(len(widths), outputs, columns, dtype=dtype)
    counts = np.full(len(widths), outputs)
    first_task, tiles, chunk = plan(counts, columns, False)
    grouped_product(
        threads_for(len(left) * outputs * columns), flat(right.contiguous()), offsets[:-1] * columns, False,
        flat(left.float().contiguous()), offsets[:-1] * outputs, False, flat(out),
        np.arange(len(widths)) * outputs * columns, counts, widths, first_task, columns, GRADIENT, tiles, chunk,
    )  # fmt: skip
    return out


_rows_by_rows_op = _operator(
    "grouped_weight_gradient(Tensor left, Tensor right, Tensor offsets, ScalarType dtype) -> Tensor",
    lambda left, right, offsets, dtype: rows_by_rows(left, right, flat(offsets), dtype),
    lambda left, right, offsets, dtype: left.new_empty(len(offsets) - 1, left.shape[1], right.shape[1], dtype=dtype),
)


def _grouped_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weight, ctx.by_row, offsets = inputs
    ctx.save_for_backward(rows, weight, offsets)


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (rows, weight, offsets), needs = ctx.saved_tensors, ctx.needs_input_grad
    grad_rows = _grouped_rows_gradient(grad, weight, not ctx.by_row, offsets) if needs[0] else None
    left, right = (grad, rows) if ctx.by_row else (rows, grad)
    grad_weight = _rows_by_rows_op(left, right, offsets, weight.dtype) if needs[1] else None
    return grad_rows, grad_weight, None, None


def _rows_shape(rows: Tensor, weight: Tensor, by_row: bool, offsets: Tensor) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[1 if by_row else 2])


_grouped_rows_gradient = _operator(
    "grouped_rows_gradient(Tensor rows, Tensor weight, bool by_row, Tensor offsets) -> Tensor",
    lambda rows, weight, by_row, offsets: _rows_times(rows, weight, by_row, flat(offsets), GRADIENT),
    _rows_shape,
)
_grouped_linear = _operator(
    "grouped_linear(Tensor rows, Tensor weight, bool by_row, Tensor offsets) -> Tensor",
    lambda rows, weight, by_row, offsets: _rows_times(rows, weight, by_row, flat(offsets), FORWARD),
    _rows_shape,
    _grouped_backward,
    _grouped_setup,
)


class _Spread(torch.autograd.Function):
    """Row `order[i] // copies` of x at i: each row `copies` times. Back: the copies' gradients, added in turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        grad = grads[0].index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.unflatten(0, (-1, ctx.copies)).sum(1, dtype=torch.float32).to(grad.dtype)
        return grad, None, None, None


class _AddBias(torch.autograd.Function):
    """Each group's bias [G, N] to its rows [R, N], in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return rows + bias.repeat_interleave(offsets.diff(), dim=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,), grad = ctx.saved_tensors, grads[0].contiguous()
        return grad, _rows_by_rows_op(grad, grad.new_ones(len(grad), 1), offsets, grad.dtype)[..., 0], None


def _biased(rows: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Products with the columns of each group's matrix, and its bias: float32 sums, rounded once."""
    sums = _grouped_linear(rows.float(), weight, False, offsets)
    return _AddBias.apply(sums, bias.float(), offsets).to(rows.dtype)


def _clamped_glu(x: Tensor, rule: Clamped) -> Tensor:
    """In float32, one rounding."""
    gate, up = x[..., ::2].float().clamp(max=rule.limit), x[..., 1::2].float().clamp(-rule.limit, rule.limit)
    return sigmoid_mul(rule.alpha * gate, gate * (up + 1)).to(x.dtype)


def experts(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool, clamped: Clamped | None = None) -> Tensor:
    if x.is_cuda and gated:
        from rlloop.numerics.kernels.triton import experts as on_cuda

        return on_cuda.experts(x, up, down, chosen)
    tokens, top_k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    counts = chosen.flatten().bincount(minlength=len(down))
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    if clamped is not None:
        inner = _biased(_Spread.apply(x, order, inverse, top_k), up, clamped.up_bias, offsets)
        out = _biased(_clamped_glu(inner, clamped), down, clamped.down_bias, offsets)
        return _Spread.apply(out, inverse, order, 1).unflatten(0, (tokens, top_k))
    # No name outlives its use: what is freed at once is memory that the next result takes, without new pages.
    inner = _grouped_linear(_Spread.apply(x, order, inverse, top_k), up, True, offsets)
    inner = silu_mul(*inner.chunk(2, dim=-1)) if gated else inner.relu().square()
    return _Spread.apply(_grouped_linear(inner, down, True, offsets), inverse, order, 1).unflatten(0, (tokens, top_k))


def head_linear(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    if x.is_cuda:
        from rlloop.numerics.kernels.triton import experts as on_cuda

        return on_cuda.head_linear(x, weight, by_row)
    tokens, heads, _ = x.shape
    offsets = torch.arange(heads + 1) * tokens
    out = _grouped_linear(x.transpose(0, 1).flatten(0, 1), weight, by_row, offsets)
    return out.unflatten(0, (heads, tokens)).transpose(0, 1).contiguous()


# ------------------------------------------------------------------------------------------------------------ combine


def _combine_cpu(slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None, each: bool) -> Tensor:
    tokens, top_k, width = slots.shape
    out, source = slots.new_empty(tokens, width), flat(slots.contiguous())
    kernels.combine(
        threads_for(4 * slots.numel()), source, flat(chosen.contiguous()), flat(weights.contiguous()),
        source if shared is None else flat(shared.contiguous()), shared is not None, each, width, top_k, flat(out),
    )  # fmt: skip
    return out


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    slots, _, weights, shared, _ = inputs
    ctx.has_shared = shared is not None
    ctx.save_for_backward(slots, weights)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_slots, grad_weights = _combine_gradients(*ctx.saved_tensors, grad)
    return grad_slots, None, grad_weights, grad if ctx.has_shared else None, None


def _combine_gradients_cpu(slots: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    (_, top_k, width), slots = slots.shape, slots.contiguous()
    grad_slots, grad_weights = torch.empty_like(slots), torch.empty_like(weights)
    kernels.combine_backward(
        threads_for(8 * slots.numel()), flat(slots), flat(weights.contiguous()), flat(grad.contiguous()), width, top_k,
        flat(grad_slots), flat(grad_weights),
    )  # fmt: skip
    return grad_slots, grad_weights


_combine_gradients = _operator(
    "combine_backward(Tensor slots, Tensor weights, Tensor grad) -> (Tensor, Tensor)",
    _combine_gradients_cpu,
    lambda slots, weights, grad: (torch.empty_like(slots), torch.empty_like(weights)),
)
_combine = _operator(
    "combine(Tensor slots, Tensor chosen, Tensor weights, Tensor? shared, bool each) -> Tensor",
    _combine_cpu,
    lambda slots, chosen, weights, shared, each: slots.new_empty(slots.shape[0], slots.shape[2]),
    _combine_backward,
    _combine_setup,
)


def combine(slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None, each: bool) -> Tensor:
    return _combine(slots, chosen, weights, shared, each)
