"""Adapters' terms of a product (`layout.AdapterTerms`): of some rows, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlloop.numerics.layout import offsets_of

Optional4 = tuple[Tensor | None, ...]  # z, up, slots and ranks, or four times None


class Products(NamedTuple):
    """A backend's functions of these names in `protocol.Kernels`."""

    product: Callable[..., Tensor]
    grouped_rows_gradient: Callable[..., Tensor]
    grouped_weight_gradient: Callable[..., Tensor]


def rows_of(terms: Optional4, rows: slice) -> tuple[Tensor, Tensor, bool, Tensor, Tensor] | None:
    """The terms of these rows, as arguments of `protocol.Kernels.adapted_linear`; None where there are none."""
    if not terms or any(each is None for each in terms):
        return None
    z, up, slots, ranks = terms
    assert z is not None and up is not None and slots is not None and ranks is not None  # noqa: PT018
    return z[rows], up, True, slots[rows], ranks


def terms_gradients(
    by: Products, grad: Tensor, z: Tensor, up: Tensor, by_row: bool, slots: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of z [R, r] and, in `dtype`, of up [M, N, r], from that of the sums [R, N]."""
    if len(up) == 1:
        left, right = (grad, z) if by_row else (z, grad)
        return by.product(grad, True, up[0], not by_row, z.dtype), by.product(left, False, right, False, dtype)[None]
    order = slots.argsort(stable=True)
    grad, z, offsets = grad[order], z[order], offsets_of(slots[order], len(up))
    of_rows = by.grouped_rows_gradient(grad.to(up.dtype), up, not by_row, offsets).to(z.dtype)
    left, right = (grad, z) if by_row else (z, grad)
    return torch.empty_like(of_rows).index_copy_(0, order, of_rows), by.grouped_weight_gradient(
        left, right, offsets, dtype
    )
