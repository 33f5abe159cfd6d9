"""Every dense operation on CUDA: a row's bits depend on that row, values and gradients are the reference's, and the
stock twin fails the same check."""

import pytest
import torch

from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.numerics.ops import Ops, ops_for
from rlloop.numerics.probe import probe, same_bits
from rlloop.numerics.profile import NumericsProfile

OURS = ops_for(NumericsProfile())
EXACT = ops_for(NumericsProfile.preset("reference"))
TYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 15, 16, 17, 33, 63, 64, 65, 128, 129, 256, 300, 512]
COUNT = 1300  # past every tile, and past the rows from which the vendor's product may be used


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def operations(ops: Ops, dtype):
    """name -> function of a row slice, over fixed inputs of 1300 rows."""
    x, weight, bias = randn(COUNT, 75, dtype=dtype), randn(41, 75, seed=1, dtype=dtype), randn(41, seed=2, dtype=dtype)
    wide, gain, other = (
        randn(COUNT, 1024, dtype=dtype),
        randn(1024, seed=1, dtype=dtype),
        randn(COUNT, 1024, seed=2, dtype=dtype),
    )
    matrix = randn(512, 1024, seed=3, dtype=dtype)
    heads, cos, sin = randn(COUNT, 3, 20, dtype=dtype), randn(50, 10, seed=1), randn(50, 10, seed=2)
    positions, targets = torch.arange(COUNT, device="cuda") % 50, torch.arange(COUNT, device="cuda") % 512

    def scored(rows):
        if ops is OURS:
            return torch.stack(ops.token_logprob(wide[rows] / 30, matrix, targets[rows], LogitsProcessing()), 1)
        inputs = (wide[rows] / 30).cpu(), matrix.cpu(), targets[rows].cpu()  # the reference's own place
        return torch.stack(ops.token_logprob(*inputs, LogitsProcessing()), 1).cuda()

    return {
        "linear": lambda rows: ops.linear(x[rows], weight),
        "linear with bias": lambda rows: ops.linear(x[rows], weight, bias),
        "linear of whole tiles": lambda rows: ops.linear(wide[rows], matrix),
        "logits": lambda rows: ops.logits(wide[rows], matrix),
        "rms_norm": lambda rows: ops.rms_norm(wide[rows], gain, 1e-6)[0],
        "rms_norm with residual": lambda rows: torch.cat(ops.rms_norm(wide[rows], gain, 1e-6, other[rows]), -1),
        "rms_norm of heads": lambda rows: ops.rms_norm(heads[rows], gain[:20], 1e-6)[0],
        "silu_mul": lambda rows: ops.silu_mul(x[rows], x[rows] + 1),
        "rope": lambda rows: ops.rope(heads[rows], positions[rows], cos, sin),
        "token_logprob": scored,
    }


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", list(operations(OURS, torch.float32)) if torch.cuda.is_available() else ["none"])
def test_a_row_has_the_same_bits_in_any_batch(name, dtype):
    work = operations(OURS, dtype)[name]
    whole = work(slice(None))
    for rows in [*ROWS, 1024, 1280]:
        assert same_bits(work(slice(0, rows)), whole[:rows]), f"the first {rows} rows"
        assert same_bits(work(slice(COUNT - rows, COUNT)), whole[COUNT - rows :]), f"the last {rows} rows"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", list(operations(OURS, torch.float32)) if torch.cuda.is_available() else ["none"])
def test_values_are_the_reference_in_float64_rounded(name, dtype):
    ours = operations(OURS, dtype)[name](slice(0, 40))
    expected = operations(EXACT, torch.float64 if dtype == torch.float32 else dtype)[name](slice(0, 40))
    step = torch.finfo(ours.dtype).eps
    # Sums of 1024 products about 1 are off by some steps of their size, which is about 32.
    torch.testing.assert_close(ours.double(), expected.double(), rtol=8 * step, atol=3000 * step)


def test_the_stock_product_fails_the_check_of_rows():
    wide, matrix = randn(COUNT, 4096, dtype=torch.bfloat16), randn(4096, 4096, seed=3, dtype=torch.bfloat16)
    for ops, holds in ((OURS, True), (ops_for(NumericsProfile.preset("stock")), False)):
        whole = ops.linear(wide, matrix)
        assert all(same_bits(ops.linear(wide[:rows], matrix), whole[:rows]) for rows in ROWS) is holds


@pytest.mark.parametrize("dtype", TYPES)
def test_the_probe_finds_the_contract_kept(dtype):
    assert probe(OURS, dtype, "cuda") == {}


def test_the_probe_finds_stock_operations():
    """In float32: bfloat16's rounding hides what varies in tensors as small as the probe's."""
    broken = probe(ops_for(NumericsProfile.preset("stock")), torch.float32, "cuda")
    assert {"attention", "linear", "token_logprob"} <= broken.keys()


def scores(ops, hidden, weight):
    place = "cuda" if ops is OURS else "cpu"
    warp = LogitsProcessing(temperature=torch.linspace(0.5, 2, 9, device=place))
    return torch.stack(
        ops.token_logprob(hidden.to(place), weight.to(place), torch.arange(9, device=place), warp)
    ).cuda()


GRADIENTS = {
    "linear": (lambda o, x, w, b: o.linear(x, w, b), [(7, 12), (5, 12), (5,)]),
    "linear of many rows": (lambda o, x, w: o.linear(x, w), [(1030, 64), (48, 64)]),
    "rms_norm": (lambda o, x, w: o.rms_norm(x, w, 1e-6)[0], [(4, 20), (20,)]),
    "rms_norm with residual": (lambda o, x, w, r: torch.cat(o.rms_norm(x, w, 1e-6, r)), [(300, 20), (20,), (300, 20)]),
    "silu_mul": (lambda o, g, u: o.silu_mul(g, u), [(4, 19), (4, 19)]),
    "rope": (
        lambda o, x: o.rope(
            x, torch.arange(4, device="cuda"), randn(4, 5, seed=8).to(x.dtype), randn(4, 5, seed=9).to(x.dtype)
        ),
        [(4, 2, 10)],
    ),
    "attention": (
        lambda o, q, k, v: o.attention(q, k, v, AttentionLayout.of_sequences([2, 70, 1], "cuda"), 0.3),
        [(73, 4, 6), (73, 2, 6), (73, 2, 6)],
    ),
    "attention with narrower values": (
        lambda o, q, k, v: o.attention(q, k, v, AttentionLayout.of_sequences([5, 3], "cuda"), 0.3),
        [(8, 2, 20), (8, 1, 20), (8, 1, 12)],
    ),
    "token_logprob": (lambda o, h, w: scores(o, h, w), [(9, 16), (90, 16)]),
}


# Of a process whose backward thread turns to cuBLAS before anything else.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("name", list(GRADIENTS))
def test_gradients_are_the_reference_in_float64(name):
    function, shapes = GRADIENTS[name]
    inputs = [randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]

    def gradients(ops, dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out = function(ops, *leaves)
        return torch.autograd.grad(out, leaves, randn(*out.shape, seed=99).to(dtype))

    for ours, exact in zip(gradients(OURS, torch.float32), gradients(EXACT, torch.float64), strict=True):
        assert exact.abs().max() > 0.01
        torch.testing.assert_close(ours.double(), exact, rtol=2e-4, atol=2e-4)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("name", list(GRADIENTS))
def test_a_backward_repeats_its_bits(name):
    function, shapes = GRADIENTS[name]
    leaves = [randn(*shape, seed=seed).bfloat16().requires_grad_() for seed, shape in enumerate(shapes)]
    runs = []
    for _ in range(2):
        out = function(OURS, *leaves)
        runs.append(torch.autograd.grad(out, leaves, randn(*out.shape, seed=99).to(out.dtype)))
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
