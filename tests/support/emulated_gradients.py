"""Gradients of attention, warpgroup by warpgroup, without a GPU: rings, barriers, what blocks own, masks and tails."""

from __future__ import annotations

import pytest
import torch

from rlloop.numerics.kernels.triton import backward_by_key, backward_by_query, backward_on_hopper
from rlloop.numerics.kernels.triton.attention import attention
from rlloop.numerics.layout import AttentionLayout
from tests.support.attention_gradients import exact, made
from tests.support.emulated_warps import Kernel
from tests.support.shared_prefixes import whole_sequences


@pytest.fixture
def gradients(monkeypatch):
    """Of q, k and v, by warpgroups in an order drawn by a seed."""
    monkeypatch.setattr(backward_on_hopper, "processors", lambda device: 3)

    def of(q, k, v, query_start, out, lse, grad, scale, seed: int = 0, families=None):
        kernels = {"by_query": backward_by_query.by_query, "by_key": backward_by_key.by_key}
        for name, kernel in kernels.items():
            monkeypatch.setattr(backward_on_hopper, name, Kernel(seed, kernel))
        found = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
        shared = None if families is None else (families.context, families.prefixes, families.readers)
        backward_on_hopper.run(q, k, v, query_start, out, lse, grad, scale, found, shared)
        return found

    return of


@pytest.mark.parametrize(
    ("lengths", "heads", "groups", "width"),
    [
        ([128, 1, 133, 64], 4, 2, 64),
        ([63, 65, 200], 3, 1, 64),
        ([0, 1, 0, 70, 0], 2, 2, 64),
        ([400], 2, 2, 64),  # more tiles than are on their way at once
        ([150], 2, 1, 128),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_those_of_autograd_in_any_order_of_warpgroups(
    gradients, lengths, heads, groups, width, dtype
) -> None:
    arguments = made(lengths, dtype, heads, groups, width, 0, True)
    assert backward_on_hopper.takes(arguments[0], arguments[2], 0, True)
    found = gradients(*arguments)
    for mine, theirs in zip(found, exact(arguments, 0, True), strict=True):
        assert (mine - theirs).norm() < (1e-2 if dtype == torch.bfloat16 else 2e-3) * theirs.norm()
    for seed in (1, 2):
        assert all(map(torch.equal, found, gradients(*arguments, seed)))


def test_a_sequences_gradients_have_its_bits_alone(gradients) -> None:
    """Other sequences' numbers do not reach it, not even NaN."""
    q, k, v, starts, out, lse, grad, scale = made([100, 70, 90], torch.bfloat16, 2, 1, 64, 0, True)
    one = [x[100:170].clone() for x in (q, k, v, out, lse, grad)]
    alone = gradients(*one[:3], torch.tensor([0, 70]), *one[3:], scale)
    for x in (q, k, v, out, lse, grad):
        x[:100] = x[170:] = torch.nan
    together = gradients(q, k, v, starts, out, lse, grad, scale)
    assert all(torch.equal(x[100:170], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("families", [[[128, 5, 1, 70], [30], [64, 64, 130]], [[192, 100], [65]]])
def test_shared_prefixes(gradients, families) -> None:
    """Their keys' gradients are sums over all that read them."""
    shared = AttentionLayout.of_families(families)
    rows, lengths = whole_sequences(families)
    generator, tokens = torch.Generator().manual_seed(0), int(shared.query_start[-1])
    drawn = [torch.randn(tokens, n, 64, generator=generator).bfloat16() for n in (4, 2, 2, 4)]
    whole = AttentionLayout.of_sequences(lengths)
    of_tokens = (drawn[3].float() / torch.bincount(rows)[:, None, None]).bfloat16()
    parts = [*(x[rows] for x in drawn[:3]), whole.query_start, None, None, of_tokens[rows], 0.125]
    theirs = [
        torch.zeros(x.shape, dtype=torch.float64).index_add(0, rows, each)
        for x, each in zip(drawn, exact(tuple(parts), 0, True), strict=False)
    ]
    out, lse = attention(*drawn[:3], shared.query_start, shared.context, shared.block_start, 64, 0.125, 0, None)
    given = (*drawn[:3], shared.query_start, out, lse, drawn[3], 0.125)
    found = gradients(*given, families=shared)
    for mine, each in zip(found, theirs, strict=True):
        assert (mine - each).norm() < 1e-2 * each.norm()
    assert all(map(torch.equal, found, gradients(*given, 1, families=shared)))
