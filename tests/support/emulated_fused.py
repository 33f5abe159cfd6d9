"""Operations that training makes in one kernel have the bits of each alone; in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloop.numerics import operators
from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.layout import AttentionLayout
from tests.support.tiny_models import tiny_qwen3

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6
TYPES = torch.float32, torch.bfloat16, torch.float16
Tables = tuple[Tensor, Tensor, Tensor]


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def heads(tokens: int, width: int, count: int, groups: int, dtype: torch.dtype) -> tuple[list[Tensor], Tables]:
    """(queries, keys and the norms' weights, all to be differentiated; positions and tables)."""
    shapes = (tokens, count, width), (tokens, groups, width), (width,), (width,)
    leaves = [drawn(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    positions = torch.arange(tokens, device=DEVICE).flip(0)
    angles = drawn(max(1, tokens), width // 2, dtype=torch.float32, seed=4)
    return leaves, (positions, angles.cos(), angles.sin())


def at_once(leaves: list[Tensor], tables: Tables) -> tuple[Tensor, Tensor]:
    q, k, *weights = leaves
    return operators.norm_rope(q, k, (weights[0], weights[1]), EPS, *tables)


def check(made: Tensor, wanted: Tensor, most: float = 0.005) -> None:
    """Gradients may differ in their last bits."""
    most = 1e-5 if made.dtype == torch.float32 else most
    assert (made.double() - wanted.double()).norm() <= most * wanted.double().norm()


def one_by_one(leaves: list[Tensor], tables: Tables) -> tuple[Tensor, Tensor]:
    q, k, *weights = leaves
    q, k = (operators.rms_norm(x, weight, EPS, None)[0] for x, weight in zip((q, k), weights, strict=True))
    return operators.rope(q, *tables), operators.rope(k, *tables)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("tokens", "width", "count", "groups"),
    [(37, 128, 4, 2), (5, 64, 2, 2), (9, 24, 3, 1), (1, 128, 16, 8), (0, 64, 2, 1)],
)
def test_norms_and_rotations_at_once(tokens: int, width: int, count: int, groups: int, dtype: torch.dtype) -> None:
    leaves, tables = heads(tokens, width, count, groups, dtype)
    expected, found = one_by_one(leaves, tables), at_once(leaves, tables)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    grads = [drawn(*x.shape, dtype=dtype, seed=5) for x in found]
    for made, wanted in zip(
        torch.autograd.grad(found, leaves, grads), torch.autograd.grad(expected, leaves, grads), strict=True
    ):
        check(made, wanted)


def test_inputs_that_are_not_contiguous_and_wide_weights() -> None:
    """As a product of all three makes them, and as norms that are stored as differences from 1 have them."""
    wide, weights = drawn(11, 6, 64, dtype=torch.bfloat16, seed=0), drawn(2, 64, dtype=torch.float32, seed=1)
    tables = heads(11, 64, 4, 2, torch.bfloat16)[1]
    leaves = [wide[:, :4], wide[:, 4:], *(1 + weights)]
    leaves = [each.detach().requires_grad_() for each in leaves]
    assert not leaves[0].is_contiguous()
    expected, found = one_by_one(leaves, tables), at_once(leaves, tables)
    assert all(map(torch.equal, found, expected))
    grads = [drawn(64, 11, each.shape[1], dtype=torch.bfloat16, seed=2).permute(1, 2, 0) for each in found]
    pairs = (torch.autograd.grad(each, leaves, grads) for each in (found, expected))
    for made, wanted in zip(*pairs, strict=True):
        check(made, wanted)


def test_a_gradient_of_queries_alone() -> None:
    leaves, tables = heads(7, 64, 4, 2, torch.float32)
    found = torch.autograd.grad(at_once(leaves, tables)[0].sum(), leaves)
    wanted = torch.autograd.grad(one_by_one(leaves, tables)[0].sum(), leaves, allow_unused=True)
    assert torch.allclose(found[0], wanted[0], atol=1e-5)
    assert torch.allclose(found[2], wanted[2], atol=1e-5)
    assert found[1].count_nonzero() == found[3].count_nonzero() == 0


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("trains", [True, False])
def test_a_gated_product_makes_its_factor_again(trains: bool, dtype: torch.dtype) -> None:
    gate, up = (drawn(33, 48, dtype=dtype, seed=i).requires_grad_() for i in range(2))
    weight = drawn(32, 48, dtype=dtype, seed=2).requires_grad_(trains)
    grad, leaves = drawn(33, 32, dtype=dtype, seed=3), (gate, up, weight)[: 2 + trains]
    expected = operators.linear(operators.silu_mul(gate, up), weight, None)
    found = operators.gated_down(gate, up, weight)
    assert found is not None
    assert torch.equal(found, expected)
    for made, wanted in zip(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("trains", [True, False])
def test_products_of_one_input_add_up_its_gradient(trains: bool, dtype: torch.dtype) -> None:
    x = drawn(33, 48, dtype=dtype, seed=0).requires_grad_()
    weights = [drawn(width, 48, dtype=dtype, seed=width).requires_grad_(trains) for width in (32, 16, 24)]
    expected = [operators.linear(x, weight, None) for weight in weights]
    found = operators.products(x, weights)
    assert found is not None
    assert all(map(torch.equal, found, expected))
    grads = [drawn(*each.shape, dtype=dtype, seed=5) for each in found]
    of_x, *rest = torch.autograd.grad(found, [x, *weights] if trains else [x], grads)
    wanted, *others = torch.autograd.grad(expected, [x, *weights] if trains else [x], grads)
    check(of_x, wanted)
    assert all(map(torch.equal, rest, others))
    if dtype == torch.float32:
        return
    exact = sum(grad.double() @ weight.double() for grad, weight in zip(grads, weights, strict=True))
    assert (of_x.double() - exact).norm() <= (wanted.double() - exact).norm() * 1.01  # it is rounded less often


@pytest.mark.parametrize("dtype", TYPES)
def test_a_model_keeps_its_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states and gradients with and without kernels of several operations, also with recomputed layers."""
    model = tiny_qwen3(dtype=str(dtype).removeprefix("torch.")).to(DEVICE)
    tokens = torch.arange(11, device=DEVICE) * 7
    layout = AttentionLayout.of_sequences([6, 5], DEVICE)
    positions = torch.cat([torch.arange(6), torch.arange(5)]).to(DEVICE)

    def gradients(recomputed: int) -> list[Tensor]:
        model.checkpoint_layers = recomputed
        hidden = model.hidden(tokens, positions, layout)
        return [hidden, *torch.autograd.grad(hidden.float().square().sum(), list(model.model.parameters()))]

    kernels, made = kernels_for(DEVICE), Counter()
    names = "norm_rope", "norm_rope_backward", "silu_mul_remade", "add_product"

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: made.update([name]) or kernel(*inputs)

    for name in names:
        monkeypatch.setattr(kernels, name, counted(name, getattr(kernels, name)))
    found = gradients(0)
    layers = model.config.num_layers
    assert made == {**dict.fromkeys(names, layers), "add_product": 3 * layers}  # of k and v, and of gate or up
    again = gradients(1)
    assert made["norm_rope"] == 3 * layers
    assert made["add_product"] == 6 * layers
    for name in names:
        monkeypatch.setattr(kernels, name, None)
    expected = gradients(0)
    assert torch.equal(found[0], expected[0])
    assert all(map(torch.equal, found, again))
    for mine, other in zip(found, expected, strict=True):
        check(mine, other, 0.02)
