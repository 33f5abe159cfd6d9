"""Several operations in one kernel, with the bits of each alone: the part of `protocol.Kernels` that saves launches and
memory traffic. Where a backend has None, `operators` makes the operations one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class FusedKernels(Protocol):
    # In training ---------------------------------------------------------------------------------------------------

    @property
    def norm_rope(self) -> Callable[..., tuple[Tensor, ...]] | None:
        """`rms_norm` and then `rope` of queries and keys (q, k, q_weight, k_weight, eps, positions, cos, sin).

        q [T, H, D], k [T, G, D], weights [D] -> (q, k, 1 / rms of q's rows [T * H] float32, of k's rows [T * G]).
        """
        ...

    @property
    def norm_rope_backward(self) -> Callable[..., tuple[Tensor, ...]] | None:
        """(q, k, q_weight, k_weight, the two 1 / rms, positions, cos, sin, gradient of q, of k) -> gradients (of q, of
        k, of q_weight, of k_weight). The turned gradient is rounded, as that of `rope` is, before the norm reads it."""
        ...

    @property
    def silu_mul_remade(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None:
        """`silu_mul_backward(gate, up, grad)`, and after its two results `silu_mul(gate, up)`."""
        ...

    @property
    def add_product(self) -> Callable[[Tensor, Tensor, Tensor], None] | None:
        """For gradients: adds to a sum [M, N], in place, the product of [M, K] and [K, N], rounded once. None: autograd
        adds them."""
        ...

    # In forwards without gradients ---------------------------------------------------------------------------------

    @property
    def add_layer_norm(self) -> Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] | None:
        """`Ops.add_layer_norm(x, residual, weight, bias, eps)` in one launch, without a gradient."""
        ...

    def qkv_linear(
        self, x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`linear` of x [T, K] by each weight, without biases."""
        ...

    def gated_linear(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """`silu_mul(linear(x, gate), linear(x, up))`. [T, K], [F, K], [F, K] -> [T, F]."""
        ...

    def qkv_cache_write(
        self, q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
        positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        """`Ops.qkv_cache_write`: norms (where there are weights), rotates, and writes keys and values to slots [T]."""
        ...

    @property
    def decoder_layer(self) -> Callable[..., tuple[Tensor, Tensor] | None] | None:
        """`Ops.decoder_layer` with the layout and `split`; its result is None where it is not for these."""
        ...
