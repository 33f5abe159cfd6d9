"""The indexer's choice and attention over it: total order, ascending positions, the bits of dense attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import Ops
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile

OURS, REFERENCE, STOCK = (Ops(NumericsProfile.preset(name)) for name in ("rlloop", "reference", "stock"))
LENGTHS = [1, 17, 150]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Few values, so that sums are exact and ties are many."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("count", [1, 24, 64, 200])
def test_a_selection_is_the_references_where_most_scores_are_tied(count: int) -> None:
    tokens, layout = sum(LENGTHS), AttentionLayout.of_sequences(LENGTHS)
    q, k, weights = integers(tokens, 3, 8), integers(tokens, 1, 8, seed=1), integers(tokens, 3, seed=2)
    mine = OURS.select(q, k, weights, layout, 0.5, count)
    assert torch.equal(mine, REFERENCE.select(q, k, weights, layout, 0.5, count))
    assert not torch.equal(mine, STOCK.select(q, k, weights, layout, 0.5, count)) or count == 200
    kept = mine >= 0
    assert (kept.sum(1) == torch.clamp(layout.positions + 1, max=count)).all()
    assert ((mine[:, 1:] > mine[:, :-1]) | ~kept[:, 1:]).all(), "positions ascend"


def test_signed_zero_and_nan_scores() -> None:
    layout = AttentionLayout.of_sequences([6])
    k = torch.ones(6, 1, 1)
    k[:, 0, 0] = torch.tensor([1.0, -1.0, torch.nan, 0.0, -1.0, -1.0])
    weights = torch.full((6, 1), -0.0)  # every score is +0, −0 or NaN
    selected = OURS.select(torch.ones(6, 1, 1), k, weights, layout, 1.0, 3)
    assert selected[5].tolist() == [0, 1, 3]
    assert torch.equal(selected[5], OURS.select(torch.ones(6, 1, 1), k, -weights, layout, 1.0, 3)[5]), "−0 is +0"


def paged(store: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """The rows in scattered pages; the pages' first slots."""
    blocks = torch.randperm(-(-len(store) // page), generator=torch.Generator().manual_seed(1))
    at = torch.arange(len(store))
    slots = blocks[at // page] * page + at % page
    cache = store.new_zeros(len(blocks) * page, *store.shape[1:])
    cache[slots] = store
    return cache, blocks * page


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [16, 64])
def test_decode_over_pages_has_the_bits_of_prefill(page: int, dtype: torch.dtype) -> None:
    length, count, rank = 150, 40, 24
    q_index, k_index, weights = (
        draw(length, 3, 16, dtype=dtype),
        draw(length, 1, 16, seed=1, dtype=dtype),
        draw(length, 3),
    )
    q, latents = draw(length, 4, rank + 8, seed=2, dtype=dtype), draw(length, 1, rank + 8, seed=3, dtype=dtype)
    whole = AttentionLayout.of_sequences([length])
    selected = OURS.select(q_index, k_index, weights, whole, 0.25, count)
    out = OURS.sparse_attention(q, latents, latents[..., :rank].contiguous(), selected, whole, 0.2)
    last = torch.tensor([0, 15, 16, 39, 40, 63, 64, length - 1])
    (index_cache, starts), (cache, _) = paged(k_index, page), paged(latents, page)
    decode = AttentionLayout(
        query_start=torch.arange(len(last) + 1),
        context=last,
        block_start=starts.repeat(len(last), 1),
        block_size=page,
        contiguous=False,
    )
    assert torch.equal(OURS.select(q_index[last], index_cache, weights[last], decode, 0.25, count), selected[last])
    values = cache[..., :rank]  # part of the latents' rows, as the engine has them
    assert same_bits(OURS.sparse_attention(q[last], cache, values, selected[last], decode, 0.2), out[last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selecting_everything_is_dense_attention(dtype: torch.dtype) -> None:
    tokens, layout = sum(LENGTHS), AttentionLayout.of_sequences(LENGTHS)
    q, k, v = (
        draw(tokens, 4, 40, dtype=dtype),
        draw(tokens, 1, 40, seed=1, dtype=dtype),
        draw(tokens, 1, 24, seed=2, dtype=dtype),
    )
    everything = OURS.select(draw(tokens, 2, 8), draw(tokens, 1, 8), draw(tokens, 2), layout, 1.0, 150)
    assert same_bits(OURS.sparse_attention(q, k, v, everything, layout, 0.2), OURS.attention(q, k, v, layout, 0.2))


@pytest.mark.parametrize("heads", [3, 70])
def test_gradients_are_the_references_at_unequal_widths(heads: int) -> None:
    lengths = [5, 80]
    tokens, layout = sum(lengths), AttentionLayout.of_sequences(lengths)
    selected = OURS.select(draw(tokens, 2, 8), draw(tokens, 1, 8, seed=4), draw(tokens, 2, seed=5), layout, 1.0, 70)
    wide = [
        draw(tokens, *shape, seed=i).double().requires_grad_()
        for i, shape in enumerate([(heads, 36), (1, 36), (1, 20)])
    ]
    ours = [tensor.detach().float().requires_grad_() for tensor in wide]
    pull = draw(tokens, heads, 20, seed=9)
    for ops, tensors in ((OURS, ours), (REFERENCE, wide)):
        (ops.sparse_attention(*tensors, selected, layout, 0.2) * pull).sum().backward()
    for mine, wanted in zip(ours, wide, strict=True):
        assert mine.grad is not None
        assert wanted.grad is not None
        assert ((mine.grad - wanted.grad).norm() / wanted.grad.norm()).item() < 2e-6


def test_layer_norm_and_the_stock_twins() -> None:
    x, weight, bias = draw(9, 40), draw(40, seed=1), draw(40, seed=2)
    mine = OURS.layer_norm(x, weight, bias, 1e-6)
    for ops in (REFERENCE, STOCK):
        torch.testing.assert_close(mine, ops.layer_norm(x, weight, bias, 1e-6), rtol=1e-5, atol=1e-5)
    assert same_bits(OURS.layer_norm(x[4:5], weight, bias, 1e-6), mine[4:5])
    tokens, layout = sum(LENGTHS), AttentionLayout.of_sequences(LENGTHS)
    q, k, weights = draw(tokens, 16, 8), draw(tokens, 1, 8, seed=1), draw(tokens, 16, seed=2)
    selected = OURS.select(q, k, weights, layout, 0.3, 24)
    assert torch.equal(selected, STOCK.select(q, k, weights, layout, 0.3, 24)), "without ties the choice is plain"
    given = draw(tokens, 4, 40), draw(tokens, 1, 40, seed=1), draw(tokens, 1, 24, seed=2), selected, layout, 0.2
    torch.testing.assert_close(OURS.sparse_attention(*given), STOCK.sparse_attention(*given), rtol=1e-4, atol=1e-5)
