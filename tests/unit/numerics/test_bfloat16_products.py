"""Products of bfloat16: blocks of 32 terms, with AMX and without, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from rlloop.numerics.kernels.cpu import products
from rlloop.numerics.kernels.cpu.compiled import bfloat16
from rlloop.numerics.kernels.cpu.compiled.fused import gated_linear, qkv_linear
from rlloop.numerics.kernels.cpu.compiled.linear import FORWARD
from rlloop.numerics.kernels.cpu.compiled.simd import LANES, fma, load, splat, store
from rlloop.numerics.probe import same_bits

needs_amx = pytest.mark.skipif(not bfloat16.HAS_AMX, reason="this processor has no AMX")


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@pytest.fixture
def without_amx(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(bfloat16, "HAS_AMX", False)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@njit
def multiply_and_add(left, right, addend, line):
    for i in range(len(addend)):
        line[:] = addend[i]
        store(line, 0, fma(splat(left[i]), splat(right[i]), load(line, 0)))
        addend[i] = line[0]


def as_defined(x: Tensor, weight: Tensor) -> Tensor:
    """Term by term. [M, K], [N, K] -> [M, N] float32"""
    (rows, width), outputs = x.shape, len(weight)
    line, segments = np.empty(LANES, np.float32), []
    for first in range(0, width, int(FORWARD)):
        total = torch.zeros(rows * outputs)
        for begin in range(first, min(width, first + int(FORWARD)), 32):
            chains = torch.zeros(2, rows * outputs)
            for k in range(begin, min(width, begin + 32)):
                left = x[:, k, None].float().expand(rows, outputs).reshape(-1).numpy()
                right = weight[None, :, k].float().expand(rows, outputs).reshape(-1).numpy()
                multiply_and_add(left, right, chains[k % 2].numpy(), line)
            total = total + (chains[0] + chains[1])
        segments.append(total.view(rows, outputs))
    assert len(segments) < 4
    return (segments[0] + segments[1] if len(segments) > 1 else segments[0]) + sum(segments[2:])


SHAPES = [
    (1, 16, 32),
    (5, 7, 40),
    (33, 65, 70),
    (17, 100, 64),
    (70, 48, 130),
    (3, 5, 37),
    (2, 3, 1),
    (9, 11, 2080),
    (4, 6, 4100),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("amx", [pytest.param(True, marks=needs_amx), False], ids=["amx", "vectors"])
def test_every_product_is_the_sum_of_blocks(shape, amx, without_amx):
    rows, outputs, width = shape
    x, weight = draw(rows, width), draw(outputs, width, seed=1)
    expected = as_defined(x, weight)
    if not amx:
        without_amx()
    assert same_bits(products.linear_float32(x, weight), expected)
    assert same_bits(products.linear(x, weight, None), expected.bfloat16())
    for by_row, given in ((True, x), (False, x.T.contiguous())):
        for lanes_by_row, lanes in ((True, weight), (False, weight.T.contiguous())):
            assert same_bits(products.product(given, by_row, lanes, lanes_by_row, torch.float32), expected)
    groups = torch.tensor([0, 0, width, width])
    [none, whole, nothing] = products.grouped_weight_gradient(given, lanes, groups, torch.float32)
    assert same_bits(whole, expected)
    assert none.abs().max() == nothing.abs().max() == 0


def everything() -> list[Tensor]:
    """Products in each form in which models use them, of many rows and few."""
    results = []
    for rows in (1, 31, 300):
        x, (q, k, gate) = draw(rows, 130), (draw(n, 130, seed=n) for n in (150, 24, 70))
        experts, offsets = draw(3, 90, 130, seed=5), torch.tensor([0, rows // 3, rows // 3, rows])
        z, up, slots = draw(rows, 8, seed=6), draw(2, 150, 8, seed=7), torch.arange(rows) % 3 % 2
        adapters = z, up, True, slots, torch.tensor([8, 0])
        results += [
            products.linear(x, q, draw(150, seed=8)),
            *qkv_linear(x, q, k, k),
            gated_linear(x, gate, gate.flip(0)),
            products.grouped_linear(x, experts, True, offsets),
            products.grouped_linear(x, experts.mT.contiguous(), False, offsets),
            products.grouped_rows_gradient(draw(rows, 90), experts, False, offsets),
            products.adapted_linear(x, q, None, torch.float32, *adapters),
            products.product(draw(rows, 130), False, x, False, torch.bfloat16),
            products.grouped_weight_gradient(draw(rows, 45), x, offsets, torch.float32),
        ]
    return results


@needs_amx
def test_amx_and_vectors_make_the_same_bits(without_amx):
    with_it = everything()
    without_amx()
    assert all(map(same_bits, with_it, everything()))


@needs_amx
def test_memory_that_is_not_aligned(without_amx):
    storage, weight = draw(33 * 64 + 1), draw(40, 64, seed=1)
    x = storage[1:].view(33, 64)
    assert x.data_ptr() % 4
    assert same_bits(products.linear(x, weight, None), products.linear(x.clone(), weight, None))


@pytest.mark.parametrize("amx", [pytest.param(True, marks=needs_amx), False], ids=["amx", "vectors"])
def test_numbers_below_the_least_normal_one_are_zero(amx, without_amx):
    if not amx:
        without_amx()
    least = 2.0**-126
    tiny = torch.tensor([[least / 2, 2.0**-70, 2.0**-63]]).bfloat16()
    weight = torch.tensor([[1.0, 0, 0], [0, 2.0**-70, 0], [0, 0, 2.0**-63]]).bfloat16()
    if bfloat16.X86:
        assert products.linear_float32(tiny, weight).tolist() == [[0.0, 0.0, least]]
    assert (torch.tensor([least]) / 2).item() > 0, "this thread's other sums keep them"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_stays_in_its_row(value):
    x, weight = draw(40, 70), draw(33, 70, seed=1)
    clean = products.linear(x, weight, None)
    x[7, 69] = value
    made = products.linear(x, weight, None)
    others = torch.arange(40) != 7
    assert same_bits(made[others], clean[others])
    assert not made[7].isfinite().any()


def test_blocks_are_nearer_to_the_exact_sum_than_one_chain():
    x, weight = draw(16, 2048), draw(64, 2048, seed=1)
    exact = x.double() @ weight.double().T
    blocks, chain = (products.linear_float32(one, other) for one, other in ((x, weight), (x.float(), weight.float())))
    assert (blocks.double() - exact).norm() < 0.5 * (chain.double() - exact).norm()
