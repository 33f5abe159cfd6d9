"""The experiment that everything rests on: tiles leave a matrix product's bits alone, splitting K does not.

Should this fail on another GPU type, Triton or torch, zero train-inference KL does not hold there.
"""

from itertools import product

import pytest
import torch

from rlloop.numerics.probe import same_bits

pytest.importorskip("triton", reason="the tiles are Triton's")

SHAPES = [(2048, 2048), (4096, 4096), (1024, 6144), (3072, 1024)]  # K, N


def draw(rows, width, outputs, dtype):
    generator = torch.Generator("cuda").manual_seed(rows + width)
    return [torch.randn(n, width, dtype=dtype, device="cuda", generator=generator) for n in (rows, outputs)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_every_tile_has_the_same_bits(width, outputs, dtype):
    from rlloop.numerics.kernels.triton.linear import DEEP, HALF, Tiles, chain

    x, weight = draw(200, width, outputs, dtype)
    first = chain(x, weight, None, torch.float32, Tiles(64, 64, 64, False, 4, 2))
    tried = [tiles for *_, tiles in HALF] + [DEEP]
    tried += [Tiles(16, 16, 32, False, 4, 2), Tiles(32, 64, 128, False, 2, 2), Tiles(128, 128, 64, False, 8, 3)]
    tried += [Tiles(16, 128, 128, True, 4, 3), Tiles(128, 64, 32, True, 4, 2), Tiles(16, 16, 64, True, 1, 2)]
    for tiles in tried:
        assert same_bits(chain(x, weight, None, torch.float32, tiles), first), (
            f"{tiles} has other bits on {torch.cuda.get_device_name()}: no zero train-inference KL here"
        )


@pytest.fixture
def few_rows():
    from rlloop.numerics.kernels.triton.launch import gluon_runs

    if not gluon_runs(torch.device("cuda", 0)):
        pytest.skip("the kernel of few rows is Hopper's")
    from rlloop.numerics.kernels.triton import small_batch_linear as few_rows

    return few_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tile_of_few_rows_has_the_same_bits(few_rows, dtype):
    from rlloop.numerics.kernels.triton import small_batch_tiles
    from rlloop.numerics.kernels.triton.linear import Tiles, chain

    tried = {tiles for *_, tiles in small_batch_tiles.TABLE if tiles}
    tried |= {few_rows.Tiles(16, 16, 64, False, 3), few_rows.Tiles(32, 32, 256, False, 2)}
    for rows, (width, outputs) in product((1, 8, 9, 16, 33, 64, 200), [*SHAPES, (1000, 300), (40, 24)]):
        x, weight = draw(rows, width, outputs, dtype)
        bias = weight[:, 0].contiguous()
        for added, made in ((bias, dtype), (None, torch.float32))[: 1 + (dtype == torch.bfloat16)]:
            first = chain(x, weight, added, made, Tiles(64, 64, 64, False, 4, 2))
            assert same_bits(chain(x, weight, added, made), first), (rows, width, outputs)
            for tiles in tried:
                out = torch.full((rows, outputs), torch.nan, dtype=made, device="cuda")
                few_rows.product(x, weight, added, out, tiles)
                assert same_bits(out, first), (tiles, rows, width, outputs)


def test_a_product_that_starts_early_waits_for_its_factors(few_rows):
    """Launches overlap: the one before may still be writing what this one reads, be it rows or weights."""
    from rlloop.numerics.kernels.triton import small_batch_tiles
    from rlloop.numerics.kernels.triton.linear import Tiles, chain

    generator = torch.Generator("cuda").manual_seed(0)
    weights = torch.randn(8, 2048, 2048, dtype=torch.bfloat16, device="cuda", generator=generator) / 45
    x = torch.randn(16, 2048, dtype=torch.bfloat16, device="cuda", generator=generator)
    for copied in (False, True):
        last, copy = x, torch.zeros_like(weights[0])
        for weight in weights:
            last = chain(last, weight, None, torch.bfloat16, Tiles(64, 64, 64, False, 4, 2))
        rows, tiles = [torch.empty_like(x) for _ in weights], small_batch_tiles.tiles_for(16, 2048, 2048)
        few_rows.product(x, weights[0], None, rows[0], tiles)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i, weight in enumerate(weights):
                given = copy.copy_(weight) if copied else weight
                few_rows.product(rows[i - 1] if i else x, given, None, rows[i], tiles)
        for _ in range(50):
            for each in rows:
                each.fill_(torch.nan)
            graph.replay()
            assert same_bits(rows[-1], last), copied


def test_every_float32_tile_has_the_same_bits():
    from rlloop.numerics.kernels.triton.linear import FLOAT32, Tiles, chain

    x, weight = draw(100, 1000, 300, torch.float32)
    first = chain(x, weight, None, torch.float32, Tiles(32, 32, 32, False, 4, 1))
    for tiles in (*[tiles for *_, tiles in FLOAT32], Tiles(16, 16, 16, False, 2, 1), Tiles(64, 32, 64, True, 8, 1)):
        assert same_bits(chain(x, weight, None, torch.float32, tiles), first), tiles


def test_splitting_k_changes_bits():
    """The test's inverse: a sum split over K, which the contract forbids, has other bits."""
    from rlloop.numerics.kernels.triton.linear import chain

    x, weight = draw(64, 4096, 512, torch.bfloat16)
    whole = chain(x, weight, None, torch.float32)
    first, second = (chain(x[:, k : k + 2048], weight[:, k : k + 2048], None, torch.float32) for k in (0, 2048))
    assert not same_bits(whole, first + second)


def test_the_vendor_s_product_is_used_only_where_it_has_our_bits():
    from rlloop.numerics.kernels.triton import linear

    used = 0
    for rows, (width, outputs) in product((128, 256, 2048), SHAPES):
        x, weight = draw(rows, width, outputs, torch.bfloat16)
        agrees = linear.vendor_agrees(rows, outputs, width, torch.bfloat16, torch.bfloat16, 0)
        ours = linear.chain(x, weight, None, torch.bfloat16)
        assert same_bits(linear.vendor(x, weight, torch.bfloat16), ours) is agrees
        assert same_bits(linear.product(x, weight, None, torch.bfloat16), ours)
        used += agrees
    print(f"{used} of {3 * len(SHAPES)} shapes by cuBLAS")


def test_products_of_the_rows_that_steps_are_padded_to_have_our_bits():
    from rlloop.numerics.kernels.triton import linear

    used, numbers = 0, (72, 77, 104, 144, 160, 208, 272, 288, 352, 448, 640, 1000)
    for rows, (width, outputs) in product(numbers, SHAPES):
        x, weight = draw(rows, width, outputs, torch.bfloat16)
        ours = linear.chain(x, weight, None, torch.bfloat16)
        assert same_bits(linear.product(x, weight, None, torch.bfloat16), ours), (rows, width, outputs)
        used += linear.vendor_agrees(rows, outputs, width, torch.bfloat16, torch.bfloat16, 0)
    print(f"{used} of {len(numbers) * len(SHAPES)} shapes by cuBLAS")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_vendor_s_product_with_a_bias_is_used_only_where_it_has_our_bits(dtype):
    from rlloop.numerics.kernels.triton import linear

    used, shapes = 0, [(1152, 3456), (1152, 1152), (1152, 4304), (4304, 1152), (1536, 1152), (4608, 4096)]
    for rows, (width, outputs) in product((128, 1024, 2048, 4096 + 77), shapes):
        x, weight = draw(rows, width, outputs, dtype)
        bias = weight[:, 0].contiguous()
        ours = linear.chain(x, weight, bias, dtype)
        assert same_bits(linear.product(x, weight, bias, dtype), ours), (rows, width, outputs)
        shifted = torch.empty(outputs + 1, dtype=dtype, device="cuda")[1:].copy_(bias)  # no address for cuBLAS
        assert same_bits(linear.product(x, weight, shifted, dtype), ours)
        agrees = linear.vendor_agrees(rows, outputs, width, dtype, dtype, 0, True)
        assert not agrees or same_bits(linear.vendor(x, weight, dtype, bias=bias), ours)
        used += agrees
        print(f"{rows} x {width} -> {outputs}, {dtype}: {'cuBLAS' if agrees else 'ours'}")
    print(f"{used} shapes by cuBLAS")


def test_a_sum_that_is_rounded_before_its_bias_is_found(monkeypatch):
    from rlloop.numerics.kernels.triton import linear

    def twice(x, weight, dtype, out=None, bias=None):
        return linear.chain(x, weight, None, dtype) + bias

    monkeypatch.setattr(linear, "vendor", twice)
    monkeypatch.setattr(linear, "_agreed", {})
    assert not linear.vendor_agrees(256, 1024, 512, torch.bfloat16, torch.bfloat16, 0, True)


def test_the_trial_tells_orders_apart_that_ordinary_numbers_hide():
    """Sixteen bits of an ordinary sum mostly survive another order; those of a sum that cancels do not."""
    from rlloop.numerics.kernels.triton.linear import _cancelling, chain

    def same(x, weight):
        """The share of outputs that two halves of K, added, have in common with one chain."""
        first, second = (chain(x[:, k : k + 32], weight[:, k : k + 32], None, torch.float32) for k in (0, 32))
        return ((first + second).bfloat16() == chain(x, weight, None, torch.bfloat16)).float().mean()

    generator = torch.Generator("cuda").manual_seed(0)
    assert same(*draw(128, 64, 40, torch.bfloat16)) > 0.99
    assert same(*_cancelling(128, 40, 64, torch.bfloat16, generator)) < 0.9


def test_an_address_leaves_the_bits_alone():
    """The compiler's knowledge of an address's alignment decides how it lays out a sum."""
    from rlloop.numerics.kernels.triton.norms import rms_norm

    base = torch.randn(1 + 9 * 1001, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    gain = torch.ones(1001, device="cuda")
    x = base[1:].view(9, 1001)
    assert same_bits(rms_norm(x, gain, 1e-6, None)[0], rms_norm(x.clone(), gain, 1e-6, None)[0])


def test_a_decoding_program_sums_as_a_prefilling_one():
    """Each warp has whole queries to itself; where two share them, sums have another order, and this test sees it."""
    from rlloop.numerics.kernels.triton import attention

    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(700, n, 128, dtype=torch.bfloat16, device="cuda", generator=generator) for n in (16, 8, 8))
    at = torch.arange(700, device="cuda")
    alone = (torch.arange(701, device="cuda"), at, torch.zeros(700, 1, dtype=torch.int64, device="cuda"), 700, 0.1)
    together = (torch.tensor([0, 700], device="cuda"), at[:1], at[:1, None], 700, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        whole = attention.attention(q, k, v, *together)[0]
        for tiles, holds in ((attention.DECODE, True), (attention.MANY, True), (attention.Tiles(32, 2, 2), False)):
            patch.setattr(attention, "DECODE", tiles)
            assert same_bits(attention.attention(q, k, v, *alone)[0], whole) is holds, tiles
        patch.setattr(attention, "MANY", attention.LONG)
        assert same_bits(attention.attention(q, k, v, *together)[0], whole)
