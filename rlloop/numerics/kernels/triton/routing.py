"""Routing of tokens to experts, and the weighted sum of the experts' outputs. Tokens are independent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, hopper, power_of_two

NUMBERS = 1024  # of a program of the router, about
COLUMNS = 1024  # of a program of the sum, at most


@triton.jit
def _best(values, taken, ids, SIZE: tl.constexpr):
    """In each row, the lowest index of the largest value that is not taken yet."""
    top = tl.max(tl.where(taken != 0, float("-inf"), values), 1)
    index = tl.min(tl.where((values == top[:, None]) & (taken == 0), ids, SIZE), 1)
    return tl.minimum(index, SIZE - 1)


@triton.jit
def _best_groups(values, ids, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, ROWS: tl.constexpr,
                 WIDE: tl.constexpr):  # fmt: skip
    """1 for experts of the groups that are worth most, the sum of their two best values."""
    group = ids // (SIZE // GROUPS)
    worth = tl.full((ROWS, WIDE), float("-inf"), tl.float32)
    columns = tl.arange(0, WIDE)[None, :]
    for g in range(GROUPS):
        mine = tl.where(group == g, values, float("-inf"))
        first = tl.max(mine, 1)
        at = tl.min(tl.where((mine == first[:, None]) & (group == g), ids, SIZE), 1)
        second = tl.max(tl.where(ids == at[:, None], float("-inf"), mine), 1)
        worth = tl.where(columns == g, (first + second)[:, None], worth)
    kept = tl.zeros(values.shape, tl.int32)
    taken = tl.broadcast_to((columns >= GROUPS).to(tl.int32), worth.shape)
    columns = tl.broadcast_to(columns, worth.shape)
    for _ in range(TOP_GROUPS):
        best = _best(worth, taken, columns, GROUPS)
        taken = tl.where(columns == best[:, None], 1, taken)
        kept = tl.where(group == best[:, None], 1, kept)
    return kept


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits, bias, given, scores, chosen, weights, tokens, epsilon, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TOP: tl.constexpr, TOP_WIDE: tl.constexpr, ROWS: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_WIDE: tl.constexpr, TOP_GROUPS: tl.constexpr, NORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr,
    GIVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (column < SIZE)[None, :]
    at = row[:, None] * SIZE + column[None, :]
    x = tl.load(logits + at, inside, float("-inf"))
    if SIGMOID:
        score = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))
    else:
        top = tl.max(x, 1)
        mass = tl.where(inside, tl.exp(x - top[:, None]), 0.0)
        score = tl.div_rn(mass, tl.broadcast_to(tl.sum(mass, 1)[:, None], mass.shape))
    tl.store(scores + at, score, inside)
    ids = tl.broadcast_to(column[None, :], x.shape)
    taken = (ids >= SIZE).to(tl.int32)
    values = score
    if HAS_BIAS:
        values = score + tl.load(bias + column, column < SIZE, 0.0)[None, :]
    values = tl.where(values == values, values, float("-inf"))
    if GROUPS > 1:
        kept = _best_groups(values, ids, SIZE, GROUPS, TOP_GROUPS, ROWS, GROUPS_WIDE)
        values = tl.where(kept != 0, values, float("-inf"))
    slots = tl.arange(0, TOP_WIDE)[None, :]
    picked = tl.zeros((ROWS, TOP_WIDE), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for s in range(TOP):
        if GIVEN:
            best = tl.load(given + row * TOP + s, row < tokens, 0).to(tl.int32)
        else:
            best = _best(values, taken, ids, SIZE)
            taken = tl.where(ids == best[:, None], 1, taken)
        tl.store(chosen + row * TOP + s, best.to(tl.int64), row < tokens)
        weight = tl.sum(tl.where(ids == best[:, None], score, 0.0), 1)
        total += weight
        picked = tl.where(slots == s, weight[:, None], picked)
    if NORMALISE:
        picked = tl.div_rn(picked, tl.broadcast_to((total + epsilon)[:, None], picked.shape))
    tl.store(weights + row[:, None] * TOP + slots, picked * scale, (row < tokens)[:, None] & (slots < TOP))


def route(
    logits: Tensor, bias: Tensor, given: Tensor, top_k: int, sigmoid: bool, groups: int, top_groups: int,
    normalise: bool, epsilon: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(weights, chosen, scores). No `bias` and no `given` are empty, wherever they lie."""
    logits, (tokens, count), early = aligned(logits), logits.shape, hopper(logits.device)
    scores, weights = torch.empty_like(logits), logits.new_empty(tokens, top_k)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        block = power_of_two(count)
        rows = max(1, NUMBERS // block)
        _route[(cdiv(tokens, rows),)](
            logits, bias if len(bias) else logits, given.contiguous() if len(given) else chosen, scores, chosen,
            weights, tokens, epsilon, scale, SIZE=count, BLOCK=block, TOP=top_k, TOP_WIDE=power_of_two(top_k),
            ROWS=rows, SIGMOID=sigmoid, GROUPS=groups, GROUPS_WIDE=power_of_two(groups), TOP_GROUPS=top_groups,
            NORMALISE=normalise, HAS_BIAS=len(bias) > 0, GIVEN=len(given) > 0, EARLY=early, num_warps=4,
            launch_pdl=early, **EXACT,
        )  # fmt: skip
    return weights, chosen, scores


@triton.jit
def _combine(
    slots, chosen, weights, shared, out, width, TOP: tl.constexpr, TOP_WIDE: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SHARED: tl.constexpr, EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = out.dtype.element_ty
    slot = tl.arange(0, TOP_WIDE)
    # Keys in the order of the experts, then of the slots; the remainder names the slot.
    keys = tl.load(chosen + token * TOP + slot, slot < TOP, 1 << 40) * TOP_WIDE + slot
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(TOP):
        first = tl.min(keys, 0)
        keys = tl.where(keys == first, 1 << 62, keys)
        at = token * TOP + first % TOP_WIDE
        product = tl.load(slots + at * width + column, inside, 0.0).to(tl.float32) * tl.load(weights + at)
        if EACH:
            total = (total + product.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        else:
            total += product
    if HAS_SHARED:
        total += tl.load(shared + token * width + column, inside, 0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(kind), inside)


def combine(slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None, each: bool) -> Tensor:
    slots, (tokens, top_k, width) = aligned(slots), slots.shape
    out, block, early = slots.new_empty(tokens, width), min(COLUMNS, power_of_two(width, 32)), hopper(slots.device)
    if out.numel():
        _combine[(tokens, cdiv(width, block))](
            slots, chosen.contiguous(), weights.contiguous(), slots if shared is None else aligned(shared), out, width,
            TOP=top_k, TOP_WIDE=power_of_two(top_k), BLOCK=block, HAS_SHARED=shared is not None, EACH=each, EARLY=early,
            num_warps=4, launch_pdl=early, **EXACT,
        )  # fmt: skip
    return out


@triton.jit
def _combine_backward(
    slots, weights, grad, grad_slots, grad_weights, width, TOP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of the plain weighted sum: roundings are taken for the identity."""
    slot = tl.program_id(0).to(tl.int64)
    weight, total = tl.load(weights + slot), tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        slope = tl.load(grad + slot // TOP * width + column, inside, 0.0).to(tl.float32)
        total += slope * tl.load(slots + slot * width + column, inside, 0.0).to(tl.float32)
        tl.store(grad_slots + slot * width + column, (slope * weight).to(grad_slots.dtype.element_ty), inside)
    tl.store(grad_weights + slot, tl.sum(total, 0))


def combine_backward(slots: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    slots, (tokens, top_k, width) = aligned(slots), slots.shape
    grad_slots, grad_weights = torch.empty_like(slots), torch.empty(tokens, top_k, device=slots.device)
    if grad_slots.numel():
        block = min(COLUMNS, power_of_two(width, 32))
        _combine_backward[(tokens * top_k,)](
            slots, weights.contiguous(), aligned(grad), grad_slots, grad_weights, width, TOP=top_k, BLOCK=block,
            num_warps=4,
        )  # fmt: skip
    return grad_slots, grad_weights
