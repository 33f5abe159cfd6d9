"""GELU, layer norm and attention in both directions: the reference's values and gradients, and bits of a row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import Ops, ops_for
from rlloop.numerics.profile import NumericsProfile

OURS, REFERENCE, STOCK = (ops_for(NumericsProfile.preset(name)) for name in ("rlloop", "reference", "stock"))
LENGTHS = [1, 130, 64, 17]
LAYOUT = AttentionLayout.of_sequences(LENGTHS)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def attend(ops: Ops, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.full_attention(q, k, v, LAYOUT, 0.2)


CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "gelu": (lambda ops, x: ops.gelu(x, False), [(67, 45)]),
    "gelu_tanh": (lambda ops, x: ops.gelu(x, True), [(67, 45)]),
    "layer_norm": (lambda ops, x, w, b: ops.layer_norm(x, w, b, 1e-6), [(67, 45), (45,), (45,)]),
    "full_attention": (attend, [(sum(LENGTHS), 2, 20)] * 3),
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def with_gradients(ops: Ops, name: str, dtype: torch.dtype) -> list[Tensor]:
    work, shapes = CASES[name]
    given = [draw(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    made = work(ops, *given)
    return [made.detach(), *torch.autograd.grad(made, given, draw(*made.shape, seed=9).to(dtype))]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_references(name: str) -> None:
    for mine, wanted in zip(
        with_gradients(OURS, name, torch.float32), with_gradients(REFERENCE, name, torch.float64), strict=True
    ):
        assert ((mine - wanted).norm() / wanted.norm()) < 1e-6
    for mine, wanted in zip(
        with_gradients(STOCK, name, torch.float64), with_gradients(REFERENCE, name, torch.float64), strict=True
    ):
        assert ((mine - wanted).norm() / wanted.norm()) < 1e-14


@pytest.mark.parametrize("name", CASES)
def test_bits_know_no_thread(name: str) -> None:
    with threads(1):
        alone = with_gradients(OURS, name, torch.bfloat16)
    with threads(2):
        together = with_gradients(OURS, name, torch.bfloat16)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "layer_norm"])
def test_a_row_alone_has_the_bits_it_has_among_others(name: str, dtype: torch.dtype) -> None:
    work, shapes = CASES[name]
    x, *rest = (draw(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    whole = work(OURS, x, *rest)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 20)):
        assert torch.equal(work(OURS, x[rows], *rest), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_image_alone_has_the_bits_it_has_among_others(dtype: torch.dtype) -> None:
    q, k, v = (draw(sum(LENGTHS), 2, 20, dtype=dtype, seed=seed) for seed in range(3))
    whole, begin = attend(OURS, q, k, v), 0
    for length in LENGTHS:
        own = slice(begin, begin + length)
        alone = OURS.full_attention(q[own], k[own], v[own], AttentionLayout.of_sequences([length]), 0.2)
        assert torch.equal(alone, whole[own])
        begin += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_row_or_an_image_know_no_other(name: str, dtype: torch.dtype) -> None:
    """Those of inputs; a parameter's is a sum over all rows."""
    work, shapes = CASES[name]
    given = [draw(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    inputs, parameters = (given, []) if name == "full_attention" else (given[:1], given[1:])
    grad, attends = draw(*shapes[0], dtype=dtype, seed=9), name == "full_attention"

    def gradients(rows: slice) -> tuple[Tensor, ...]:
        leaves = [x[rows].clone().requires_grad_() for x in inputs]
        layout = AttentionLayout.of_sequences(LENGTHS if rows == slice(None) else [len(leaves[0])])
        made = OURS.full_attention(*leaves, layout, 0.2) if attends else work(OURS, *leaves, *parameters)
        return torch.autograd.grad(made, leaves, grad[rows])

    whole = gradients(slice(None))
    for rows in (slice(0, 1), slice(131, 195), slice(195, 212)) if attends else (slice(0, 1), slice(3, 20)):
        assert all(torch.equal(one, other[rows]) for one, other in zip(gradients(rows), whole, strict=True))


def test_the_last_query_of_an_image_is_causal_attentions() -> None:
    """It reads all keys in either; the tiles and their order are the same."""
    q, k, v = (draw(sum(LENGTHS), 2, 20, seed=seed) for seed in range(3))
    last = LAYOUT.query_start[1:] - 1
    assert torch.equal(attend(OURS, q, k, v)[last], OURS.attention(q, k, v, LAYOUT, 0.2)[last])


def test_a_long_image_has_its_own_bits_and_the_references_values() -> None:
    """Longer than what a kernel may cut keys into, and after one that is not."""
    q, k, v = (draw(1160, 1, 8, seed=seed) for seed in range(3))
    layout = AttentionLayout.of_sequences([70, 1090])
    whole = OURS.full_attention(q, k, v, layout, 0.2)
    alone = [
        OURS.full_attention(q[own], k[own], v[own], AttentionLayout.of_sequences([len(q[own])]), 0.2)
        for own in (slice(70), slice(70, None))
    ]
    assert torch.equal(torch.cat(alone), whole)
    assert torch.equal(whole[-1:], OURS.attention(q, k, v, layout, 0.2)[-1:])
    wanted = REFERENCE.full_attention(*(x.double() for x in (q, k, v)), layout, 0.2)
    assert (whole - wanted).norm() / wanted.norm() < 1e-6


@pytest.mark.parametrize("tanh", [True, False])
def test_gelu_far_from_zero(tanh: bool) -> None:
    x = torch.tensor([-1e15, -40.0, -9.0, -0.0, 0.0, 9.0, 40.0, 1e15], requires_grad=True)
    made = OURS.gelu(x, tanh)
    made.sum().backward()
    assert made.tolist() == [0, 0, pytest.approx(0, abs=1e-12), 0, 0, 9, 40, pytest.approx(1e15)]
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([0, 0, 0, 0.5, 0.5, 1, 1, 1], abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(2, 20), (4, 16), (3, 8), (16, 4)])
def test_parts_of_wider_rows_have_the_bits_of_their_copies(heads: int, width: int, dtype: torch.dtype) -> None:
    """Queries, keys and values as one product makes them, and their gradients."""
    wide, at = draw(sum(LENGTHS), 3 * heads * width, dtype=dtype), torch.arange(sum(LENGTHS))
    cos, sin = (draw(sum(LENGTHS), width // 2, seed=seed) for seed in (1, 2))
    grad = draw(sum(LENGTHS), heads, width, dtype=dtype, seed=9)

    def made(copied: bool) -> list[Tensor]:
        leaf = wide.clone().requires_grad_()
        q, k, v = (x.contiguous() if copied else x for x in leaf.unflatten(-1, (3, heads, width)).unbind(1))
        out = attend(OURS, OURS.rope(q, at, cos, sin), OURS.rope(k, at, cos, sin), v)
        return [out.detach(), *torch.autograd.grad(out, leaf, grad)]

    assert all(torch.equal(one, other) for one, other in zip(made(False), made(True), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [True, False])
def test_a_norm_with_its_sum_has_the_bits_of_the_two(dtype: torch.dtype, grad: bool) -> None:
    x, residual = (draw(67, 45, dtype=dtype, seed=seed) for seed in range(2))
    weight, bias = (draw(45, dtype=dtype, seed=seed) for seed in (2, 3))
    with torch.set_grad_enabled(grad):
        normed, total = OURS.add_layer_norm(x, residual, weight, bias, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, OURS.layer_norm(x + residual, weight, bias, 1e-6))
