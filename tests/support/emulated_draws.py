"""Draws from parts of a vocabulary by the kernels for GPUs: the bits of draws from whole rows."""

from __future__ import annotations

import pytest
import torch

from rlloop.numerics.kernels.triton.backend import sample, sample_part
from rlloop.numerics.layout import VOCABULARY_BLOCK, LogitsProcessing
from rlloop.numerics.operators.distribution import dense
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.division import in_blocks

ROWS = 12


@pytest.mark.parametrize(("vocabulary", "ranks"), [(16_368, 2), (12_272, 3), (20_480, 5)])
def test_parts_draw_what_whole_rows_draw(vocabulary: int, ranks: int) -> None:
    logits = 3 * torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[0, 5], logits[1], logits[2, -1], logits[3, :5000] = torch.nan, -torch.inf, torch.inf, -torch.inf
    seeds, positions = torch.arange(ROWS) * 2**40 + 17, torch.arange(ROWS) + 2**33
    plain = dense(LogitsProcessing(), vocabulary, seeds)
    ids, logprobs, raw = sample(logits, seeds, positions, *plain)
    division = in_blocks(vocabulary, Ranks(ranks), VOCABULARY_BLOCK)
    assert division is not None
    parts = [each for (each,) in division.ranges]
    measured: list[torch.Tensor] = []

    def keep(own: torch.Tensor) -> torch.Tensor:
        measured.append(own)
        return own

    results = []
    for gather in (keep, lambda own: torch.cat(measured, 3)):
        results = [
            sample_part(logits[:, begin:end].contiguous(), seeds, positions, *plain, begin, gather)
            for begin, end in parts
        ]
    found = torch.stack([each for each, _ in results])
    owners = (found >= 0).sum(0)
    assert owners.tolist() == [0, 0, 0] + [1] * (ROWS - 3)
    assert len(found.argmax(0)[3:].unique()) > 1
    assert found.amax(0).equal(ids)
    for (begin, end), (own, scores) in zip(parts, results, strict=True):
        mine = own >= 0
        assert ((own[mine] >= begin) & (own[mine] < end)).all()
        assert scores[mine].view(torch.int32).equal(logprobs[mine].view(torch.int32))
        assert scores[mine].view(torch.int32).equal(raw[mine].view(torch.int32))
        assert scores[~mine].isnan().all()
