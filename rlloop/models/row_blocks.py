"""Dense MLPs of long sequences, made a block of rows at a time in layers that are made again in the backward pass.

So inner activations are held for one block. Rows are independent, so the forward keeps its bits. A weight's gradient is
the sum of the blocks' products, in their order, in float32 and rounded once: it depends on the number of rows alone.
Of an adapter's A each block's product is rounded as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlloop.models.layers import Mlp, PlainMlp, Step
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.layout import Factors
from rlloop.numerics.ops import Ops

Make = Callable[[Tensor, Sequence[Tensor], bool], Tensor]
ROWS = 32768  # of a block, and of the longest sequence that is made whole


def in_blocks(mlp: nn.Module, x: Tensor, step: Step) -> Tensor:
    """`mlp(x, step)`, x [T, D]; in blocks if it is a dense MLP, where that saves memory and rows are independent."""
    ops = step.ops
    if not isinstance(mlp, Mlp | PlainMlp) or not step.recomputed or len(x) <= ROWS:
        return mlp(x, step)
    if type(ops) is not Ops or ops.profile.linear != "rlloop":
        return mlp(x, step)
    weights = dict(mlp.named_parameters())
    if ops.row_slots(x) is not None or any(isinstance(each, Fp8Weight) for each in weights.values()):
        return mlp(x, step)
    trained = {name: each for name, each in weights.items() if each.requires_grad}
    adapted = {name: pair[0] for name, each in weights.items() if (pair := ops.adapted(each))}
    ranks = {name: each.ranks for name, each in adapted.items()}

    def make(rows: Tensor, leaves: Sequence[Tensor], unread: bool) -> Tensor:
        of_rows = replace(step, unread=unread)
        own, factors = dict(zip(trained, leaves, strict=False)), leaves[len(trained) :]
        if ops.adapters is None or not ranks:
            return functional_call(mlp, own, (rows, of_rows))
        of = {
            id(own.get(name, weights[name])): Factors(down, up, ranks[name])
            for name, down, up in zip(ranks, factors[::2], factors[1::2], strict=True)
        }
        return functional_call(mlp, own, (rows, replace(of_rows, ops=ops.with_adapters(ops.adapters.with_factors(of)))))

    pairs = [factor for each in adapted.values() for factor in (each.down, each.up)]
    return _InBlocks.apply(x, make, step.unread, *trained.values(), *pairs)


class _InBlocks(torch.autograd.Function):
    """x [T, D], `make(rows, tensors, unread)`, and the tensors besides x that it is differentiated by -> [T, D].

    `unread`: nothing reads the result, nor that of a block made again, so it has no values.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Make, unread: bool, *tensors: Tensor) -> Tensor:
        ctx.make = make
        ctx.save_for_backward(x, *tensors)
        out = torch.empty_like(x)
        for at in range(0, 0 if unread else len(x), ROWS):
            out[at : at + ROWS] = make(x[at : at + ROWS], tensors, False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, *tensors), (grad,), needs = ctx.saved_tensors, grads, ctx.needs_input_grad
        leaves = [each.detach().requires_grad_(need) for each, need in zip(tensors, needs[3:], strict=True)]
        wanted = [each for each in leaves if each.requires_grad]
        for each in wanted:
            each.grad_dtype = torch.promote_types(each.dtype, torch.float32)
        grad_x = torch.empty_like(x) if needs[0] else None
        sums: list[Tensor] = []
        for at in range(0, len(x), ROWS):
            rows = x[at : at + ROWS].detach().requires_grad_(needs[0])
            with torch.enable_grad():
                out = ctx.make(rows, leaves, True)
            found = list(torch.autograd.grad(out, [rows] * needs[0] + wanted, grad[at : at + ROWS]))
            if grad_x is not None:
                grad_x[at : at + ROWS] = found.pop(0)
            sums = [total.add_(part) for total, part in zip(sums, found, strict=True)] if sums else found
        each = iter(sums)
        return grad_x, None, None, *(next(each) if need else None for need in needs[3:])  # autograd rounds the sums
