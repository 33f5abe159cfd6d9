"""Attention of many queries, warpgroup by warpgroup, without a GPU: rings, barriers, pages, segments, joins."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlloop.numerics.kernels.triton import prefill
from tests.support.emulated_warps import Kernel


@pytest.fixture
def attend(monkeypatch):
    monkeypatch.setattr(prefill, "processors", lambda device: 3)

    def run(q: Tensor, k: Tensor, v: Tensor, lengths, contexts, page: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Queries [T, H, D] of sequences, whose keys so far are in pages in disorder."""
        monkeypatch.setattr(prefill, "_prefill", Kernel(seed))
        ends = [length + context for length, context in zip(lengths, contexts, strict=True)]
        blocks = max(-(-end // page) for end in ends)
        pages = torch.randperm(blocks * len(lengths), generator=torch.Generator().manual_seed(3)).view(-1, blocks)
        stores = [torch.full((blocks * len(lengths) * page, *x.shape[2:]), math.nan).bfloat16() for x in (k, v)]
        for at, end in enumerate(ends):
            slots = (pages[at, torch.arange(end) // page]) * page + torch.arange(end) % page
            for held, given in zip(stores, (k, v), strict=True):
                held[slots] = given[at, :end]
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        start = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        step = stores[1].shape[1] * stores[1].shape[2]
        prefill.run(
            q, *stores, step, start, torch.tensor(contexts), pages * page, page, q.shape[2] ** -0.5 * math.log2(math.e),
            out, lse,
        )  # fmt: skip
        return out, lse

    return run


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(q: Tensor, k: Tensor, v: Tensor, lengths, contexts) -> Tensor:
    rows, share = [], q.shape[1] // k.shape[2]
    for at, (part, context) in enumerate(zip(q.double().split(lengths), contexts, strict=True)):
        end = len(part) + context
        keys, numbers = (x[at, :end].double().repeat_interleave(share, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", part, keys) * q.shape[2] ** -0.5
        seen = torch.arange(end)[None] <= torch.arange(len(part))[:, None] + context
        rows.append(torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -math.inf).softmax(-1), numbers))
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("lengths", "contexts", "heads", "groups", "page"),
    [
        ([70, 1, 130], [0, 0, 0], 2, 1, 16),
        ([3, 40], [5, 150], 4, 2, 64),
        ([20], [2100], 2, 2, 32),  # two joins
        ([90], [1000], 1, 1, 8),  # queries before and behind the end of a segment
    ],
)
def test_values(attend, lengths, contexts, heads, groups, page) -> None:
    width, longest = 64, max(a + b for a, b in zip(lengths, contexts, strict=True))
    q = drawn(sum(lengths), heads, width, seed=0)
    k, v = (drawn(len(lengths), longest, groups, width, seed=seed) for seed in (1, 2))
    made, lse = attend(q, k, v, lengths, contexts, page)
    torch.testing.assert_close(made.double(), exact(q, k, v, lengths, contexts), atol=0.02, rtol=0.02)
    for seed in (1, 2):  # other orders of the warpgroups
        again, same = attend(q, k, v, lengths, contexts, page, seed)
        assert torch.equal(again, made)
        assert torch.equal(same, lse)
