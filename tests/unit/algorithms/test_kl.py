"""The estimators against the divergence that they estimate, enumerated over a small vocabulary."""

import math

import numpy as np
import pytest
import torch

from rlloop.algorithms import kl_estimate, sequence_kl

POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.2, 0.1, 0.3], dtype=torch.float64)
KL = sum(p * math.log(p / q) for p, q in zip(POLICY.tolist(), REFERENCE.tolist(), strict=True))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_and_of_the_sign_of_the_divergence(kind):
    estimates = kl_estimate(POLICY.log(), REFERENCE.log(), kind)
    assert KL > 0
    assert (POLICY * estimates).sum().item() == pytest.approx(KL, rel=1e-12)


def test_each_by_hand():
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-1.5])  # the policy likes the token more: d = −0.5
    assert kl_estimate(logprobs, ref, "k1").item() == 0.5
    assert kl_estimate(logprobs, ref, "k2").item() == 0.125
    assert kl_estimate(logprobs, ref, "k3").item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert kl_estimate(logprobs, ref).item() == kl_estimate(logprobs, ref, "k3").item()


def test_k2_and_k3_are_never_negative():
    d = torch.linspace(-3, 3, 101)
    for kind in ("k2", "k3"):
        assert (kl_estimate(torch.zeros(101), d, kind) >= 0).all()


@pytest.mark.parametrize("d", [1e-4, -1e-6, 3e-8])
def test_k3_keeps_its_digits_where_the_policies_nearly_agree(d):
    """exp(d) − 1 − d in float32 gives 0 or noise here."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64)
    assert kl_estimate(logprobs, logprobs + d, "k3").item() == pytest.approx(d * d / 2, rel=1e-4, abs=0)


def test_float32_logprobs_are_compared_in_float64():
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-1.0 - 2**-20])
    assert kl_estimate(logprobs, ref, "k3").dtype == torch.float64
    assert kl_estimate(logprobs, ref, "k3").item() == pytest.approx(2**-41, rel=1e-5, abs=0)


@pytest.mark.parametrize(("kind", "target"), [("k2", "policy first"), ("k3", "reference first"), ("k1", "nothing")])
def test_what_each_gradient_is_the_gradient_of(kind, target):
    """On-policy, as a loss: k2 pulls along KL(policy ‖ reference), k3 along KL(reference ‖ policy), k1 nowhere."""
    logits = POLICY.log().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    found = torch.autograd.grad((POLICY * kl_estimate(logp, REFERENCE.log(), kind)).sum(), logits, retain_graph=True)[0]
    divergence = {
        "policy first": (logp.exp() * (logp - REFERENCE.log())).sum(),
        "reference first": (REFERENCE * (REFERENCE.log() - logp)).sum(),
        "nothing": 0 * logp.sum(),
    }[target]
    assert torch.allclose(found, torch.autograd.grad(divergence, logits)[0], atol=1e-12)


def test_no_gradient_reaches_the_reference():
    reference = torch.tensor([-1.0], requires_grad=True)
    logprobs = torch.tensor([-2.0], requires_grad=True)
    kl_estimate(logprobs, reference, "k2").sum().backward()
    assert reference.grad is None
    assert logprobs.grad is not None


def test_the_kl_of_a_sequence_is_the_sum_over_its_tokens():
    policy, reference = np.array([-1.0, -2.0], np.float32), np.array([-1.5, -1.0], np.float32)
    assert sequence_kl(policy, reference) == pytest.approx(0.5 - 1.0)
    assert sequence_kl(policy, reference, "k2") == pytest.approx(0.125 + 0.5)
    assert sequence_kl(policy[:0], reference[:0]) == 0.0
