"""A rank's coordinates, and norms over tensors."""

from __future__ import annotations

import pytest
import torch

from rlloop.parallel.context import ParallelContext
from rlloop.parallel.layout import Layout

CPU = torch.device("cpu")


def test_a_context_is_one_rank_unless_told_otherwise() -> None:
    assert set(ParallelContext(CPU).coordinates.values()) == {0}
    assert ParallelContext(CPU, Layout(dp_shard=2, tp=2), rank=3).coordinates["dp_shard"] == 1


def test_a_norm_is_over_all_tensors_and_refuses_to_leave_out_other_ranks() -> None:
    shards = [torch.full((2, 2), 1.0), torch.full((5,), 2.0), torch.zeros(0)]
    assert ParallelContext(CPU).total_norm(shards).item() == pytest.approx(24**0.5)
    with pytest.raises(AssertionError, match="several ranks"):
        ParallelContext(CPU, Layout(dp_replicate=2)).total_norm(shards)
