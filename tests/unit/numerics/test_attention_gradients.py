"""Attention's gradients by the kernels for GPUs, in Triton's interpreter (`test_interpreted_kernels`)."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.attention_gradients import exact, made

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="kernels are not interpreted")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "causal"), [(0, True), (2, True), (70, True), (0, False)])
def test_gradients_are_those_of_autograd(dtype: torch.dtype, window: int, causal: bool) -> None:
    """Lengths of whole tiles and of parts; a number of heads that divides a tile's queries, and one that does not."""
    from rlloop.numerics.kernels.triton.attention_backward import attention_backward

    for lengths, heads, groups, width in (([128, 1, 133], 4, 2, 16), ([70], 3, 1, 16), ([70], 2, 1, 20)):
        arguments = made(lengths, dtype, heads, groups, width, window, causal)
        found = attention_backward(*arguments, window, causal)
        for mine, theirs in zip(found, exact(arguments, window, causal), strict=True):
            assert (mine - theirs).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * theirs.norm()
