"""Attention of many queries, warpgroup by warpgroup, without a GPU: rings, barriers, pages, segments, joins, and blocks
that are computed anew. Bits are compared with those of the kernel for every GPU, in Triton's interpreter."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from rlloop.numerics.kernels.triton import attention, prefill
from tests.support.emulated_warps import Kernel


@pytest.fixture
def attend(monkeypatch):
    """By `prefill` with warpgroups in an order drawn by a seed, or without one by the plain kernel: (out, lse, the
    number of blocks computed anew)."""
    monkeypatch.setattr(prefill, "processors", lambda device: 3)
    monkeypatch.setattr(attention, "processors", lambda device: 2)
    monkeypatch.setattr(prefill, "TOWER_ROWS", 0)
    ran = prefill.run

    def run(
        q: Tensor, k: Tensor, v: Tensor, lengths, contexts, page: int, seed: int | None = 0, causal: bool = True,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        """Queries [T, H, D] of sequences, whose keys so far are in pages in disorder; no page: where queries are."""
        flagged = []

        def flags(*given):
            flagged.append(ran(*given))
            return flagged[0]

        monkeypatch.setattr(prefill, "run", flags)
        monkeypatch.setattr(attention, "_better_kernels", lambda device: (None, None if seed is None else prefill))
        monkeypatch.setattr(prefill, "_prefill", Kernel(seed or 0))
        ends = [length + context for length, context in zip(lengths, contexts, strict=True)]
        start = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        if page:
            blocks = max(-(-end // page) for end in ends)
            pages = torch.randperm(blocks * len(lengths), generator=torch.Generator().manual_seed(3)).view(-1, blocks)
            stores = [torch.full((blocks * len(lengths) * page, *x.shape[2:]), math.nan).to(x.dtype) for x in (k, v)]
            for at, end in enumerate(ends):
                slots = (pages[at, torch.arange(end) // page]) * page + torch.arange(end) % page
                for held, given in zip(stores, (k, v), strict=True):
                    held[slots] = given[at, :end]
            pages *= page
        else:
            pages, page = start[:-1, None], max(lengths)
            stores = [torch.cat([x[at, :end] for at, end in enumerate(ends)]) for x in (k, v)]
        out, lse = attention.attention(
            q, *stores, start, torch.tensor(contexts), pages, page, scale or q.shape[2] ** -0.5, causal=causal
        )
        return out, lse, int(flagged[0][0][1:].sum()) if flagged else 0

    return run


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(q: Tensor, k: Tensor, v: Tensor, lengths, contexts, causal: bool = True) -> Tensor:
    rows, share = [], q.shape[1] // k.shape[2]
    for at, (part, context) in enumerate(zip(q.double().split(lengths), contexts, strict=True)):
        end = len(part) + context
        keys, numbers = (x[at, :end].double().repeat_interleave(share, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", part, keys) * q.shape[2] ** -0.5
        seen = torch.arange(end)[None] <= torch.arange(len(part))[:, None] + context
        if not causal:
            seen |= True
        rows.append(torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -math.inf).softmax(-1), numbers))
    return torch.cat(rows)


def same(one: tuple, other: tuple) -> None:
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    ("lengths", "contexts", "heads", "groups", "page"),
    [
        ([70, 1, 130], [0, 0, 0], 2, 1, 16),
        ([3, 40], [5, 150], 4, 2, 64),
        ([20], [2100], 2, 2, 32),  # two joins
        ([90], [1000], 1, 1, 8),  # queries before and behind the end of a segment
        ([130, 64], [0, 0], 1, 1, 0),
    ],
)
def test_values(attend, lengths, contexts, heads, groups, page) -> None:
    width, longest = 64, max(a + b for a, b in zip(lengths, contexts, strict=True))
    q = drawn(sum(lengths), heads, width, seed=0)
    k, v = (drawn(len(lengths), longest, groups, width, seed=seed) for seed in (1, 2))
    made = attend(q, k, v, lengths, contexts, page)
    torch.testing.assert_close(made[0].double(), exact(q, k, v, lengths, contexts), atol=0.02, rtol=0.02)
    for seed in (1, 2):  # other orders of the warpgroups
        again = attend(q, k, v, lengths, contexts, page, seed)
        assert torch.equal(again[0], made[0])
        assert torch.equal(again[1], made[1])
    assert not made[2], "no sum is that large"
    same(made, attend(q, k, v, lengths, contexts, page, None))


def with_scores(scores: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Queries [rows, 1, width] and keys [1, len(scores), 1, width] of such scores, times a little noise."""
    q, k = 0.1 * drawn(rows, 1, width, seed=0), 0.1 * drawn(1, len(scores), 1, width, seed=1)
    q[..., 0], k[0, :, 0, 0] = 8, scores.bfloat16()
    return q, k


LEAPS = {
    "grows": (torch.arange(1300) / 60, 0),
    "falls": (-torch.arange(1300) / 60, 0),
    "leaps in a first tile": (torch.zeros(1300).index_fill(0, torch.tensor(50), 80.0), 0),
    "leaps in a second tile": (torch.zeros(1300).index_fill(0, torch.tensor(70), 80.0), 2),
    "leaps in a later tile": (torch.zeros(1300).index_fill(0, torch.tensor(900), 80.0), 2),
    "leaps in a later segment": (torch.zeros(1300).index_fill(0, torch.tensor(1200), 80.0), 2),
    "leaps in the last keys": (torch.zeros(1300).index_fill(0, torch.tensor(1290), 80.0), 1),
    "leaps far": (torch.zeros(1300).index_fill(0, torch.tensor(500), 3000.0), 2),
}


@pytest.mark.parametrize(("name", "width"), [*((name, 64) for name in LEAPS), ("leaps in a later tile", 128)])
def test_scores_that_grow_fall_and_leap(attend, name, width) -> None:
    """Keys of 1300 positions, of which 200 are queries: two blocks, the last of which is not full."""
    scores, anew = LEAPS[name]
    q, k = with_scores(scores, 200, width)
    v = drawn(1, 1300, 1, width, seed=2)
    parts = ([200], [1100], 16)
    made = attend(q, k, v, *parts, scale=0.125 * math.log(2))  # a score of 1 is a power of two
    assert made[2] == anew, "blocks computed anew"
    same(made, attend(q, k, v, *parts, None, scale=0.125 * math.log(2)))
    values = exact(q * (0.125 * math.log(2) * width**0.5), k, v, *parts[:2])
    torch.testing.assert_close(made[0].double(), values, atol=0.02, rtol=0.02)
    bits, lse = zip(
        *(
            attend(q[begin:end], k, v, [end - begin], [1100 + begin], 64, scale=0.125 * math.log(2))[:2]
            for begin, end in itertools.pairwise((0, 3, 90, 191, 200))
        ),
        strict=True,
    )
    assert torch.equal(torch.cat(bits), made[0]), "chunks"
    assert torch.equal(torch.cat(lse), made[1]), "chunks"


def test_a_row_that_leaps_leaves_the_bits_of_its_neighbours(attend) -> None:
    scores = torch.zeros(300).index_fill(0, torch.tensor(200), 80.0)
    q, k = with_scores(scores, 200, 64)
    v, parts = drawn(1, 300, 1, 64, seed=2), ([200], [100], 16)
    calm = q.clone()
    calm[..., 0] = 0
    other = calm.clone()
    other[150] = q[150]
    made = [attend(each, k, v, *parts) for each in (calm, other)]
    assert [each[2] for each in made] == [0, 1]
    rest = torch.arange(200) != 150
    assert torch.equal(made[0][0][rest], made[1][0][rest])
    assert torch.equal(made[0][1][rest], made[1][1][rest])
    same(made[1], attend(other, k, v, *parts, None))


@pytest.mark.parametrize("width", [64, 72])
@pytest.mark.parametrize("leap", [0.0, 80.0])
def test_towers(attend, width, leap) -> None:
    lengths = [140, 20, 1030]
    q, k, v = (drawn(3, max(lengths), 2, width, seed=seed) for seed in range(3))
    q = torch.cat([each[:length] for each, length in zip(q, lengths, strict=True)])
    q[300, 1] = 0
    q[300, 1, 0], k[2, 999, 1, 0] = 64, leap
    made = attend(q, k, v, lengths, [0, 0, 0], 0, causal=False)
    assert made[2] == (1 if leap else 0)
    same(made, attend(q, k, v, lengths, [0, 0, 0], 0, None, causal=False))
    torch.testing.assert_close(made[0].double(), exact(q, k, v, lengths, [0, 0, 0], False), atol=0.02, rtol=0.02)


def test_float16_has_a_limit_of_its_own(attend) -> None:
    """Its largest number is 65,504, and masses are multiplied in it."""
    scores = torch.zeros(300).index_fill(0, torch.tensor(200), 20.0)
    q, k = (each.half() for each in with_scores(scores, 200, 64))
    v, parts, scale = drawn(1, 300, 1, 64, seed=2).half(), ([200], [100], 16), 0.125 * math.log(2)
    made = attend(q, k, v, *parts, scale=scale)
    assert made[2] == 2
    same(made, attend(q, k, v, *parts, None, scale=scale))
    values = exact(q * (scale * 8), k, v, *parts[:2])
    torch.testing.assert_close(made[0].double(), values, atol=0.01, rtol=0.01)
