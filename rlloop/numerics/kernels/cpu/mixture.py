"""Routing of CPU tensors' tokens to experts, and the sum of what the experts return."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu.compiled import routing as kernels
from rlloop.numerics.kernels.cpu.compiled.jit import flat, threads_for


def route(
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


def combine(slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None, each: bool) -> Tensor:
    tokens, top_k, width = slots.shape
    out, source = slots.new_empty(tokens, width), flat(slots.contiguous())
    kernels.combine(
        threads_for(4 * slots.numel()), source, flat(chosen.contiguous()), flat(weights.contiguous()),
        source if shared is None else flat(shared.contiguous()), shared is not None, each, width, top_k, flat(out),
    )  # fmt: skip
    return out


def combine_backward(slots: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    (_, top_k, width), slots = slots.shape, slots.contiguous()
    grad_slots, grad_weights = torch.empty_like(slots), torch.empty_like(weights)
    kernels.combine_backward(
        threads_for(8 * slots.numel()), flat(slots), flat(weights.contiguous()), flat(grad.contiguous()), width, top_k,
        flat(grad_slots), flat(grad_weights),
    )  # fmt: skip
    return grad_slots, grad_weights
