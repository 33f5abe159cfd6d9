"""MLPs whose activation is made again in the backward pass, as they are on GPUs."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloop import load_model
from rlloop.models import ScoreRow, layers, score
from rlloop.models.layers import made_again
from tests.support.checkpoints import make_checkpoint


@pytest.mark.parametrize(("family", "gated"), [("qwen3", True), ("nemotron_h", False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_keep_their_bits(
    tmp_path: Path, family: str, gated: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family)
    again: list[Tensor] = []

    def on_gpus(made: Tensor, make: Any, *of: Tensor, step: Any) -> Any:
        def counted(*each: Tensor) -> Tensor:
            again.append(make(*each))
            return again[-1]

        return made_again(made, counted, *of)

    def gradients() -> dict[str, Tensor]:
        model = load_model(tmp_path, dtype=dtype)
        score(model, [ScoreRow([5, 9, 12, 7, 30], range(2, 5))])[0].sum().backward()
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    kept = gradients()
    monkeypatch.setattr(layers, "saved_as_made", on_gpus)
    made = gradients()
    assert bool(again) == gated  # the gradient of `relu(up) ** 2` does not read `up`, which would be held in addition
    assert kept.keys() == made.keys()
    assert all(torch.equal(kept[name], made[name]) for name in kept)


def test_what_is_made_again_is_not_held() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)

    def forward(holds: bool) -> tuple[Tensor, weakref.ref[Tensor]]:
        inner = x.square()
        if holds:
            return inner @ weight.T, weakref.ref(inner)
        with made_again(inner, torch.square, x):
            return inner @ weight.T, weakref.ref(inner)

    (held, alive), (out, gone) = forward(True), forward(False)
    assert alive() is not None
    assert gone() is None
    (expected,), (found,) = torch.autograd.grad(held.sum(), weight), torch.autograd.grad(out.sum(), weight)
    assert torch.equal(expected, found)


def test_a_transposed_activation_is_another_tensor() -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    inner = x.square()
    with made_again(inner, torch.square, x):
        out = inner.T @ weight
    (found,) = torch.autograd.grad(out.sum(), weight)
    torch.testing.assert_close(found, inner @ torch.ones(4, 4))
