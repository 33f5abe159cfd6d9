"""Sinks and windows of attention: bits that depend on the query and what it reads, and the right gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import Ops
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile

OURS, REFERENCE, STOCK, THEIRS = (
    Ops(NumericsProfile.preset(name)) for name in ("rlloop", "reference", "stock", "huggingface")
)
LENGTHS = [1, 64, 65, 170]
WHOLE = AttentionLayout.of_sequences(LENGTHS)
LAST = slice(sum(LENGTHS[:-1]), sum(LENGTHS))


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, sinks"""
    total, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    shapes = ((total, 4, 24), (total, 2, 24), (total, 2, 24), (4,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "page", "chunk"), list(itertools.product((0, 1, 20, 64, 100), (16, 64), (1, 50))))
def test_chunks_over_pages_equal_whole_sequences(dtype: torch.dtype, window: int, page: int, chunk: int) -> None:
    q, k, v, sinks = inputs(dtype)
    whole = OURS.attention(q, k, v, WHOLE, 0.3, sinks, window)[LAST]
    q, k, v = q[LAST], k[LAST], v[LAST]
    length = len(q)
    blocks = torch.randperm(-(-length // page), generator=torch.Generator().manual_seed(page))
    at = torch.arange(length)
    slots = blocks[at // page] * page + at % page
    stores = [torch.full((len(blocks) * page, *x.shape[1:]), torch.nan, dtype=dtype) for x in (k, v)]
    stores[0][slots], stores[1][slots] = k, v
    for begin in (0, 19, 20, 63, 64, 65, 83, 84, 99, 100, length - chunk):
        rows = slice(begin, begin + chunk)
        layout = AttentionLayout(
            torch.tensor([0, chunk]), torch.tensor([begin]), blocks[None] * page, page, contiguous=False
        )
        assert same_bits(OURS.attention(q[rows], *stores, layout, 0.3, sinks, window), whole[rows]), begin


@pytest.mark.parametrize("window", [1, 20, 64, 100])
def test_what_lies_before_the_window_does_not_matter(window: int) -> None:
    q, k, v, sinks = inputs()
    whole = OURS.attention(q, k, v, WHOLE, 0.3, sinks, window)
    for x in (k, v):
        x[LAST][: 169 - window + 1] = 7.0  # all but what the last query reads
    changed = OURS.attention(q, k, v, WHOLE, 0.3, sinks, window)
    assert same_bits(changed[-1], whole[-1])
    assert not same_bits(changed[-2], whole[-2])


def test_without_effect_they_leave_the_bits_alone() -> None:
    q, k, v, _ = inputs()
    plain = OURS.attention(q, k, v, WHOLE, 0.3)
    assert same_bits(OURS.attention(q, k, v, WHOLE, 0.3, None, max(LENGTHS)), plain)
    assert same_bits(OURS.attention(q, k, v, WHOLE, 0.3, torch.full((4,), -1e30)), plain)
    assert (OURS.attention(q, k, v, WHOLE, 0.3, torch.full((4,), 1e30)) == 0).all()


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 1, 20, 64, 100])
def test_values_and_gradients_are_the_references_in_float64(window: int, with_sinks: bool) -> None:
    def work(ops: Ops, dtype: torch.dtype) -> list[Tensor]:
        *whole, sinks = inputs()
        leaves = [x.to(dtype).requires_grad_() for x in (*(x[:137] for x in whole), *([sinks] if with_sinks else []))]
        layout, (q, k, v, *given) = AttentionLayout.of_sequences([2, 135]), leaves
        out = ops.attention(q, k, v, layout, 0.3, *(given or [None]), window)
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, slope)]

    expected = work(REFERENCE, torch.float64)
    for ops in (OURS, STOCK, THEIRS):
        for made, exact in zip(work(ops, torch.float32), expected, strict=True):
            torch.testing.assert_close(made.double(), exact, rtol=1e-4, atol=2e-5)
    for made, exact in zip(work(OURS, torch.bfloat16), expected, strict=True):
        assert (made.double() - exact).norm() < 0.02 * exact.norm() or exact.norm() < 1e-6  # one key's share is all


def test_sinks_beside_parts() -> None:
    """A sink is in the first part, and a layer with a window is one part."""
    q, k, v, sinks = inputs()
    ops = Ops(NumericsProfile(attention_splits="64"))
    made, plain = (each.attention(q, k, v, WHOLE, 0.3, sinks) for each in (ops, OURS))
    assert same_bits(made[WHOLE.positions < 64], plain[WHOLE.positions < 64])
    assert not same_bits(made, plain)
    torch.testing.assert_close(made, plain)
    assert same_bits(*(each.attention(q, k, v, WHOLE, 0.3, sinks, 100) for each in (ops, OURS)))
