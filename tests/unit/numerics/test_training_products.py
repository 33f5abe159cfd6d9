"""Products of one input as one step of autograd, beside a backend that adds them up; the gradients' bits on such a
backend are in `tests/support/emulated_fused.py`."""

import pytest
import torch

from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.kernels.cpu import backend
from rlloop.numerics.layout import AdapterSlots, Factors
from rlloop.numerics.ops import ops_for
from rlloop.numerics.packed import MXFP4, PackedWeight
from rlloop.numerics.profile import NumericsProfile

OURS = ops_for(NumericsProfile())


@pytest.fixture(autouse=True)
def _adds_products(monkeypatch):
    def add(total, rows, lanes):
        total.add_(rows @ lanes)

    def remade(gate, up, grad):
        return *backend.silu_mul_backward(gate, up, grad), backend.silu_mul(gate, up)

    monkeypatch.setattr(backend, "add_product", add)
    monkeypatch.setattr(backend, "silu_mul_remade", remade)


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(ops, x, weight):
    return ops.products(x, drawn(32, 32, seed=1), weight), ops.gated_down(x, drawn(5, 32, seed=2), weight)


def test_only_plain_weights_are_multiplied_at_once():
    x, plain = drawn(5, 32, seed=0), drawn(32, 32, seed=3)
    assert None not in made(OURS, x, plain)
    factors = Factors(drawn(1, 4, 32, seed=4), drawn(1, 32, 4, seed=5), torch.tensor([4]))
    adapted = OURS.with_adapters(AdapterSlots({id(plain): factors}, torch.zeros(5, dtype=torch.int64)))
    assert made(adapted, x, plain) == (None, None)
    assert made(OURS, x, Fp8Weight.of(plain, 32, torch.float32)) == (None, None)
    codes, scales = torch.zeros(32, 4, dtype=MXFP4.codes), torch.full((32, 1), 120, dtype=MXFP4.scales)
    assert made(OURS, x, PackedWeight(codes, scales, MXFP4)) == (None, None)
    for profile in (NumericsProfile(tp_segments="2"), NumericsProfile(linear="stock")):
        assert made(ops_for(profile), x, plain) == (None, None)
    stock = ops_for(NumericsProfile(activation="stock"))
    assert stock.products(x, plain) is not None
    assert stock.gated_down(x, x, plain) is None


def test_what_needs_no_gradient_has_none_and_outputs_may_be_unread():
    x, weights = drawn(5, 8, seed=0), [drawn(n, 8, seed=n).requires_grad_() for n in (6, 4, 3)]
    outputs = OURS.products(x, *weights)
    outputs[0].sum().backward()
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weights[0]).sum(), weights[0])[0]
    assert torch.allclose(weights[0].grad, expected)
    assert not weights[1].grad.any()
    read = drawn(5, 8, seed=0).requires_grad_()
    frozen = [weight.detach() for weight in weights]
    OURS.products(read, *frozen)[1].sum().backward()
    assert torch.allclose(read.grad, frozen[1].sum(0).expand_as(read))
    assert all(weight.grad is None for weight in frozen)
