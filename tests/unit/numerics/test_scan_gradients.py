"""Gradients of the recurrent scan beside a float64 autograd, token by token: lengths, heads a key head, odd decays."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from rlloop.numerics import reference
from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile

OURS = ops_for(NumericsProfile())
LENGTHS = [1, 15, 64, 0, 65]  # a GPU's chunks have 64 tokens
SHAPES = [(2, 2, 16, 16), (2, 4, 12, 20), (1, 8, 16, 16)]  # G, H, K, V
# A GPU's kernels multiply parts of 16 bits.
WORST = 3e-5 if "tests.support.interpreted_kernels" in sys.modules else 2e-6


def inputs(groups: int, heads: int, key: int, width: int) -> list[Tensor]:
    """q, k, v, decay and beta, and a gradient of outputs."""
    at, tokens = torch.Generator().manual_seed(3), sum(LENGTHS)
    q, k = (torch.randn(tokens, groups, key, generator=at) for _ in range(2))
    v, grad = (torch.randn(tokens, heads, width, generator=at) for _ in range(2))
    decay, beta = (torch.sigmoid(torch.randn(tokens, heads, generator=at) + shift) for shift in (2, 0))
    return [q / key**0.5, k / k.norm(dim=-1, keepdim=True), v, decay, beta, grad]


def errors(inputs: list[Tensor], corrects: bool) -> list[float]:
    """Of each gradient, which must have the same bits twice."""
    layout = AttentionLayout.of_sequences(LENGTHS)
    *given, grad = inputs
    exact = [x.double().requires_grad_() for x in given]
    wanted = torch.autograd.grad(reference.scan(*exact, corrects, layout, None), exact, grad.double())

    leaves = [x.clone().requires_grad_() for x in given]
    out = OURS.scan(*leaves, corrects, layout, None)
    once, again = (torch.autograd.grad(out, leaves, grad, retain_graph=True) for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(once, again, strict=True))
    return [float((a - b).norm() / b.norm()) for a, b in zip(once, wanted, strict=True)]


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "mamba"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_a_recurrence_token_by_token(shape: tuple[int, ...], corrects: bool) -> None:
    assert max(errors(inputs(*shape), corrects)) < WORST


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "mamba"])
def test_decays_may_be_zero_tiny_and_one(corrects: bool) -> None:
    given = inputs(2, 4, 16, 16)
    kinds = torch.randint(0, 8, given[3].shape, generator=torch.Generator().manual_seed(1))
    for kind, decay in enumerate([0.0, 1e-38, 1e-30, 1e-6, 1.0, 1.0]):
        given[3] = torch.where(kinds == kind, decay, given[3])
    assert max(errors(given, corrects)) < WORST


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "mamba"])
def test_no_tokens_have_no_gradients(corrects: bool) -> None:
    given = [x[:0].clone().requires_grad_() for x in inputs(1, 2, 16, 16)[:5]]
    out = OURS.scan(*given, corrects, AttentionLayout.of_sequences([0, 0]), None)
    assert [g.shape for g in torch.autograd.grad(out.sum(), given)] == [x.shape for x in given]
