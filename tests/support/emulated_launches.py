"""One launch with an adapter: its numbers are those of the definition, tile by tile, without a GPU."""

import pytest
import torch

from rlloop.numerics.kernels.triton import small_batch_linear as few
from rlloop.numerics.kernels.triton.small_batch_tiles import Tiles
from rlloop.numerics.layout import AdapterSlots, Factors
from tests.support.emulated_gluon import Kernel, multiplied

WIDTH, SLOTS = 328, 3


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(few, "_few_rows", Kernel())
    monkeypatch.setattr(few, "processors", lambda device: 132)


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def chain(x, weight, z=None, up=None):
    sums = multiplied(x, weight.T, torch.zeros(len(x), len(weight)))
    return sums if z is None else multiplied(z, up.T, sums)


@pytest.mark.parametrize(
    ("rows", "rank", "ahead", "tiles"),
    [
        (1, 8, True, Tiles(8, 64, 256, True, 5)),
        (1, 128, False, Tiles(8, 64, 256, True, 5)),
        (11, 40, True, Tiles(8, 64, 64, True, 3)),
        (70, 24, True, Tiles(32, 16, 128, False, 2, part=16)),
        (130, 40, True, Tiles(128, 64, 64, True, 4)),
        (3, 32, False, Tiles(8, 64, 64, True, 3, z_rows=8, part=8)),
        (37, 64, True, Tiles(32, 32, 128, False, 3, part=8, z_rows=16)),
        (1, 8, True, Tiles(8, 32, 256, True, 4, part=0)),
        (11, 32, False, Tiles(8, 16, 64, True, 3, part=0)),
        (37, 24, True, Tiles(16, 64, 128, True, 3, part=0)),
        (37, 32, True, Tiles(16, 16, 256, False, 2, part=0)),
        (70, 16, False, Tiles(64, 32, 128, False, 3, part=0)),
        (130, 32, True, Tiles(128, 32, 64, True, 4, part=0)),
        (3, 128, True, Tiles(8, 64, 64, True, 3, part=0)),
    ],
)
def test_one_launch_has_the_sums_of_the_definition(rows, rank, ahead, tiles):
    sizes = (128, 64, 64)
    weights = [drawn(n, WIDTH, seed=i) for i, n in enumerate(sizes)]
    factors = tuple(
        Factors(
            drawn(SLOTS, rank, WIDTH, seed=10 + i), drawn(SLOTS, n, rank, seed=20 + i), torch.tensor([rank] * SLOTS)
        )
        for i, n in enumerate(sizes)
    )
    x, slots = drawn(rows, WIDTH, seed=30), torch.where(torch.arange(rows) % 3 == 2, 2, 1)
    which = AdapterSlots({}, slots, single=True)

    def wanted(i):
        z = torch.where((slots == 1)[:, None], chain(x, factors[i].down[1]).bfloat16(), 0)
        return chain(x, weights[i], z, factors[i].up[1]).bfloat16()

    def adapter(*of):
        return few.Adapter(tuple(factors[i] for i in of), which, slots, torch.tensor([1]), ahead)

    for one, i in zip(few.products(x, tuple(weights), tiles, adapter(0, 1, 2)), range(3), strict=True):
        assert torch.equal(one, wanted(i))
    out, bias = torch.empty(rows, sizes[0], dtype=x.dtype), drawn(sizes[0], seed=40)
    few.product(x, weights[0], bias, out, tiles, adapter=adapter(0))
    z = torch.where((slots == 1)[:, None], chain(x, factors[0].down[1]).bfloat16(), 0)
    assert torch.equal(out, (chain(x, weights[0], z, factors[0].up[1]) + bias.float()).bfloat16())
    base = few.products(x, tuple(weights), tiles)
    assert all(torch.equal(each, chain(x, weight).bfloat16()) for each, weight in zip(base, weights, strict=True))
    if tiles.swapped:
        out = torch.empty(rows, sizes[1], dtype=x.dtype)
        few.gated(x, *weights[1:], out, tiles, adapter=adapter(1, 2))
        gate, up = (wanted(i).float() for i in (1, 2))
        assert torch.equal(out, (gate / (1.0 + torch.exp(-gate)) * up).bfloat16())


@pytest.mark.parametrize("rank", [8, 16, 24, 32])
@pytest.mark.parametrize("tiles", [Tiles(8, 16, 256, True, 6, part=0), Tiles(16, 32, 128, False, 3, part=0)])
def test_rows_that_all_have_the_adapter(rank, tiles):
    weight, x = drawn(80, WIDTH, seed=0), drawn(19, WIDTH, seed=1)
    factors = Factors(drawn(1, rank, WIDTH, seed=2), drawn(1, 80, rank, seed=3), torch.tensor([rank]))
    out = torch.empty(19, 80, dtype=x.dtype)
    few.product(x, weight, None, out, tiles, adapter=few.Adapter((factors,), AdapterSlots({}), None, None, True))
    assert torch.equal(out, chain(x, weight, chain(x, factors.down[0]).bfloat16(), factors.up[0]).bfloat16())


def test_a_number_that_is_no_number_is_waited_for_no_longer():
    weights, factors = drawn(64, WIDTH, seed=0), Factors(
        torch.full((1, 16, WIDTH), torch.nan).bfloat16(), drawn(1, 64, 16, seed=1), torch.tensor([16])
    )  # fmt: skip
    out, which = torch.empty(2, 64, dtype=torch.bfloat16), AdapterSlots({})
    adapter = few.Adapter((factors,), which, None, None, True)
    few.product(drawn(2, WIDTH, seed=2), weights, None, out, Tiles(8, 64, 256, True, 5), adapter=adapter)
    assert out.isnan().all()
