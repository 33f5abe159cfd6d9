"""On a device what holds in Triton's interpreter; and that trainers keep what they should."""

import pytest
import torch

from rlloop.numerics import operators
from rlloop.numerics.layout import LogitsProcessing

kept_logits = pytest.importorskip("rlloop.numerics.kernels.triton.kept_logits", reason="the kernels are Triton's")
from tests.support.emulated_logits import *  # noqa: E402, F403


@pytest.mark.parametrize("rows", [300, 5000])
def test_kept_and_made_again_are_close(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(32_000, 256, device="cuda", generator=generator) / 16).bfloat16().requires_grad_()
    targets = torch.randint(0, 32_000, (rows,), device="cuda", generator=generator)
    scale = torch.randn(rows, device="cuda", generator=generator)
    made = []
    for most in (kept_logits.KEPT_BYTES, 0):
        monkeypatch.setattr(kept_logits, "KEPT_BYTES", most)
        logprobs, _ = operators.token_logprob(hidden, weight, targets, LogitsProcessing())
        made.append((logprobs, *torch.autograd.grad((logprobs * scale).sum(), (hidden, weight))))
    assert torch.equal(made[0][0], made[1][0])
    for kept, again in zip(made[0][1:], made[1][1:], strict=True):
        assert 0 < (kept.double() - again.double()).norm() < 0.006 * again.double().norm()
