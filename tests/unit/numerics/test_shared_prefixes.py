"""Attention over shared prefixes: the bits of whole sequences forward, and their gradients summed in a fixed order."""

import itertools

import pytest
import torch

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from tests.support.shared_prefixes import whole_sequences

OURS = ops_for(NumericsProfile())
FAMILIES = [[70], [128, 5, 1, 66], [3], [64, 64], [1]]  # prefixes, then what goes on from them
SHARED = AttentionLayout.of_families(FAMILIES)
SCALE = 0.25


WHOLE, LENGTHS = whole_sequences(FAMILIES)


def test_layouts_are_made_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        again = AttentionLayout.of_families(FAMILIES, "cpu"), AttentionLayout.of_sequences([3, 4], "cpu")
    assert torch.equal(again[0].block_start, SHARED.block_start)
    assert again[1].query_start.tolist() == [0, 3, 7]


def tensors(width, dtype=torch.float32, heads=4, groups=2):
    generator = torch.Generator().manual_seed(width)
    total = int(SHARED.query_start[-1])
    return [torch.randn(total, count, width, generator=generator).to(dtype) for count in (heads, groups, groups)]


def slopes_of(leaves, width=24):
    return torch.randn(len(leaves[0]), 4, width, generator=torch.Generator().manual_seed(7))


def kinds():
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(5))
    return {"plain": (None, 0), "window": (None, 20), "sinks": (sinks, 0), "sinks, wide window": (sinks, 100)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("kind", kinds())
def test_a_shared_prefix_changes_no_bit(kind, width, dtype):
    sinks, window = kinds()[kind]
    q, k, v = tensors(width, dtype)
    shared = OURS.attention(q, k, v, SHARED, SCALE, sinks, window)
    layout = AttentionLayout.of_sequences(LENGTHS)
    whole = OURS.attention(q[WHOLE], k[WHOLE], v[WHOLE], layout, SCALE, sinks, window)
    assert same_bits(shared[WHOLE], whole)


@pytest.mark.parametrize("splits", ["64", "256"])
def test_parts_of_the_softmax(splits):
    ops = ops_for(NumericsProfile(attention_splits=splits))
    q, k, v = tensors(16)
    whole = ops.attention(q[WHOLE], k[WHOLE], v[WHOLE], AttentionLayout.of_sequences(LENGTHS), SCALE)
    assert same_bits(ops.attention(q, k, v, SHARED, SCALE)[WHOLE], whole)


def gradients(layout, leaves, slopes, sinks=None, window=0):
    """Of queries, keys, values and sinks."""
    leaves = [x.detach().clone().requires_grad_() for x in (*leaves, *(() if sinks is None else (sinks,)))]
    out = OURS.attention(*leaves[:3], layout, SCALE, None if sinks is None else leaves[3], window)
    return torch.autograd.grad(out, leaves, slopes)


def exact_attention(q, k, v, sinks, window):
    """Of whole sequences, by rows of float64: the definition as one masked softmax."""
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    ago = torch.arange(len(q))[:, None] - torch.arange(len(q))
    reads = (sequence[:, None] == sequence) & (ago >= 0) & (ago < (window or len(q)))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * SCALE
    scores = scores.masked_fill(~reads, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), 2)
    return torch.einsum("hts,shd->thd", scores.softmax(-1)[..., : len(q)], v)


def exact_gradients(leaves, slopes, sinks=None, window=0):
    """`gradients`, of the whole sequences' outputs: what several sequences share counts once."""
    leaves = [x.detach().double().requires_grad_() for x in (*leaves, *(() if sinks is None else (sinks,)))]
    out = exact_attention(*(x[WHOLE] for x in leaves[:3]), None if sinks is None else leaves[3], window)
    return torch.autograd.grad(out, leaves, (slopes.double() / torch.bincount(WHOLE)[:, None, None])[WHOLE])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", kinds())
def test_gradients_are_those_of_whole_sequences_added_up(kind, dtype):
    sinks, window = kinds()[kind]
    leaves = tensors(24, dtype)
    made = gradients(SHARED, leaves, slopes_of(leaves).to(dtype), sinks, window)
    limit = 2e-6 if dtype == torch.float32 else 8e-3
    for mine, truth in zip(made, exact_gradients(leaves, slopes_of(leaves).to(dtype), sinks, window), strict=True):
        assert (mine.double() - truth).norm() < limit * truth.norm()


def test_gradients_know_neither_threads_nor_neighbours():
    leaves = tensors(24)
    slopes = slopes_of(leaves)
    made = gradients(SHARED, leaves, slopes)
    own = slice(70, 70 + sum(FAMILIES[1]))
    alone = AttentionLayout.of_families(FAMILIES[1:2])
    again = gradients(alone, [x[own] for x in leaves], slopes[own])
    assert all(same_bits(a, b[own]) for a, b in zip(again, made, strict=True))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            again = gradients(SHARED, leaves, slopes)
            assert all(same_bits(a, b) for a, b in zip(again, made, strict=True))
    finally:
        torch.set_num_threads(before)


def test_families_of_one_are_whole_sequences():
    """Also beside others: their gradients have the same bits."""
    assert AttentionLayout.of_families([[70], [3]]).families is None
    leaves = tensors(24)
    made = gradients(SHARED, leaves, slopes_of(leaves))
    own = slice(0, FAMILIES[0][0])
    alone = gradients(AttentionLayout.of_sequences(FAMILIES[0]), [x[own] for x in leaves], slopes_of(leaves)[own])
    assert all(same_bits(a, b[own]) for a, b in zip(alone, made, strict=True))


def test_latents_share_a_prefix():
    """One head of keys whose first numbers are the values; wide ones are products of cuBLAS on a GPU."""
    q, k, _ = tensors(272, groups=1)
    slopes = slopes_of([q], 256)
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    out = OURS.attention(leaves[0], leaves[1], leaves[1][..., :256], SHARED, SCALE)
    whole = OURS.attention(q[WHOLE], k[WHOLE], k[WHOLE][..., :256], AttentionLayout.of_sequences(LENGTHS), SCALE)
    assert same_bits(out.detach()[WHOLE], whole)
    made = torch.autograd.grad(out, leaves, slopes)
    of_q, of_k, of_v = exact_gradients((q, k, k[..., :256]), slopes)
    of_k[..., :256] += of_v
    assert all((a.double() - b).norm() < 5e-6 * b.norm() for a, b in zip(made, (of_q, of_k), strict=True))


def test_sparse_attention_shares_forwards_only():
    q, k, v = tensors(16, heads=4, groups=1)
    weights = torch.randn(len(q), 4, generator=torch.Generator().manual_seed(3))
    layout = AttentionLayout.of_sequences(LENGTHS)
    selected = OURS.select(q, k, weights, SHARED, SCALE, 17)
    whole = OURS.select(q[WHOLE], k[WHOLE], weights[WHOLE], layout, SCALE, 17)
    assert torch.equal(selected[WHOLE], whole)
    read = OURS.sparse_attention(q, k, v, selected, SHARED, SCALE)
    assert same_bits(read[WHOLE], OURS.sparse_attention(q[WHOLE], k[WHOLE], v[WHOLE], whole, layout, SCALE))
    with pytest.raises(ValueError, match="no gradient over shared prefixes"):
        OURS.sparse_attention(q.requires_grad_(), k, v, selected, SHARED, SCALE)


@pytest.mark.parametrize("families", [[[63, 2]], [[0, 3]], [[5], [65, 1, 1]]])
def test_other_prefixes_are_refused(families):
    with pytest.raises(ValueError, match="multiple of 64"):
        AttentionLayout.of_families(families)


def test_positions_and_readers():
    lengths = list(itertools.chain(*FAMILIES))
    assert SHARED.query_start.diff().tolist() == lengths
    assert SHARED.positions[70 + 128 : 70 + 128 + 6].tolist() == [128, 129, 130, 131, 132, 128]
    assert SHARED.readers.tolist()[:3] == [70, 270, 203]
    assert SHARED.prefixes.tolist()[:3] == [0, 70, 70]
