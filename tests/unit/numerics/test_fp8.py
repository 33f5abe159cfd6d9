"""Products in 8-bit floats: the definition by numpy in float64, rows on their own, straight-through gradients."""

import copy

import numpy as np
import pytest
import torch

from rlloop.numerics import operators
from rlloop.numerics.fp8 import BLOCK, Fp8Weight, quantised_rows, scales_of
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile

OPS = ops_for(NumericsProfile())
GRID = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
GRID = np.unique(GRID[np.isfinite(GRID)])


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(block):
    """A block of numbers on the grid of E4M3, by a search for the nearest; ties are rare enough not to occur."""
    if not block.any():
        return block
    scale = 2.0 ** np.ceil(np.log2(np.abs(block).max() / 448))
    nearest = np.abs(block[..., None] / scale - GRID).argmin(-1)
    return GRID[nearest] * scale


def by_blocks(matrix, rows):
    """[N, K] quantised by blocks of so many rows and 128 columns."""
    out = np.zeros(matrix.shape)
    for row in range(0, matrix.shape[0], rows):
        for column in range(0, matrix.shape[1], BLOCK):
            place = np.s_[row : row + rows, column : column + BLOCK]
            out[place] = rounded(matrix[place])
    return out


@pytest.mark.parametrize(("outputs", "width"), [(300, 130), (128, 256), (5, 7)])
def test_a_product_is_that_of_the_nearest_numbers_in_blocks(outputs, width):
    x, matrix = randn(9, width, seed=1) * 3, randn(outputs, width, seed=2) * 0.02
    x[3] *= 1e4
    x[4] = 0
    weight = Fp8Weight.of(matrix, outputs, torch.float32)
    known = by_blocks(matrix.double().numpy(), BLOCK)
    assert np.array_equal(weight.dequantised().double().numpy(), known)
    expected = torch.from_numpy(by_blocks(x.double().numpy(), 1) @ known.T)
    torch.testing.assert_close(OPS.linear(x, weight).double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def test_scales_are_the_least_powers_of_two_that_hold_a_block():
    largest = torch.tensor([448.0, np.nextafter(np.float32(448), np.float32(500)), 1.0, 0.0, 1e-30, 3e38])
    expected = [1.0, 2.0, 2.0**-8, 2.0**-40, 2.0**-40, 2.0**120]
    assert scales_of(largest).tolist() == expected


def test_quantising_again_changes_nothing_and_bfloat16_holds_the_weights():
    matrix = randn(3, 48, 200) * torch.logspace(-6, 6, 200)
    weight = Fp8Weight.of(matrix, 24, torch.bfloat16)
    assert weight.scales.shape == (3, 2, 2)  # blocks begin anew every 24 rows
    assert torch.equal(weight.dequantised().float(), weight.dequantised(torch.float32))
    again = Fp8Weight.of(weight.dequantised(), 24, torch.bfloat16)
    assert torch.equal(again.dequantised(), weight.dequantised())
    halves = torch.cat([Fp8Weight.of(half, 24, torch.bfloat16).dequantised() for half in matrix.split(24, 1)], 1)
    assert torch.equal(halves, weight.dequantised())


def test_nan_and_infinity_stay_in_their_rows_as_nan():
    weight, x = Fp8Weight.of(randn(20, 150), 20, torch.float32), randn(4, 150, seed=1)
    expected = OPS.linear(x, weight)
    x[1, 149], x[2, 0] = torch.inf, torch.nan
    out = OPS.linear(x, weight)
    assert out[1:3].isnan().all()
    assert same_bits(out[[0, 3]], expected[[0, 3]])
    codes, _ = quantised_rows(x)
    assert codes.float().isnan().nonzero().tolist() == [[1, 149], [2, 0]]
    assert not OPS.linear(torch.zeros(1, 150), weight).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 200, 1000])
def test_a_row_has_its_bits_alone(width, dtype):
    x, bias = randn(70, width).to(dtype), randn(90, seed=4).to(dtype)
    weight = Fp8Weight.of(randn(90, width, seed=1), 90, dtype)
    whole = OPS.linear(x, weight, bias)
    for rows in (slice(0, 1), slice(3, 20), slice(5, 70), slice(69, 70)):
        assert same_bits(OPS.linear(x[rows], weight, bias), whole[rows])
    with torch.no_grad():
        for each in OPS.qkv_linear(x, weight, weight, weight):
            assert same_bits(each, OPS.linear(x, weight))


def test_an_experts_row_is_a_dense_layers():
    x, chosen = randn(33, 40).bfloat16(), torch.randint(0, 5, (33, 2), generator=torch.Generator().manual_seed(0))
    up = Fp8Weight.of(randn(5, 2 * 24, 40, seed=1), 24, torch.bfloat16)
    down = Fp8Weight.of(randn(5, 40, 24, seed=2), 40, torch.bfloat16)
    out = OPS.experts(x, up, down, chosen)
    for token in range(33):
        for place, expert in enumerate(chosen[token].tolist()):
            gate, raised = OPS.linear(x[token][None], up[expert]).chunk(2, -1)
            assert same_bits(OPS.linear(OPS.silu_mul(gate, raised), down[expert])[0], out[token, place])
    assert same_bits(OPS.experts(x[4:5], up, down, chosen[4:5]), out[4:5])


def test_gradients_are_those_of_the_dequantised_weight():
    x, bias, weight = (
        randn(30, 200),
        randn(50, seed=2),
        torch.nn.Parameter(Fp8Weight.of(randn(50, 200), 50, torch.float32)),
    )
    plain = [each.clone().requires_grad_() for each in (x, weight.dequantised().detach(), bias)]
    x.requires_grad_()
    bias.requires_grad_()
    grad = randn(30, 50, seed=3)
    OPS.linear(x, weight, bias).backward(grad)
    operators.linear(*plain).backward(grad)
    for ours, theirs in zip((x, weight, bias), plain, strict=True):
        assert type(ours.grad) is torch.Tensor
        assert torch.equal(ours.grad, theirs.grad)
        assert ours.grad.any()


def test_experts_gradients_are_those_of_the_dequantised_weights():
    x, chosen = randn(21, 40), torch.randint(0, 4, (21, 2), generator=torch.Generator().manual_seed(1))
    down = torch.nn.Parameter(Fp8Weight.of(randn(5, 40, 24, seed=2), 40, torch.float32))
    up = torch.nn.Parameter(Fp8Weight.of(torch.zeros(5, 48, 40), 24, torch.float32))
    up.data.copy_(randn(5, 48, 40, seed=1))
    weights = [up, down, *(each.dequantised().detach().requires_grad_() for each in (up, down))]
    made = []
    for pair in (weights[:2], weights[2:]):
        each = x.clone().requires_grad_()
        OPS.experts(each, *pair, chosen).square().sum().backward()
        made.append((each.grad, *(weight.grad for weight in pair)))
    for ours, theirs in zip(*made, strict=True):  # at activations that differ by what inputs' rounding does
        assert (ours - theirs).norm() < 0.1 * theirs.norm()
    assert not made[0][1][4].any()  # nobody's expert


def test_experts_without_rows_on_a_gpu_have_gradients(monkeypatch):
    """Else a rank whose experts get no row would end its backward before the exchange that the others wait in."""
    pytest.importorskip("triton", reason="the module has Triton's kernels")
    from rlloop.numerics.kernels.triton import experts, sorting

    groups = sorting.Groups(torch.zeros(5, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int32), sorting.FLOAT32[0])
    monkeypatch.setattr(sorting, "sorted_by_group", lambda chosen, count, dtype: (chosen.int(), groups))
    weights = Fp8Weight.of(randn(4, 48, 40), 24, torch.float32), Fp8Weight.of(randn(4, 40, 24), 40, torch.float32)
    x = torch.zeros(0, 40, requires_grad=True)
    made = experts.fp8_gated_experts(x, *weights, torch.zeros(0, 2, dtype=torch.int64))
    assert made.shape == (0, 2, 40)
    (gradient,) = torch.autograd.grad(made, x, torch.ones_like(made))
    assert gradient.shape == x.shape


def test_writing_quantises_in_place_and_copies_are_apart():
    parameter = torch.nn.Parameter(Fp8Weight.of(randn(130, 140), 130, torch.bfloat16))
    memory = parameter.codes.data_ptr()
    twin = copy.deepcopy(parameter)
    assert isinstance(twin, torch.nn.Parameter)
    assert twin.requires_grad
    x, before = randn(2, 140).bfloat16(), OPS.linear(randn(2, 140).bfloat16(), parameter)
    with torch.no_grad():
        parameter.copy_(randn(130, 140, seed=7))
    assert parameter.codes.data_ptr() == memory
    assert torch.equal(
        parameter.dequantised(), Fp8Weight.of(randn(130, 140, seed=7), 130, torch.bfloat16).dequantised()
    )
    assert not same_bits(OPS.linear(x, parameter), before)
    assert same_bits(OPS.linear(x, twin), before)
    with torch.no_grad():
        parameter.codes.view(torch.uint8).copy_(twin.codes.view(torch.uint8))  # as a replica writes
        parameter.scales.copy_(twin.scales)
    assert same_bits(OPS.linear(x, parameter), before)
    module = torch.nn.Linear(140, 130, bias=False)
    module.weight = twin
    assert module.to("meta").weight.codes.device.type == "meta"
