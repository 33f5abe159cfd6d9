"""A planted fault in each operation: found by the comparison of bits, and named by the doctor."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlloop.models import Model, new_model
from rlloop.models.adapter_weights import Adapter, choose_targets, fresh_weights
from rlloop.parity.first_difference import diagnose
from rlloop.parity.monitor import compare
from rlloop.rollout import Engine
from rlloop.testing import plant_fault
from tests.support.doctored import CONFIG, diagnosed, rescored, sampled


@pytest.fixture(scope="module")
def model() -> Model:
    made = new_model(CONFIG, seed=0)
    for weight in made.parameters():  # far from uniform, so that a rounding anywhere reaches the logprobs
        weight.data.mul_(4.0 if weight.ndim > 1 else 1.0)
    return made


@pytest.mark.parametrize("knob", ["linear", "rms_norm", "activation", "attention", "token_logprob"])
def test_a_planted_fault_is_found_and_named(model, knob):
    engine = Engine(model)
    plant_fault(engine, knob)
    assert engine.fingerprint() == Engine(model).fingerprint()  # nobody has declared it
    finding = diagnosed(engine, model)
    assert finding.details["knob"] == knob
    assert finding.details["where"].startswith("lm_head" if knob == "token_logprob" else "model.layers.0")
    assert f"{finding.details['op']} at {finding.details['where']}" in finding.text


@pytest.mark.parametrize("knob", ["rms_norm", "attention"])
def test_a_fault_under_an_adapter_in_training_is_found_and_named(model, knob):
    targets = model.adapter_targets()
    weights = fresh_weights(choose_targets(targets, ["all-linear"]), 4, 8.0, seed=0)
    factors = {name: (down, 0.1 * torch.randn(up.shape)) for name, (down, up) in weights.factors.items()}
    adapted = model.with_adapter(Adapter(replace(weights, factors=factors), targets))
    engine = Engine(adapted)
    plant_fault(engine, knob)
    assert diagnosed(engine, adapted).details["knob"] == knob


def test_without_a_fault_there_is_nothing_to_find(model):
    samples = sampled(Engine(model))
    assert compare(samples, rescored(model, samples)).equal
    wrong = rescored(model, samples)
    wrong[2] = np.nextafter(wrong[2], np.float32(0))
    result = compare(samples, wrong)
    assert result.first is not None
    finding = diagnose(model, model, samples[2], result.first)
    assert finding.details["op"] is None
    assert "no operation that differs" in finding.text
