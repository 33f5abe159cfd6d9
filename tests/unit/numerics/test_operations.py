"""Every operation of a model: a row's bits depend on that row, values and gradients agree with the reference, and the
stock twin fails the same check."""

import pytest
import torch

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.operators import linear, silu_mul
from rlloop.numerics.ops import Ops, ops_for
from rlloop.numerics.probe import probe, same_bits
from rlloop.numerics.profile import NumericsProfile

OURS = ops_for(NumericsProfile())
TYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 15, 16, 17, 63, 64, 65, 130]


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operations(ops: Ops, dtype):
    """name -> function of a row slice, over fixed inputs of 130 rows."""
    x, weight, bias = randn(130, 75, dtype=dtype), randn(41, 75, seed=1, dtype=dtype), randn(41, seed=2, dtype=dtype)
    wide, gain, other = (
        randn(130, 1100, dtype=dtype),
        randn(1100, seed=1, dtype=dtype),
        randn(130, 1100, seed=2, dtype=dtype),
    )
    heads, cos, sin = randn(130, 3, 20, dtype=dtype), randn(50, 10, seed=1), randn(50, 10, seed=2)
    positions = torch.arange(130) % 50
    return {
        "linear": lambda rows: ops.linear(x[rows], weight),
        "linear with bias": lambda rows: ops.linear(x[rows], weight, bias),
        "rms_norm": lambda rows: ops.rms_norm(wide[rows], gain, 1e-6)[0],
        "rms_norm with residual": lambda rows: torch.cat(ops.rms_norm(wide[rows], gain, 1e-6, other[rows]), -1),
        "rms_norm of heads": lambda rows: ops.rms_norm(heads[rows], gain[:20], 1e-6)[0],
        "silu_mul": lambda rows: ops.silu_mul(x[rows], x[rows] + 1),
        "rope": lambda rows: ops.rope(heads[rows], positions[rows], cos, sin),
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", list(operations(OURS, torch.float32)))
def test_a_row_has_the_same_bits_in_any_batch(name, dtype):
    work = operations(OURS, dtype)[name]
    whole = work(slice(None))
    for rows in ROWS:
        assert same_bits(work(slice(0, rows)), whole[:rows]), f"the first {rows} rows"
        assert same_bits(work(slice(130 - rows, 130)), whole[130 - rows :]), f"the last {rows} rows"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", list(operations(OURS, torch.float32)))
def test_values_are_the_reference_in_float64_rounded(name, dtype):
    ours = operations(OURS, dtype)[name](slice(None))
    exact = ops_for(NumericsProfile.preset("reference"))
    # In float64, or from the same rounded inputs.
    expected = operations(exact, torch.float64 if dtype == torch.float32 else dtype)[name](slice(None))
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), expected.double(), rtol=4 * step, atol=150 * step)


def test_residual_none_and_zero_residual_are_the_same_bits():
    x, gain = randn(9, 70), randn(70, seed=1)
    with_zero = OURS.rms_norm(x, gain, 1e-6, torch.zeros_like(x))
    assert all(same_bits(a, b) for a, b in zip(OURS.rms_norm(x, gain, 1e-6), with_zero, strict=True))


def test_threads_do_not_change_bits():
    works = operations(OURS, torch.float32)
    results = {name: work(slice(None)) for name, work in works.items()}
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, work in works.items():
                assert same_bits(work(slice(None)), results[name]), (name, threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 100, 2048])
@pytest.mark.parametrize("outputs", [1, 3, 4, 5, 6, 7, 8, 9, 16, 17])
def test_linear_is_one_chain_of_fused_multiply_adds(width, outputs):
    x, weight = randn(3, width), randn(outputs, width, seed=1)
    # A product of float32 is exact in float64; the sum is then rounded to float32, as a fused operation does.
    # (Twice rounded, which differs only where float64 lands on a float32 tie: not with these seeds.)
    total = torch.zeros(3, outputs)
    for k in range(width):
        total = (x[:, k, None].double() * weight[None, :, k].double() + total.double()).float()
    assert same_bits(OURS.linear(x, weight), total)
    many = torch.cat([x] * 30)  # 90 rows: the other orientation of the kernel
    assert same_bits(OURS.linear(many, weight)[:3], total)


GRADIENT_CASES = {
    "linear": (lambda o, x, w, b: o.linear(x, w, b), [(7, 12), (5, 12), (5,)]),
    "linear of many rows": (lambda o, x, w: o.linear(x, w), [(70, 12), (5, 12)]),
    "rms_norm": (lambda o, x, w: o.rms_norm(x, w, 1e-6)[0], [(4, 20), (20,)]),
    "rms_norm with residual": (lambda o, x, w, r: torch.cat(o.rms_norm(x, w, 1e-6, r)), [(4, 20), (20,), (4, 20)]),
    "silu_mul": (lambda o, g, u: o.silu_mul(g, u), [(4, 19), (4, 19)]),
    "rope": (
        lambda o, x: o.rope(x, torch.arange(4), randn(4, 5, seed=8).to(x), randn(4, 5, seed=9).to(x)),
        [(4, 2, 10)],
    ),
    "attention": (
        lambda o, q, k, v: o.attention(q, k, v, AttentionLayout.of_sequences([2, 70, 1]), 0.3),
        [(73, 4, 6), (73, 2, 6), (73, 2, 6)],
    ),
    "attention with narrower values": (
        lambda o, q, k, v: o.attention(q, k, v, AttentionLayout.of_sequences([5, 3]), 0.3),
        [(8, 2, 20), (8, 1, 20), (8, 1, 12)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GRADIENT_CASES))
def test_gradients_are_the_reference_in_float64(name):
    function, shapes = GRADIENT_CASES[name]
    inputs = [randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]

    def gradients(ops, dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out = function(ops, *leaves)
        return torch.autograd.grad(out, leaves, randn(*out.shape, seed=99).to(dtype))

    expected = gradients(ops_for(NumericsProfile.preset("reference")), torch.float64)
    for ours, exact in zip(gradients(OURS, torch.float32), expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "rms_norm with residual", "silu_mul", "attention with narrower values"])
def test_the_reference_itself_passes_finite_differences(name):
    function, shapes = GRADIENT_CASES[name]
    inputs = [randn(*shape, seed=seed).double().requires_grad_() for seed, shape in enumerate(shapes)]
    exact = ops_for(NumericsProfile.preset("reference"))
    assert torch.autograd.gradcheck(lambda *leaves: function(exact, *leaves), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_the_probe_passes_ours(dtype):
    assert probe(OURS, dtype) == {}


@pytest.mark.parametrize("operation", ["linear", "attention"])
def test_the_probe_catches_the_stock_twin(operation):
    profile = NumericsProfile(**{operation: "stock"})
    assert operation in probe(ops_for(profile), torch.float32)


@pytest.mark.slow
def test_operators_are_opaque_and_well_formed():
    x, weight = randn(5, 8).requires_grad_(), randn(3, 8, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.rlloop.linear.default, (x, weight, None))
    torch.library.opcheck(torch.ops.rlloop.silu_mul.default, (x, x.detach().clone().requires_grad_()))


def test_tracing_and_profilers_see_operators():
    x, weight = randn(5, 8), randn(3, 8, seed=1).requires_grad_()
    traced = torch.compile(lambda x, weight: linear(2 * x, weight, None), backend="eager", fullgraph=True)
    assert same_bits(traced(x, weight), linear(2 * x, weight, None))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        linear(x, weight, None).sum().backward()
        silu_mul(x, x)
    assert {"rlloop::linear", "rlloop::product", "rlloop::silu_mul"} <= {each.key for each in profiler.key_averages()}
