"""Consecutive operations made as one, with the bits of each alone: `Ops` inherits them, and models use `Ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlloop.numerics import operators
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.layout import AdapterSlots, AttentionLayout, DecoderWeights, Factors
from rlloop.numerics.packed import is_packed
from rlloop.numerics.profile import NumericsProfile


class FusedOps:
    """Shapes as for `Ops`. In training: `products`, `gated_down` and `norm_rope`; else only if `fuses`."""

    profile: NumericsProfile
    adapters: AdapterSlots | None
    _split: int
    _ranks: int
    _fuses: bool

    if TYPE_CHECKING:

        @property
        def norms_sums(self) -> bool: ...

        def adapted(self, weight: Tensor | None) -> tuple[Factors, AdapterSlots] | None: ...

        def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

        def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

        def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

        def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def products(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...] | None:
        """`linear` of one x [T, K] by several weights, whose gradient by x is one sum. None where that is not made so.
        Not of subclasses that depart."""
        return operators.products(x, weights) if self._plain(*weights) else None

    def gated_down(self, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor | None:
        """`linear` of `silu_mul(gate, up)`, which is made again for its gradient instead of kept. None where that is
        not made together with gradients. Not of subclasses that depart. [T, F] each, [N, F] -> [T, N]."""
        plain = self.profile.activation == "rlloop" and self._plain(weight)
        return operators.gated_down(gate, up, weight) if plain else None

    def _plain(self, *weights: Tensor) -> bool:
        """True if the operators of `linear` multiply by these weights, and nothing else does."""
        if self._ranks > 1 or self.profile.linear != "rlloop" or is_packed(*weights):
            return False
        return not any(isinstance(each, Fp8Weight) or self.adapted(each) for each in weights)

    def norm_rope(
        self, q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], eps: float, positions: Tensor, cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`rms_norm` of queries [T, H, D] and keys [T, G, D] by a weight [D] each, and then `rope`; differentiable."""
        made = getattr(kernels_for(q.device), "norm_rope", None) is not None
        if made and self.profile.rms_norm == self.profile.rope == "rlloop":
            return operators.norm_rope(q, k, weights, eps, positions, cos, sin)
        q, k = (self.rms_norm(x, weight, eps)[0] for x, weight in zip((q, k), weights, strict=True))
        return self.rope(q, positions, cos, sin), self.rope(k, positions, cos, sin)

    @property
    def fuses(self) -> bool:
        """True if consecutive operations may be fused: all are rlloop's, and no gradient is needed."""
        return self._fuses and not torch.is_grad_enabled()

    def qkv_linear(
        self, x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`linear` of one input by three weights, without biases. Only if `fuses`. [T, K], [N, K] -> [T, N] each."""
        weights = (q_weight, k_weight, v_weight)
        if all(isinstance(weight, Fp8Weight) for weight in weights):
            q, k, v = operators.fp8_linears(x, weights)
        elif outputs := self._adapted_products(x, weights, False):
            q, k, v = outputs
        elif is_packed(*weights) or any(map(self.adapted, weights)):
            q, k, v = (self.linear(x, weight) for weight in weights)
        else:
            q, k, v = kernels_for(x.device).qkv_linear(x, *weights)
        return q, k, v

    def gated_linear(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """`silu_mul` of two linears of one input, without biases. Only if `fuses`. [T, K], [F, K], [F, K] -> [T, F]."""
        if isinstance(gate, Fp8Weight) and isinstance(up, Fp8Weight):
            return self.silu_mul(*operators.fp8_linears(x, (gate, up)))
        if outputs := self._adapted_products(x, (gate, up), True):
            return outputs[0]
        if is_packed(gate, up) or self.adapted(gate) or self.adapted(up):
            return self.silu_mul(self.linear(x, gate), self.linear(x, up))
        return kernels_for(x.device).gated_linear(x, gate, up)

    def _adapted_products(self, x: Tensor, weights: tuple[Tensor, ...], gated: bool) -> tuple[Tensor, ...] | None:
        """`kernels.Kernels.adapted_products`; None where it is not for these."""
        factors = [self.adapted(weight) for weight in weights]
        if self.adapters is None or is_packed(*weights) or None in factors:
            return None
        if (work := kernels_for(x.device).adapted_products) is None:
            return None
        return work(x, weights, None, x.dtype, tuple(each[0] for each in factors if each), self.adapters, gated)

    def qkv_cache_write(
        self, q: Tensor, k: Tensor, v: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, positions: Tensor,
        rope: tuple[Tensor, Tensor], slots: Tensor, keys: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        """Norm and rotate queries and keys, and write keys and values into a cache's stores. Returns the queries.

        Only if `fuses`. q [T, H, D], k and v [T, G, D]; `norms` are the weights [D] of queries' and keys',
        slots [T] int64, the stores [slots, G, D]. Bits are those of `rms_norm` and then `rope`.
        """
        weights, write = norms or (None, None), kernels_for(q.device).qkv_cache_write
        return write(q, k, v, *weights, eps, positions, *rope, slots, keys, values)

    def decoder_layer(
        self, delta: Tensor, stream: Tensor | None, weights: DecoderWeights, eps: float, positions: Tensor,
        rope: tuple[Tensor, Tensor], slots: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, scale: float,
        window: int,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """(delta, stream) after a layer of a decode step, one token a sequence. None where it is not made at once."""
        work = kernels_for(delta.device).decoder_layer
        if work is None or self.adapters is not None or not (self.fuses and self.norms_sums and self._ranks == 1):
            return None
        if is_packed(*weights.all) or any(isinstance(each, Fp8Weight) for each in weights.all):
            return None
        return work(
            delta, stream, weights, eps, positions, rope, slots, keys, values, layout, scale, self._split, window
        )  # fmt: skip
