"""Where parts of vLLM's tensor-parallel ranks lie in whole weights."""

from __future__ import annotations

import pytest

from rlloop.errors import SyncError
from rlloop.rollout.vllm.weights import place


@pytest.mark.parametrize(
    ("whole", "shapes", "begins", "dim"),
    [
        ((8, 4), [(8, 4)] * 2, [0, 0], 0),  # each has all
        ((8, 4), [(4, 4)] * 2, [0, 4], 0),  # rows
        ((8, 4), [(8, 1)] * 4, [0, 1, 2, 3], 1),  # columns
        ((160, 4), [(96, 4), (64, 4)], [0, 96], 0),  # a vocabulary, padded for vLLM's ranks
        ((64, 4), [(64, 4), (0, 4)], [0, 64], 0),  # of which one has nothing
        ((6, 4), [(3, 4)] * 4, [0, 0, 3, 3], 0),  # two key-value heads on four ranks
        ((8,), [(2,)] * 4, [0, 2, 4, 6], 0),
    ],
)
def test_parts_in_order_of_rank(whole, shapes, begins, dim):
    found = [place(whole, shapes, rank) for rank in range(len(shapes))]
    assert [begin for _, begin in found] == begins
    assert all(at == dim for (at, _), shape in zip(found, shapes, strict=True) if shape != whole)


@pytest.mark.parametrize(
    "shapes", [[(3, 4)] * 2, [(4, 2)] * 2, [(4, 4)], [(4, 4), (4, 2)]], ids=["few", "both", "one", "unlike"]
)
def test_parts_that_make_up_no_weight(shapes):
    with pytest.raises(SyncError, match="make up no weight of shape"):
        place((8, 4), shapes, 0)
