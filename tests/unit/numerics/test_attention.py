"""Decode = prefill = chunked prefill = training, at any page size, beside any neighbours."""

import pytest
import torch

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile

OURS = ops_for(NumericsProfile())
LENGTHS = [1, 63, 64, 65, 130]
SCALE = 0.25


def tensors(width, dtype, heads=4, groups=2):
    generator = torch.Generator().manual_seed(width)
    total = sum(LENGTHS)
    return [torch.randn(total, count, width, generator=generator).to(dtype) for count in (heads, groups, groups)]


def paged(k, v, page):
    """The sequences' keys and values in pages scattered over larger stores, and where each one's pages begin."""
    counts = [-(-length // page) for length in LENGTHS]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(page))[: sum(counts)]
    stores = [torch.full((len(order) * page + 4 * page, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (k, v)]
    blocks = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int64)
    token = used = 0
    for s, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        blocks[s, :count] = order[used : used + count] * page
        at = torch.arange(length)
        slots = blocks[s, at // page] + at % page
        for store, flat in zip(stores, (k, v), strict=True):
            store[slots] = flat[token : token + length]
        token, used = token + length, used + count
    return stores, blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "page", "chunk"),
    [(width, page, chunk) for width in (16, 24) for page in (1, 16, 64) for chunk in (1, 7, 64, 1000)]
    + [(128, 16, 1), (128, 64, 64)],
)
def test_chunks_over_pages_equal_whole_sequences(dtype, width, page, chunk):
    q, k, v = tensors(width, dtype)
    whole = OURS.attention(q, k, v, AttentionLayout.of_sequences(LENGTHS), SCALE)
    stores, blocks = paged(k, v, page)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    for step in range(0, max(LENGTHS), chunk):
        if chunk == 1 and step not in (0, 1, 62, 63, 64, 65, 129):
            continue
        live = [s for s, length in enumerate(LENGTHS) if length > step]
        counts = torch.tensor([min(chunk, LENGTHS[s] - step) for s in live])
        rows = torch.cat([starts[s] + step + torch.arange(n) for s, n in zip(live, counts.tolist(), strict=True)])
        layout = AttentionLayout(
            query_start=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
            context=torch.full((len(live),), step),
            block_start=blocks[live],
            block_size=page,
            contiguous=False,
        )
        assert same_bits(OURS.attention(q[rows], *stores, layout, SCALE), whole[rows]), step


def test_neighbours_do_not_matter():
    q, k, v = tensors(24, torch.float32)
    whole = OURS.attention(q, k, v, AttentionLayout.of_sequences(LENGTHS), SCALE)
    begin = 0
    for length in LENGTHS:
        rows = slice(begin, begin + length)
        alone = OURS.attention(q[rows], k[rows], v[rows], AttentionLayout.of_sequences([length]), SCALE)
        assert same_bits(alone, whole[rows])
        begin += length


def test_backward_is_the_same_at_any_thread_count_and_beside_any_neighbours():
    def gradients(rows, lengths):
        leaves = [x[rows].clone().requires_grad_() for x in tensors(24, torch.float32)]
        out = OURS.attention(*leaves, AttentionLayout.of_sequences(lengths), SCALE)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    whole = gradients(slice(None), LENGTHS)
    last = slice(sum(LENGTHS[:-1]), sum(LENGTHS))
    assert all(same_bits(a, b[last]) for a, b in zip(gradients(last, LENGTHS[-1:]), whole, strict=True))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert all(same_bits(a, b) for a, b in zip(gradients(slice(None), LENGTHS), whole, strict=True))
    finally:
        torch.set_num_threads(before)


def test_equal_keys_and_signed_zeros():
    q = torch.zeros(70, 1, 16)
    q[::2] = -0.0
    k, v = torch.ones(70, 1, 16), torch.arange(70.0)[:, None, None].expand(70, 1, 16).contiguous()
    out = OURS.attention(q, k, v, AttentionLayout.of_sequences([70]), 1.0)
    torch.testing.assert_close(out[:, 0, 0], torch.arange(70.0) / 2)  # the mean of 0 to p


def test_a_paged_cache_has_no_gradient():
    q, k, v = (x.requires_grad_() for x in tensors(16, torch.float32))
    layout = AttentionLayout.of_sequences(LENGTHS)
    paged_layout = AttentionLayout(layout.query_start, layout.context, layout.block_start, layout.block_size, False)
    with pytest.raises(ValueError, match="no gradient"):
        OURS.attention(q, k, v, paged_layout, SCALE)
