"""Long sums: cut into chains of a constant length, joined by one tree, whoever makes them; near to the exact sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu.compiled import linear as kernels
from rlloop.numerics.kernels.cpu.compiled.bfloat16 import CHAIN
from rlloop.numerics.kernels.cpu.compiled.jit import flat
from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.numerics.operators.parameters import each_row, embedding
from rlloop.numerics.ops import Ops, ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from rlloop.numerics.routing import Clamped

OURS, EXACT = (ops_for(NumericsProfile.preset(name)) for name in ("rlloop", "stock"))
FORWARD, GRADIENT = int(kernels.FORWARD), int(kernels.GRADIENT)
LONG = [FORWARD + 1, 2 * FORWARD, 3 * FORWARD + 40, 7 * FORWARD]
EDGES = [GRADIENT - 1, GRADIENT, GRADIENT + 1, 7 * GRADIENT + 40]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def joined(sums: list[Tensor]) -> Tensor:
    """The left part of each sum has as many chains as the largest power of two below all of them."""
    if len(sums) == 1:
        return sums[0]
    left = 1 << (len(sums) - 1).bit_length() - 1
    return joined(sums[:left]) + joined(sums[left:])


def in_chains(x: Tensor, weight: Tensor, length: int) -> Tensor:
    """Products of up to FORWARD terms are one chain each: `test_operations` adds one up term by term."""
    pairs = zip(x.split(length, dim=-1), weight.split(length, dim=-1), strict=True)
    return joined([OURS.logits(rows, share) for rows, share in pairs])


@pytest.mark.parametrize("width", LONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_product_of_many_terms_is_joined_chains(dtype: torch.dtype, width: int) -> None:
    x, weight, other = (draw(n, width, seed=seed, dtype=dtype) * 0.1 for seed, n in enumerate((40, 33, 33)))
    expected, bias = in_chains(x, weight, FORWARD), draw(33, seed=3, dtype=dtype)
    assert same_bits(OURS.linear(x, weight, bias), (expected + bias.float()).to(dtype))
    gate, up = expected.to(dtype), in_chains(x, other, FORWARD).to(dtype)
    one_head = OURS.head_linear(x[:, None], weight[None], True)[:, 0]
    several = OURS.experts(x, torch.stack((weight, weight)), torch.eye(33, dtype=dtype).expand(2, 33, 33),
                           torch.arange(40)[:, None] % 2, False)  # fmt: skip
    with torch.inference_mode():
        for rows in (1, 2, 16, 40):
            assert same_bits(OURS.linear(x[:rows], weight), gate[:rows])
            made = OURS.qkv_linear(x[:rows], weight, other, weight)
            assert all(map(same_bits, made, (gate[:rows], up[:rows], gate[:rows])))
            assert same_bits(OURS.gated_linear(x[:rows], weight, other), OURS.silu_mul(gate[:rows], up[:rows]))
    assert same_bits(one_head, gate)
    assert same_bits(several[:, 0], gate.relu().square())


def test_how_the_work_is_cut_changes_no_bit_and_other_chains_do() -> None:
    x, weight, out = draw(50, 2900), draw(70, 2900, seed=1), torch.empty(50, 70)

    def product(segment: int, threads: int, tiles: int, chunk: int) -> Tensor:
        operands = flat(weight), True, flat(x), True, flat(weight), False, flat(out)
        further = kernels.no_further(flat(x), flat(weight))
        kernels.product(threads, *operands, 50, 70, 2900, np.int64(segment), CHAIN, tiles, chunk, further)
        return out

    for segment in (GRADIENT, FORWARD):
        expected = in_chains(x, weight, segment)
        for threads, tiles, chunk in ((1, 1, 50), (3, 2, 5), (2, 4, 48)):
            assert same_bits(product(segment, threads, tiles, chunk), expected), (segment, tiles, chunk)
            assert not same_bits(product(4096, threads, tiles, chunk), expected)


def test_a_product_of_many_terms_is_near_the_exact_sum() -> None:
    """One chain is 2.1e-6 off."""
    x, weight = draw(16, 14_336), draw(64, 14_336, seed=1)
    exact = x.double() @ weight.double().T
    assert (OURS.linear(x, weight).double() - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("tokens", EDGES)
def test_gradients_are_joined_chains_on_any_number_of_threads(tokens: int, threads: Callable[[int], None]) -> None:
    x, weight, bias = draw(tokens, 70), draw(90, 70, seed=1), draw(90, seed=2)
    slopes = draw(tokens, 90, seed=3)
    for count in (1, 2, 5):
        threads(count)
        leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
        grad_x, grad_weight, grad_bias = torch.autograd.grad(OURS.linear(*leaves), leaves, slopes)
        assert same_bits(grad_x, in_chains(slopes, weight.detach().T.contiguous(), GRADIENT))
        assert same_bits(grad_weight, in_chains(slopes.T.contiguous(), x.detach().T.contiguous(), GRADIENT))
        assert same_bits(grad_bias, in_chains(torch.ones(1, tokens), slopes.T.contiguous(), GRADIENT)[0])


# ------------------------------------------------------------------------------- what training sums over many tokens

TOKENS, WIDTH, OUTPUTS = 20_000, 36, 37
TARGETS = torch.arange(TOKENS) % 7
Case = tuple[Callable[..., Tensor], list[Tensor]]


def conv(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.causal_conv(x, weight, bias, AttentionLayout.of_sequences([TOKENS]), None)


def gated(ops: Ops, a: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    return torch.cat(ops.recurrent_gates(a, rate, bias, 0.0))


def experts(ops: Ops, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return ops.experts(x, up, down, TARGETS[:, None] % 2, True)


def clamped(ops: Ops, x: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
    return ops.experts(x, up, down, TARGETS[:, None] % 2, clamped=Clamped(*biases, 7.0, 1.702))


SUMS: dict[str, Case] = {
    "linear": (lambda ops, *given: ops.linear(*given), [draw(OUTPUTS, WIDTH, seed=1), draw(OUTPUTS, seed=2)]),
    "linear of four ranks": (
        lambda _, *given: ops_for(NumericsProfile(tp_segments="4")).linear(*given, across=True),
        [draw(OUTPUTS, WIDTH, seed=1), draw(OUTPUTS, seed=2)],
    ),
    "norm": (lambda ops, x, weight: ops.rms_norm(x, weight, 1e-6)[0], [draw(WIDTH, seed=1)]),
    "experts": (experts, [draw(2, 16, WIDTH, seed=1), draw(2, WIDTH, 8, seed=2)]),
    "experts with biases": (
        clamped, [draw(2, WIDTH, 16, seed=1), draw(2, 8, WIDTH, seed=2), draw(2, 16, seed=3), draw(2, WIDTH, seed=4)],
    ),
    "router": (
        lambda ops, x, weight, bias: ops.router_logits(x, weight, True, bias),
        [draw(OUTPUTS, WIDTH), draw(OUTPUTS)],
    ),
    "heads": (
        lambda ops, x, weight: ops.head_linear(x.unflatten(1, (3, 12)), weight, False), [draw(3, 12, 5, seed=1)],
    ),
    "convolution": (conv, [draw(WIDTH, 1, 4, seed=1), draw(WIDTH, seed=2)]),
    "gates": (gated, [draw(WIDTH, seed=1), draw(WIDTH, seed=2)]),
    "each row": (lambda ops, x, weight: x * each_row(weight, len(x)), [draw(WIDTH, seed=1)]),
    "embedding": (lambda ops, x, weight: embedding(TARGETS, weight), [draw(9, WIDTH, seed=1)]),
    "head": (
        lambda ops, x, weight: ops.token_logprob(x, weight, TARGETS, LogitsProcessing())[0],
        [draw(OUTPUTS, WIDTH, seed=1)],
    ),
}  # fmt: skip
IN_FLOAT64 = {
    "linear of four ranks": lambda ops, *given: ops.linear(*given),
    "head": lambda ops, x, weight: torch.log_softmax(x @ weight.T, -1).gather(1, TARGETS[:, None]),
}


def weight_gradients(name: str, ops: Ops, dtype: torch.dtype) -> list[Tensor]:
    work, parameters = SUMS[name]
    if dtype is torch.float64:
        work = IN_FLOAT64.get(name, work)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in parameters]
    out = work(ops, draw(TOKENS, WIDTH, seed=8).to(dtype) + 0.5, *leaves)
    return list(torch.autograd.grad(out, leaves, draw(*out.shape, seed=9).to(out.dtype) + 0.3))


@pytest.mark.parametrize("name", SUMS)
def test_gradients_over_many_tokens_are_near_the_exact_sums(name: str, threads: Callable[[int], None]) -> None:
    """One chain over them is 10 to 20 times as far off."""
    made, exact = weight_gradients(name, OURS, torch.float32), weight_gradients(name, EXACT, torch.float64)
    for ours, wanted in zip(made, exact, strict=True):
        assert (ours.double() - wanted).norm() < 4e-7 * wanted.norm()
    for count in (1, 5):
        threads(count)
        assert all(map(same_bits, weight_gradients(name, OURS, torch.float32), made))
