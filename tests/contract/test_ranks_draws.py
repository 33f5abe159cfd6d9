"""Ranks that share a vocabulary draw where their logits lie: the tokens and logprobs of one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlloop import Engine, SamplingParams
from rlloop.numerics.kernels.cpu import backend
from rlloop.numerics.layout import VOCABULARY_BLOCK
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from tests.support.rank_models import CPU, model
from tests.support.ranks import run_ranks
from tests.support.traffic import bits

Samples = list[tuple[list[int], list[int], list[int]]]


def sampled(context: ParallelContext | None, vocabulary: int) -> Samples:
    prompts = [[3 + i, 40, vocabulary - 1 - i] for i in range(9)]
    sampling = [SamplingParams(max_tokens=5, seed=i) for i in range(9)]
    return [bits(each) for each in Engine(model(context, {"vocab_size": vocabulary})).generate(prompts, sampling)]


def in_parts(ranks: int, vocabulary: int) -> tuple[Samples, int]:
    """Samples, and how many draws were in parts."""
    calls = []

    def sample_part(
        logits: Tensor, seeds: Tensor, positions: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor,
        first: int, gather: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The CPU's `sample`, which reads whole rows: what is gathered is not measures of blocks, but the blocks."""
        calls.append(len(logits))
        count, size = logits.shape
        blocks = pad(logits, (0, -size % VOCABULARY_BLOCK), value=-torch.inf).view(count, -1, VOCABULARY_BLOCK, 1)
        whole = gather(blocks.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).reshape(count, -1)
        ids, logprobs, _ = backend.sample(whole, seeds, positions, settings, banned_start, banned_ids)
        own = (ids >= first) & (ids < first + size)
        return torch.where(own, ids, -1), torch.where(own, logprobs, torch.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "sample_part", sample_part)
        return sampled(join(CPU, Layout(tp=ranks)), vocabulary), len(calls)


@pytest.mark.parametrize(("ranks", "vocabulary", "draws"), [(2, 16_368, 5), (3, 12_272, 5), (2, 16_370, 0)])
def test_ranks_draw_what_one_rank_draws(ranks: int, vocabulary: int, draws: int) -> None:
    alone = sampled(None, vocabulary)
    assert len({token for ids, _, _ in alone for token in ids}) > 30
    for found, parts in run_ranks(ranks, in_parts, ranks, vocabulary):
        assert found == alone
        assert parts == draws  # rows that do not begin where vectors can be loaded are exchanged
