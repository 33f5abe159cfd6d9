"""A rank's coordinates."""

from __future__ import annotations

import torch

from rlloop.parallel.context import ParallelContext
from rlloop.parallel.layout import Layout

CPU = torch.device("cpu")


def test_a_context_is_one_rank_unless_told_otherwise() -> None:
    assert set(ParallelContext(CPU).coordinates.values()) == {0}
    assert ParallelContext(CPU, Layout(dp_shard=2, tp=2), rank=3).coordinates["dp_shard"] == 1
