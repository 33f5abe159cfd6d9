"""Copies between ranks, and the groups of a layout."""

from itertools import product

import pytest
import torch

from rlloop.numerics.tree import TreeSum
from rlloop.parallel.collectives import SMALL, Ranks, buckets
from rlloop.parallel.context import join
from rlloop.parallel.cut import share, shares
from rlloop.parallel.layout import Layout
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def copies():
    context = join(CPU, Layout(tp=3))
    tp, found = context.tp, {}
    rows = [torch.arange(3 * n, dtype=torch.float32).view(n, 3) + 100 * rank for rank, n in enumerate((2, 3, 4))]
    mine = rows[tp.rank]
    for kind in KINDS:
        found[f"rows {kind}"] = tp.gather(mine.to(kind), 0, [2, 3, 4]).equal(torch.cat(rows).to(kind))
        columns = [part.T.to(kind) for part in rows]
        found[f"columns {kind}"] = tp.gather(columns[tp.rank], -1, [2, 3, 4]).equal(torch.cat(columns, -1))
    found["equal"] = tp.gather(mine[:2]).equal(torch.cat([part[:2] for part in rows]))
    got = tp.exchange(mine, [1, 0, len(mine) - 1], [[1, 1, 1], [0, 0, 0], [1, 2, 3]][tp.rank])
    wanted = torch.cat([[part[:1], part[1:1], part[1:]][tp.rank] for part in rows])
    found["exchange"] = got.equal(wanted)
    for sizes in ([2, 3, 4], [2, 2, 2], [0, 4, 1]):
        shared = torch.zeros(sum(sizes), 3)
        part = shared.split(sizes)[tp.rank]
        part.copy_(rows[tp.rank][:1].expand_as(part))
        expected = torch.cat([each[:1].expand(size, 3) for each, size in zip(rows, sizes, strict=True)])
        found[f"share_rows {sizes}"] = tp.share_rows(shared, sizes).equal(expected)
    shared = []
    for at, (kind, sizes) in enumerate(product(KINDS, ([2, 3, 4], [2, 2, 2], [0, 4, 1], [0, 0, 0]))):
        whole = torch.arange(3 * sum(sizes)).view(-1, 3).mul(at + 1).to(kind)
        filled = torch.zeros_like(whole)
        filled.split(sizes)[tp.rank].copy_(whole.split(sizes)[tp.rank])
        shared.append((filled, whole, sizes))
    tp.share_all_rows([(filled, sizes) for filled, _, sizes in shared])
    found["share_all_rows"] = all(filled.equal(whole) for filled, whole, _ in shared)
    found["broadcast"] = tp.broadcast(rows[tp.rank][:2].clone(), 1).equal(rows[1][:2])
    found["objects"] = tp.gather_objects({"rank": tp.rank}) == [{"rank": r} for r in range(3)]
    found["object"] = tp.broadcast_object(tp.rank, 2) == 2
    return found


@pytest.mark.slow
def test_copies_have_the_senders_bits():
    for found in run_ranks(3, copies):
        assert all(found.values()), found


def groups():
    context = join(CPU, Layout(dp_shard=2, tp=2, ep=4))
    half = join(CPU, Layout(tp=2))
    names = ("dp_shard", "tp", "dp", "ep", "world", "cp")
    found = {name: (context.ranks(name).size, context.ranks(name).rank) for name in names}
    members = {name: context.ranks(name).gather_objects(context.rank) for name in names}
    return context.coordinates, found, members, (half.rank, half.first, half.tp.gather_objects(half.first + half.rank))


@pytest.mark.slow
def test_each_axis_has_its_group():
    results = run_ranks(4, groups)
    for rank, (coordinates, found, members, half) in enumerate(results):
        assert (coordinates["dp_shard"], coordinates["tp"]) == divmod(rank, 2)
        assert found == {
            "dp_shard": (2, rank // 2), "tp": (2, rank % 2), "dp": (2, rank // 2), "ep": (4, rank), "world": (4, rank),
            "cp": (1, 0),
        }  # fmt: skip
        assert members["tp"] == [rank - rank % 2, rank - rank % 2 + 1]
        assert members["dp"] == [rank % 2, rank % 2 + 2]
        assert half == (rank % 2, rank - rank % 2, [rank - rank % 2, rank - rank % 2 + 1])


def test_one_rank_needs_no_network():
    x = torch.ones(2, 3)
    assert Ranks().gather(x, 1) is x
    assert Ranks().exchange(x, [2], [2]) is x
    assert Ranks().gather_objects(5) == [5]


def test_small_tensors_travel_with_others_of_their_kind():
    assert buckets([1, SMALL + 1, 2, 3, 2 * SMALL], "aabba") == [[1], [4], [0], [2, 3]]
    assert buckets([SMALL] * 20) == [list(range(16)), [16, 17, 18, 19]]
    assert buckets([]) == []


def test_shares_cover_all():
    for count, ranks in ((7, 3), (2, 4), (0, 2), (60, 8)):
        ranges = [share(count, ranks, rank) for rank in range(ranks)]
        assert [index for begin, end in ranges for index in range(begin, end)] == list(range(count))
        assert shares(count, ranks) == [end - begin for begin, end in ranges]
        assert max(shares(count, ranks)) - min(shares(count, ranks)) <= 1


def test_tree_sum_is_a_function_of_the_index():
    terms = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 1.0, 3.0)]
    counter = TreeSum()
    for term in terms:
        counter.push(term.clone())
    a, b, c, d, e = terms
    assert counter.total().equal(((a + b) + (c + d)) + e)
    assert counter.total() is None
