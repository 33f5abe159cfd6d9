"""Mixture of experts: router, experts, and their weighted sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.layout import offsets_of
from rlloop.numerics.operators.elementwise import sigmoid_mul, silu_mul
from rlloop.numerics.operators.library import operator, without_result
from rlloop.numerics.operators.products import grouped_linear, grouped_weight_gradient, linear, linear_float32
from rlloop.numerics.packed import is_packed
from rlloop.numerics.routing import Clamped, Routing

NO_BIAS = torch.zeros(0)


def router_logits(x: Tensor, weight: Tensor, exact: bool, bias: Tensor | None = None) -> Tensor:
    logits = linear_float32(x, weight) if exact else linear(x, weight, None).float()
    if bias is None:
        return logits
    logits = AddBias.apply(logits, bias.float()[None], torch.arange(2, device=x.device) * len(x))
    return logits if exact else logits.to(x.dtype).float()


# -------------------------------------------------------------------------------------------------------- routing


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
    """Gradient of the logits, from those of the weights and of the scores. The choice itself has none."""
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


_route = operator(
    "route(Tensor logits, Tensor bias, Tensor given, int top_k, bool sigmoid, int groups, int top_groups,"
    " bool normalise, float epsilon, float scale) -> (Tensor, Tensor, Tensor)",
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


# ------------------------------------------------------------------------------------------------------ experts


class Spread(torch.autograd.Function):
    """Row `order[i] // copies` of x at i: each row `copies` times. Backward adds the copies' gradients in turn."""

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


class AddBias(torch.autograd.Function):
    """Add each group's bias [G, N] to its rows [R, N], in float32; rows after the last group's are ignored."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        group = torch.searchsorted(offsets[1:], torch.arange(len(rows), device=rows.device), right=True)
        return rows + bias.index_select(0, group.clamp(max=len(bias) - 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,), grad = ctx.saved_tensors, grads[0].contiguous()
        return grad, grouped_weight_gradient(grad, grad.new_ones(len(grad), 1), offsets, grad.dtype)[..., 0], None


def _biased(rows: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Products with the columns of each group's matrix, and its bias: float32 sums, rounded once."""
    sums = grouped_linear(rows.float(), weight, False, offsets)
    return AddBias.apply(sums, bias.float(), offsets).to(rows.dtype)


def clamped_glu(x: Tensor, rule: Clamped) -> Tensor:
    """In float32, one rounding."""
    gate, up = x[..., ::2].float().clamp(max=rule.limit), x[..., 1::2].float().clamp(-rule.limit, rule.limit)
    return sigmoid_mul(rule.alpha * gate, gate * (up + 1)).to(x.dtype)


def experts(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool, clamped: Clamped | None = None) -> Tensor:
    kernels = kernels_for(x.device)
    whole = kernels.gated_experts
    if is_packed(up, down):
        differentiated = torch.is_grad_enabled() and any(each.requires_grad for each in (x, up, down))
        whole = None if differentiated or "gated_experts" not in kernels.READS_PACKED else whole
    if whole is not None and gated and clamped is None:
        return whole(x, up, down, chosen)
    tokens, top_k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    offsets = offsets_of(chosen.flatten()[order], len(down))
    if clamped is not None:
        inner = _biased(Spread.apply(x, order, inverse, top_k), up, clamped.up_bias, offsets)
        out = _biased(clamped_glu(inner, clamped), down, clamped.down_bias, offsets)
        return Spread.apply(out, inverse, order, 1).unflatten(0, (tokens, top_k))
    # Names are deleted after use, so that the next result reuses their memory without new pages.
    inner = grouped_linear(Spread.apply(x, order, inverse, top_k), up, True, offsets)
    inner = silu_mul(*inner.chunk(2, dim=-1)) if gated else inner.relu().square()
    return Spread.apply(grouped_linear(inner, down, True, offsets), inverse, order, 1).unflatten(0, (tokens, top_k))


# ------------------------------------------------------------------------------------------------------------ combine


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    slots, _, weights, shared, _ = inputs
    ctx.has_shared = shared is not None
    ctx.save_for_backward(slots, weights)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_slots, grad_weights = _combine_gradients(*ctx.saved_tensors, grad)
    return grad_slots, None, grad_weights, grad if ctx.has_shared else None, None


_combine_gradients = operator(
    "combine_backward(Tensor slots, Tensor weights, Tensor grad) -> (Tensor, Tensor)",
    lambda slots, weights, grad: (torch.empty_like(slots), torch.empty_like(weights)),
)
combine = operator(
    "combine(Tensor slots, Tensor chosen, Tensor weights, Tensor? shared, bool each) -> Tensor",
    lambda slots, chosen, weights, shared, each: slots.new_empty(slots.shape[0], slots.shape[2]),
    _combine_backward,
    _combine_setup,
)
unread_combine = without_result(combine)
