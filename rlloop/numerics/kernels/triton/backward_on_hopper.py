"""Gradients of attention on Hopper, of 16-bit heads of 64 or 128 numbers without a window: `attention_backward`'s sums,
by warpgroups."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlloop.numerics.kernels.triton.backward_by_key import by_key
from rlloop.numerics.kernels.triton.backward_by_query import by_query
from rlloop.numerics.kernels.triton.backward_loads import BLOCK, TILE
from rlloop.numerics.kernels.triton.launch import EXACT, processors
from rlloop.numerics.kernels.triton.prefill import REGISTERS_EACH, SWIZZLED, WIDTHS


def takes(q: Tensor, v: Tensor, window: int, causal: bool) -> bool:
    """True if `run` supports these tensors."""
    return q.element_size() == 2 and q.shape[2] == v.shape[2] in WIDTHS and causal and not window


def run(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float,
    gradients: tuple[Tensor, Tensor, Tensor], shared: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fills `gradients`, of q, k and v; all tensors are contiguous. `shared`: context, prefixes and readers of a layout
    with families."""
    (tokens, heads, width), groups, sequences = q.shape, k.shape[1], len(query_start) - 1
    rows = [
        TensorDescriptor(x, [tokens, x.shape[1] * width], [x.shape[1] * width, 1], [TILE.value, width], SWIZZLED.value)
        for x in (q, k, v, grad)
    ]
    blocks = tokens // BLOCK.value + sequences
    statistics = lse.new_empty(2, heads, tokens)
    taken = torch.zeros(2, dtype=torch.int32, device=q.device)
    context, prefixes, readers = shared or (query_start,) * 3  # not read
    shape = {"HEADS": heads, "GROUPS": groups, "W": width, "SHARED": shared is not None}
    shape |= {"num_warps": 4, "maxnreg": REGISTERS_EACH, **EXACT}
    given = (q, k, v, grad, *rows, query_start)
    grad_q, grad_k, grad_v = gradients
    by_query[(min(blocks * heads, processors(q.device)),)](
        *given, context, prefixes, out, lse, grad_q, statistics, taken, sequences, tokens, blocks * heads, scale,
        **shape,
    )  # fmt: skip
    by_key[(min(blocks * groups, processors(q.device)),)](
        *given, readers, statistics, grad_k, grad_v, taken[1:], sequences, tokens, blocks * groups, scale, **shape
    )
