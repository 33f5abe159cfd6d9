"""A kernel for one operation, the activation: ReGLU in place of SwiGLU."""

from torch import Tensor

BATCH_INVARIANT = True  # comparisons and single multiplications: an element's bits depend on that element alone


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """max(gate, 0) * up, [T, F] and [T, F] -> [T, F]."""
    return gate.relu() * up
