"""Gradients of logprobs whose logits' gradients are kept from the forward: those of float64, to bfloat16's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlloop.numerics import operators
from rlloop.numerics.kernels.triton import kept_logits
from rlloop.numerics.kernels.triton.wide_sum import wide_sum
from rlloop.numerics.layout import LogitsProcessing
from rlloop.numerics.packed import FP8, PackedWeight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH, VOCABULARY = 9, 32, 300
CLOSE = 0.008  # of a gradient's norm: numbers are rounded twice to 8 bits on the way


def inputs(trains: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator).bfloat16().to(DEVICE) for n in (ROWS, VOCABULARY))
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator).to(DEVICE)
    scale = torch.randn(ROWS, generator=generator).to(DEVICE)
    scale[2] = 0
    return hidden.requires_grad_(), weight.requires_grad_(trains), targets, scale


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    hidden, weight = (each.detach().double().requires_grad_() for each in (hidden, weight))
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)
    loss = (logprobs.gather(1, targets[:, None])[:, 0] * scale.double()).sum()
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
    return of_hidden, of_weight


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("trains", [True, False])
def test_gradients_are_float64s(trains: bool, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, scale = inputs(trains)
    warm = torch.full((ROWS,), temperature, device=DEVICE)
    processing = LogitsProcessing(temperature=None if temperature == 1 else warm)
    with torch.no_grad():
        expected = operators.token_logprob(hidden, weight, targets, processing)

    def never(*_: Any) -> None:
        raise AssertionError("the logits were made again")

    monkeypatch.setattr(kept_logits, "token_logprob_backward", never)
    found = operators.token_logprob(hidden, weight, targets, processing)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    made = torch.autograd.grad((found[0] * scale).sum(), (hidden, weight)[: 1 + trains])
    for gradient, wanted in zip(made, exact(hidden, weight, targets, scale, temperature), strict=False):
        assert (gradient.double() - wanted).norm() < CLOSE * wanted.norm()
    assert made[0][2].count_nonzero() == 0


def test_a_loss_of_entropies_makes_logits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, scale = inputs(False)
    logprobs, entropies = operators.token_logprob(hidden, weight, targets, LogitsProcessing())
    (of_both,) = torch.autograd.grad((logprobs * scale).sum() + entropies.sum(), hidden)
    monkeypatch.setattr(kept_logits, "_KeptLogits", None)
    with operators.logits_gradients(kept=False):
        logprobs, entropies = operators.token_logprob(hidden, weight, targets, LogitsProcessing())
    (again,) = torch.autograd.grad((logprobs * scale).sum() + entropies.sum(), hidden)
    assert torch.equal(of_both, again)


@pytest.mark.parametrize("trains", [True, False])
def test_an_impossible_target_sends_no_gradient(trains: bool) -> None:
    hidden, weight, targets, scale = inputs(trains)
    banned = torch.tensor([int(targets[0])], device=DEVICE)
    start = torch.tensor([0] + [1] * ROWS, device=DEVICE)
    logprobs, _ = operators.token_logprob(
        hidden, weight, targets, LogitsProcessing(banned_start=start, banned_ids=banned)
    )
    scale[0] = float("-inf")  # as a KL estimate's would be
    made = torch.autograd.grad(logprobs, (hidden, weight)[: 1 + trains], scale)
    assert logprobs[0] == float("-inf")
    assert made[0][0].count_nonzero() == 0
    assert all(gradient.isfinite().all() for gradient in made)


def test_a_second_backward_makes_logits_again() -> None:
    hidden, weight, targets, scale = inputs(False)
    logprobs, _ = operators.token_logprob(hidden, weight, targets, LogitsProcessing())
    (once,), (again,) = (torch.autograd.grad(logprobs, hidden, scale, retain_graph=True) for _ in range(2))
    assert (once.double() - again.double()).norm() < CLOSE * once.double().norm()


def test_gradients_of_gradients_are_refused() -> None:
    hidden, weight, targets, scale = inputs(True)
    logprobs, _ = operators.token_logprob(hidden, weight, targets, LogitsProcessing())
    (first,) = torch.autograd.grad(logprobs, hidden, scale.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_the_weight_may_be_packed() -> None:
    hidden, _, targets, scale = inputs(False)
    codes = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(2)).to(FP8.codes).to(DEVICE)
    weight = PackedWeight(codes, torch.ones(VOCABULARY, 1, device=DEVICE), FP8)
    logprobs, _ = operators.token_logprob(hidden, weight, targets, LogitsProcessing())
    (made,) = torch.autograd.grad(logprobs, hidden, scale)
    wanted, _ = exact(hidden, weight.dequantised(), targets, scale, 1.0)
    assert (made.double() - wanted).norm() < CLOSE * wanted.norm()


def test_no_rows_give_zeros() -> None:
    hidden, weight, targets, scale = (each[:0] if at != 1 else each for at, each in enumerate(inputs(True)))
    logprobs, _ = operators.token_logprob(hidden, weight, targets, LogitsProcessing())
    of_hidden, of_weight = torch.autograd.grad(logprobs, (hidden, weight), scale)
    assert of_hidden.shape == hidden.shape
    assert of_weight.shape == weight.shape
    assert of_weight.count_nonzero() == 0


@pytest.mark.parametrize("rows", [0, 1, 37])
def test_narrow_sums_are_widened_first(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(rows, 129, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    made = wide_sum(left.T, right.T)
    assert made.dtype == torch.float32
    assert torch.equal(made, left.T.float() + right.T.float())
