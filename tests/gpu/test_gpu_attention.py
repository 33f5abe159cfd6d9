"""One query's attention has the same bits decoded, prefilled, in chunks and in training, over any pages."""

import math
from itertools import pairwise

import pytest
import torch

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile

OURS = ops_for(NumericsProfile())
EXACT = ops_for(NumericsProfile.preset("reference"))
SHAPES = {
    "0.6B": (16, 8, 128),
    "grouped": (8, 1, 64),
    "one to one": (4, 4, 32),
    "odd": (6, 2, 40),
    "broad": (4, 2, 256),
}  # H, G, D
LAST = [0, 1, 14, 15, 16, 62, 63, 64, 65, 127, 128, 511, 1022, 1023, 1024, 1025, 1087, 2047, 2048, 2599]
LENGTH = 2600  # into the third segment


def inputs(shape, dtype, length=LENGTH):
    heads, groups, width = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, n, width, generator=generator).to("cuda", dtype) for n in (heads, groups, groups)]


def paged(k, v, page):
    """The same keys and values in scattered pages: (k store, v store, first slot of each page)."""
    count = -(-len(k) // page)
    starts = torch.randperm(count, generator=torch.Generator().manual_seed(1)).cuda() * page
    at = torch.arange(len(k), device="cuda")
    slots = starts[at // page] + at % page
    stores = [torch.zeros(count * page, *x.shape[1:], dtype=x.dtype, device="cuda") for x in (k, v)]
    for store, x in zip(stores, (k, v), strict=True):
        store[slots] = x
    return *stores, starts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_is_prefill_is_chunks_is_training(shape, dtype):
    q, k, v = inputs(shape, dtype)
    whole = OURS.attention(q, k, v, AttentionLayout.of_sequences([LENGTH], "cuda"), 0.1)
    # beside other sequences
    packed = [torch.cat((x[:77], x, x[:300])) for x in (q, k, v)]
    packed = OURS.attention(*packed, AttentionLayout.of_sequences([77, LENGTH, 300], "cuda"), 0.1)
    assert same_bits(packed[77 : 77 + LENGTH], whole)
    assert same_bits(packed[:77], whole[:77])
    for page in (16, 64):
        keys, values, starts = paged(k, v, page)

        def layout(counts, contexts, starts=starts, page=page):
            return AttentionLayout(
                query_start=torch.tensor([0, *counts], device="cuda").cumsum(0),
                context=torch.tensor(contexts, device="cuda"),
                block_start=starts.repeat(len(counts), 1),
                block_size=page,
                contiguous=False,
            )

        last = torch.tensor(LAST, device="cuda")
        decoded = OURS.attention(q[last], keys, values, layout([1] * len(LAST), LAST), 0.1)
        assert same_bits(decoded, whole[last]), f"decode, pages of {page}"
        alone = OURS.attention(q[2599:], keys, values, layout([1], [2599]), 0.1)
        assert same_bits(alone, whole[2599:])
        cuts = [0, 100, 101, 165, 1020, 1030, 2600]
        for begin, end in pairwise(cuts):
            chunk = OURS.attention(q[begin:end], keys, values, layout([end - begin], [begin]), 0.1)
            assert same_bits(chunk, whole[begin:end]), f"chunk {begin} to {end}, pages of {page}"
        mixed = torch.cat([torch.arange(40, 90, device="cuda"), last])  # a chunk beside decoding
        both = OURS.attention(q[mixed], keys, values, layout([50, *[1] * len(LAST)], [40, *LAST]), 0.1)
        assert same_bits(both, whole[mixed]), f"mixed, pages of {page}"


@pytest.mark.parametrize("room", [1024, 3072])
@pytest.mark.parametrize(
    ("shape", "dtype", "page"),
    [
        ((16, 8, 128), torch.bfloat16, 16),
        ((16, 8, 128), torch.bfloat16, 128),
        ((32, 8, 128), torch.float16, 64),
        ((16, 1, 64), torch.bfloat16, 8),
        ((8, 4, 256), torch.bfloat16, 32),
    ],
)
def test_kernels_of_decode_agree_and_read_nothing_past_a_context(shape, dtype, page, room, monkeypatch):
    from rlloop.numerics.kernels.triton import attention, decode, launch

    heads, groups, width = shape
    last = torch.tensor(LAST, device="cuda").clamp(max=room - 1)
    count, pages = len(LAST), room // page
    generator = torch.Generator("cuda").manual_seed(0)
    starts = torch.randperm(count * pages, device="cuda", generator=generator).view(count, pages) * page
    stores = [torch.randn(count * room, groups, width, device="cuda", generator=generator).to(dtype) for _ in "kv"]
    q = torch.randn(count, heads, width, device="cuda", generator=generator).to(dtype)
    at = torch.arange(room, device="cuda")
    unseen = (starts[:, at // page] + at % page)[at > last[:, None]]
    for store in stores:
        store[unseen] = torch.nan
    given = (q, *stores, torch.arange(count + 1, device="cuda"), last, starts, page, 0.1)
    assert decode.takes(q, stores[1], groups * width, page)
    assert launch.gluon_runs(q.device), "another GPU, or another Triton: there is one kernel only"
    out, lse = attention.attention(*given)
    monkeypatch.setattr(attention, "gluon_runs", lambda device: False)
    other, other_lse = attention.attention(*given)
    assert same_bits(out, other)
    assert same_bits(lse, other_lse)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_entering_a_cache_in_one_kernel_has_the_bits_of_norm_rotation_and_copy(shape, normed, dtype):
    q, k, v = inputs(shape, dtype, 77)
    width, generator = q.shape[-1], torch.Generator("cuda").manual_seed(0)
    norms = tuple(torch.randn(width, device="cuda", generator=generator).to(dtype) for _ in "qk") if normed else None
    angle = torch.rand(500, width // 2, device="cuda", generator=generator) * 500
    rope, positions = (angle.cos(), angle.sin()), torch.randint(500, (77,), device="cuda", generator=generator)
    slots = torch.randperm(100, device="cuda", generator=generator)[:77]
    keys, values = (torch.zeros(100, *k.shape[1:], dtype=dtype, device="cuda") for _ in "kv")
    with torch.inference_mode():
        assert OURS.fuses
        entered = OURS.qkv_cache_write(q, k, v, norms, 1e-6, positions, rope, slots, keys, values)
        if norms is not None:
            q, k = (OURS.rms_norm(x, weight, 1e-6)[0] for x, weight in zip((q, k), norms, strict=True))
        assert same_bits(entered, OURS.rope(q, positions, *rope))
        assert same_bits(keys[slots], OURS.rope(k, positions, *rope))
        assert same_bits(values[slots], v)
    assert not keys[slots.new_tensor(sorted(set(range(100)) - set(slots.tolist())))].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "page"),
    [
        ((16, 8, 128), 0), ((4, 4, 128), 0), ((14, 2, 64), 0), ((32, 8, 128), 16), ((16, 8, 128), 128),
        ((6, 2, 128), 64), ((8, 1, 64), 8), ((16, 1, 128), 32),
    ],
)  # fmt: skip
def test_kernels_of_many_queries_agree_and_read_nothing_past_an_end(shape, page, dtype, monkeypatch):
    from rlloop.numerics.kernels.triton import attention, launch, prefill

    heads, groups, width = shape
    counts = [77, 1, 600, 64, 2090, 1025]
    contexts = [5, 1500, 0, 1023, 70, 1024] if page else [0] * len(counts)
    ends = [a + b for a, b in zip(counts, contexts, strict=True)]
    generator = torch.Generator("cuda").manual_seed(0)
    query_start = torch.tensor([0, *counts], device="cuda").cumsum(0)
    if page:
        pages = -(-max(ends) // page)
        order = torch.randperm(len(counts) * pages, device="cuda", generator=generator)
        starts = order.view(len(counts), pages) * page
        size, room = page, len(counts) * pages * page
    else:  # neighbours lie behind an end: the second sequence's are not numbers, and only it may notice
        starts, size, room = query_start[:-1, None], max(counts), sum(counts)
    stores = [torch.randn(room, groups, width, device="cuda", generator=generator).to(dtype) for _ in "kv"]
    q = 2 * torch.randn(sum(counts), heads, width, device="cuda", generator=generator).to(dtype)
    at = torch.arange(max(ends), device="cuda")
    unseen = torch.tensor([77], device="cuda")
    if page:
        unseen = (starts[:, at // page] + at % page)[at >= torch.tensor(ends, device="cuda")[:, None]]
    for store in stores:
        store[unseen] = torch.nan
    given = (query_start, torch.tensor(contexts, device="cuda"), starts, size, 0.1)
    assert launch.gluon_runs(q.device), "another GPU, or another Triton: there is one kernel only"
    assert prefill.takes(q, stores[0], stores[1], groups * width, starts.shape[1], size)
    out, lse = attention.attention(q, stores[0], stores[1], *given)
    monkeypatch.setattr(attention, "gluon_runs", lambda device: False)
    other, other_lse = attention.attention(q, stores[0], stores[1], *given)
    finite = out.isfinite().all(2).all(1)
    assert finite.all() if page else finite.tolist() == [i != 77 for i in range(sum(counts))]
    assert same_bits(out[finite], other[finite])
    assert same_bits(lse[finite], other_lse[finite])


def test_short_caches_and_long_ones_agree():
    """Contexts of at most one segment take another form of the kernel."""
    q, k, v = inputs("0.6B", torch.bfloat16)
    whole = OURS.attention(q, k, v, AttentionLayout.of_sequences([LENGTH], "cuda"), 0.1)
    for length in (1, 64, 700, 1024):
        short = OURS.attention(q[:length], k[:length], v[:length], AttentionLayout.of_sequences([length], "cuda"), 0.1)
        assert same_bits(short, whole[:length])


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_the_reference(shape):
    q, k, v = inputs(shape, torch.float32, 1100)
    ours = OURS.attention(q, k, v, AttentionLayout.of_sequences([1100], "cuda"), 0.1)
    picked = torch.tensor([0, 63, 500, 1099], device="cuda")
    layout = AttentionLayout(
        query_start=torch.arange(5, device="cuda"), context=picked, block_start=torch.zeros(4, 1, dtype=torch.int64),
        block_size=1100, contiguous=False,
    )  # fmt: skip
    exact = EXACT.attention(q[picked].double(), k.double(), v.double(), layout, 0.1)
    torch.testing.assert_close(ours[picked].double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype"), [("0.6B", torch.float32), ("odd", torch.float32), ("broad", torch.bfloat16)]
)
def test_gradients_over_several_segments_are_autograd_s(shape, dtype):
    q, k, v = (x.requires_grad_() for x in inputs(shape, dtype, 1200))
    grad = torch.randn(1200, q.shape[1], q.shape[2], generator=torch.Generator().manual_seed(3)).to("cuda", dtype)
    ours = OURS.attention(q, k, v, AttentionLayout.of_sequences([1100, 100], "cuda"), 0.1)
    mine = torch.autograd.grad(ours, (q, k, v), grad)
    share = q.shape[1] // k.shape[1]
    outs = []
    for begin, end in ((0, 1100), (1100, 1200)):
        scores = torch.einsum(
            "ihd,jhd->hij", q[begin:end].double(), k[begin:end].double().repeat_interleave(share, 1)
        )  # fmt: skip
        mask = torch.ones(end - begin, end - begin, dtype=torch.bool, device="cuda").tril()
        weights = (scores * 0.1).masked_fill(~mask, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hij,jhd->ihd", weights, v[begin:end].double().repeat_interleave(share, 1)))
    theirs = torch.autograd.grad(torch.cat(outs), (q, k, v), grad.double())
    rounding = 0.0 if dtype == torch.float32 else 2**-7  # of one product of bfloat16 and the next
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b.to(dtype), rtol=1e-3 + rounding, atol=1e-4 + rounding * b.abs().max().item())


AT = torch.arange(LENGTH)


def leaps(*at: int, by: float = 80.0) -> torch.Tensor:
    return torch.zeros(LENGTH).index_fill(0, torch.tensor(at), by)


SCORES = {  # of keys, for powers of two
    "grow": AT / 60,
    "grow fast": AT / 4.0,  # every segment's sum exceeds its limit
    "fall": -AT / 60,
    "fall fast": -AT / 4.0,
    "leap in the first tile": leaps(50),
    "leap in the second tile": leaps(70),
    "leap in a later tile": leaps(900),
    "leap in a later segment's first tile": leaps(1030),
    "leap in a later segment's later tile": leaps(1900),
    "leap twice": leaps(900, 2300),
    "leap at the last key": leaps(LENGTH - 1),
    "leap far": leaps(500, by=3000.0),
    "leap to just below the limit": leaps(900, by=63.0),
}


def exact(q, k, v, last, scale):
    """In float64: queries [T, H, D] that read the keys up to `last` [T]."""
    keys, values = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * scale
    unseen = torch.arange(len(k), device="cuda") > last[:, None]
    scores = scores.masked_fill(unseen, -math.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values), scores.logsumexp(-1).T


def every_way(q, k, v, last, chunks, scale, gluon, monkeypatch):
    """(out, lse) of all queries at once, of those at `last` decoded, and of `chunks`; the latter over pages of 16."""
    from rlloop.numerics.kernels.triton import attention

    with monkeypatch.context() as patch:
        if not gluon:
            patch.setattr(attention, "gluon_runs", lambda device: False)
        length, (keys, values, starts) = len(k), paged(k, v, 16)
        zero = torch.zeros(1, dtype=torch.int64, device="cuda")

        def over_pages(rows, counts, contexts):
            start = torch.tensor([0, *counts], device="cuda").cumsum(0)
            return attention.attention(q[rows], keys, values, start, contexts, starts.repeat(len(counts), 1), 16, scale)

        whole = attention.attention(q, k, v, torch.tensor([0, length], device="cuda"), zero, zero[None], length, scale)
        decoded = over_pages(last, [1] * len(last), last)
        parts = [over_pages(slice(a, b), [b - a], torch.tensor([a], device="cuda")) for a, b in chunks]
    return whole, decoded, parts


@pytest.mark.parametrize(("shape", "dtype"), [((8, 2, 128), torch.bfloat16), ((4, 1, 64), torch.float16)])
@pytest.mark.parametrize("name", SCORES)
def test_scores_that_grow_fall_and_leap_have_one_set_of_bits(name, shape, dtype, monkeypatch):
    """A segment's masses are relative to its first tile, unless they sum to too much."""
    heads, groups, width = shape
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(LENGTH, n, width, device="cuda", generator=generator) for n in (heads, groups, groups))
    q, k, v = (x.to(dtype) for x in (0.1 * q, 0.1 * k, v))
    q[..., 0], k[..., 0] = 8, SCORES[name].to("cuda", dtype)[:, None]
    q[5::7, 0, 0] = 0  # some rows of a block do not leap
    scale, last = 0.125 * math.log(2), torch.tensor(LAST, device="cuda")
    chunks = [(0, 100), (1000, 1030), (2300, 2600)]
    whole, decoded, parts = every_way(q, k, v, last, chunks, scale, True, monkeypatch)
    for found in (every_way(q, k, v, last, chunks, scale, False, monkeypatch), (whole, decoded, parts)):
        for index, what in enumerate(("values", "log-sum-exp")):
            assert same_bits(found[0][index], whole[index]), f"{what}, plain"
            assert same_bits(found[1][index], whole[index][last]), f"{what}, decoded"
            for (begin, end), part in zip(chunks, found[2], strict=True):
                assert same_bits(part[index], whole[index][begin:end]), f"{what}, chunk from {begin}"
    some = torch.cat([last, torch.arange(880, 1100, device="cuda")])
    out, lse = exact(q[some], k, v, some, scale)
    torch.testing.assert_close(whole[0][some].double(), out, atol=0.02, rtol=0.02)
    torch.testing.assert_close(whole[1][some].double(), lse, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("leap", [0.0, 80.0])
def test_contexts_around_8192_keys(leap, monkeypatch):
    length = 8292
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(length, n, 128, device="cuda", generator=generator).bfloat16() for n in (2, 1, 1))
    k[[700, 5000, 8191], 0, 0] += leap
    last = torch.tensor([127, 128, 129, 1023, 1024, 8190, 8191, 8192, 8193, 8291], device="cuda")
    chunks = [(8100, 8292), (4990, 5200)]
    given = (q, k, v, last, chunks, 128**-0.5)
    whole, decoded, parts = every_way(*given, True, monkeypatch)
    other, plain_decoded, plain_parts = every_way(*given, False, monkeypatch)
    for index in range(2):
        assert same_bits(whole[index], other[index])
        for each in (decoded, plain_decoded):
            assert same_bits(each[index], whole[index][last])
        for (begin, end), *both in zip(chunks, parts, plain_parts, strict=True):
            assert all(same_bits(each[index], whole[index][begin:end]) for each in both), begin
    torch.testing.assert_close(whole[0][last].double(), exact(q[last], k, v, last, 128**-0.5)[0], atol=0.02, rtol=0.02)


def test_a_row_that_leaps_leaves_the_bits_of_its_neighbours(monkeypatch):
    """Queries of one block of a prompt, and heads of one decoding sequence; the row itself has the same bits, too."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(LENGTH, n, 128, device="cuda", generator=generator).bfloat16() for n in (8, 2, 2))
    q[..., 0], k[..., 0] = 0, leaps(200, 1900).cuda().bfloat16()[:, None]
    other = q.clone()
    other[2000, 1, 0], other[300, 7, 0] = 8, 8
    last = torch.tensor([300, 1999, 2000, 2001], device="cuda")
    calm, leapt, plain = (
        every_way(x, k, v, last, [(1950, 2010)], 0.125 * math.log(2), gluon, monkeypatch)
        for x, gluon in ((q, True), (other, True), (other, False))
    )
    changed = torch.zeros(LENGTH, 8, dtype=torch.bool, device="cuda")
    changed[2000, 1] = changed[300, 7] = True
    for index in range(2):
        assert same_bits(calm[0][index][~changed], leapt[0][index][~changed])
        assert not (calm[0][index][changed] == leapt[0][index][changed]).all()
        for found in (leapt, plain):
            assert same_bits(found[0][index], leapt[0][index])
            assert same_bits(found[1][index], leapt[0][index][last])
            assert same_bits(found[2][0][index], leapt[0][index][1950:2010])
