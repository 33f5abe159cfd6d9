"""`token_logprob` for training: the logits' gradients are made with the logits, which the backward need not make again.

A logprob's gradient by its row of logits, onehot(target) - p, needs no loss: the loss's own is one number a row, which
multiplies the products behind it. So the forward keeps that in 16 bits, or, of a frozen weight, its product alone; the
backward of a weight is one product over all rows, with a float32 sum.

Of more than `KEPT_BYTES`, of float32 models, of a packed weight, where a loss differentiates entropies and in a second
backward of one graph, the logits are made again, chunk by chunk. Which way is taken follows from shapes and the loss,
and so does the gradient's rounding. A loss that says that it differentiates entropies (`algorithms.entropy_term`) has
nothing kept (`operators.logits_gradients`); of another it was kept in vain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlloop.numerics.kernels.triton.distribution import Rows
from rlloop.numerics.kernels.triton.token_logprob import token_logprob, token_logprob_backward
from rlloop.numerics.packed import is_packed

KEPT_BYTES = 5 << 30  # 16,384 rows of a vocabulary of 152k take 4.6 GiB
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def kept_token_logprob(hidden: Tensor, weight: Tensor, *others: Any) -> Results | None:
    """`Kernels.token_logprob` without terms, differentiable; None where nothing is kept."""
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not differentiable or hidden.itemsize != 2 or is_packed(weight):
        return None
    if weight.requires_grad and len(hidden) * len(weight) * hidden.itemsize > KEPT_BYTES:
        return None
    return _KeptLogits.apply(hidden, weight, *others)


class _KeptLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *others: Any) -> Results:
        whole, (rows, width) = ctx.needs_input_grad[1], hidden.shape
        kept = hidden.new_empty(rows, len(weight) if whole else width)
        one, zero = (torch.full((rows,), value, device=hidden.device) for value in (1.0, 0.0))

        def keep(chunk: slice, measured: Rows) -> None:
            gradients = targets[chunk], zero[chunk], one[chunk], zero[chunk], hidden.dtype
            if whole:
                measured.gradient(*gradients, kept[chunk])
            else:
                torch.mm(measured.gradient(*gradients), weight, out=kept[chunk])

        results = token_logprob(hidden, weight, targets, *others, *[None] * 4, keep=keep)
        ctx.save_for_backward(hidden, weight, targets, *others[:3], *results[:2])
        ctx.kept = kept
        ctx.mark_non_differentiable(*results[2:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None, *_: Any) -> Any:
        *inputs, logprobs, entropies = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # or it would be held until the whole backward has ended
        hidden, weight, whole = *inputs[:2], ctx.needs_input_grad[1]
        scale = torch.zeros_like(entropies) if of_logprobs is None else of_logprobs
        if kept is None or of_entropies is not None:
            del kept
            of_entropies = torch.zeros_like(entropies) if of_entropies is None else of_entropies
            grads = token_logprob_backward(*inputs, entropies, scale, of_entropies, whole)
            return grads[0], grads[1] if whole else None, *[None] * 7
        scale = scale.masked_fill(logprobs.isneginf(), 0)  # impossible targets send nothing, not even an infinity
        of_hidden = torch.mm(kept, weight) if whole else kept
        of_weight = torch.mm(kept.T, _scaled(hidden, scale)) if whole else None
        return _scaled(of_hidden, scale), of_weight, *[None] * 7


def _scaled(rows: Tensor, scale: Tensor) -> Tensor:
    """Rows times float32 numbers, rounded once."""
    return (rows * scale[:, None]).to(rows.dtype)
