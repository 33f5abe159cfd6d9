"""Division of heads, rows and sequences over ranks, and each rank's part of a tensor."""

from itertools import chain

import pytest
import torch

from rlloop.parallel.collectives import Ranks
from rlloop.parallel.division import TILES, Division, end_to_end, evenly, heads_over, in_blocks, in_tiles, spans, taken


def of(size: int, rank: int = 0) -> Ranks:
    return Ranks(size, rank)


def parts(division: Division) -> list[list[int]]:
    return [[i for begin, end in ranges for i in range(begin, end)] for ranges in division.ranges]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize(("queries", "groups"), [(8, 8), (8, 2), (8, 1), (12, 4), (6, 3), (32, 8)])
def test_every_query_lies_beside_the_keys_that_it_reads(ranks: int, queries: int, groups: int) -> None:
    heads = heads_over(queries, groups, of(ranks))
    assert heads is not None
    each = queries // groups
    assert sorted(chain(*parts(heads[0]))) == list(range(queries))
    assert {*chain(*parts(heads[1]))} == set(range(groups))
    for own, read in zip(parts(heads[0]), parts(heads[1]), strict=True):
        assert own
        assert len(own) % len(read) == 0, "queries are grouped alike, as kernels need them"
        assert [read[i * len(read) // len(own)] for i in range(len(own))] == [head // each for head in own]
    assert heads[1].repeats == (groups < ranks)


def test_shares_of_rows_are_whole_tiles_where_ranks_have_about_as_much() -> None:
    for count, ranks, unit in ((12288, 3, 64), (4096, 4, 64), (151936, 2, 64), (1024, 4, 16), (80, 3, 1), (7, 2, 1)):
        division = in_tiles(count, of(ranks))
        assert division is not None
        assert unit in TILES
        assert sum(division.sizes) == count
        assert max(division.sizes) - min(division.sizes) <= unit
        assert division.aligned(unit)
    assert evenly(5, of(1)) is None


@pytest.mark.parametrize(
    ("count", "ranks", "sizes"),
    [
        (151_936, 2, [19 * 4096, 151_936 - 19 * 4096]),
        (151_936, 4, [9 * 4096, 10 * 4096, 9 * 4096, 151_936 - 28 * 4096]),
        (40_000, 10, [4096] * 9 + [40_000 - 9 * 4096]),
    ],
)
def test_a_vocabulary_is_divided_at_its_blocks(count: int, ranks: int, sizes: list[int]) -> None:
    division = in_blocks(count, of(ranks), 4096)
    assert division is not None
    assert division.sizes == sizes
    assert division.aligned(4096)


@pytest.mark.parametrize(("count", "ranks"), [(3 * 4096, 2), (301, 2), (8 * 4096, 9)])
def test_a_vocabulary_of_few_blocks_is_divided_evenly(count: int, ranks: int) -> None:
    blocks, tiles = in_blocks(count, of(ranks), 4096), in_tiles(count, of(ranks))
    assert blocks is not None
    assert tiles is not None
    assert blocks.ranges == tiles.ranges


def test_parts_of_a_fused_projection_keep_their_order() -> None:
    first, second = evenly(4, of(2, 1)), evenly(6, of(2, 1))
    assert first is not None
    assert second is not None
    fused = end_to_end([first.times(2), second])
    assert parts(fused) == [[0, 1, 2, 3, 8, 9, 10], [4, 5, 6, 7, 11, 12, 13]]
    whole = torch.arange(14)
    assert fused.take(whole, 0).tolist() == parts(fused)[1]
    held = torch.tensor([*chain(*parts(fused))])
    assert fused.ordered(held, 0).equal(whole)
    assert not fused.aligned(2)


def test_of_copies_the_first_counts() -> None:
    division = Division(of(2), 3, (((0, 2),), ((1, 2), (1, 3))))
    assert division.repeats
    assert division.sizes == [2, 3]
    assert division.ordered(torch.tensor([10, 11, 91, 92, 12]), 0).tolist() == [10, 11, 12]
    assert not division.aligned(2)


def test_sequences_go_to_ranks_in_order_and_by_cost() -> None:
    assert spans([1, 1, 2], 2) == [(0, 2), (2, 3)]
    assert spans([5.0], 3)[0][0] == 0
    for costs in ([9, 1, 1, 1], [1] * 7, [4, 4], []):
        found = spans(costs, 3)
        assert [i for begin, end in found for i in range(begin, end)] == list(range(len(costs)))


def test_one_rank_has_the_tensor_itself() -> None:
    x = torch.ones(2, 3)
    assert taken(x, None) is x
