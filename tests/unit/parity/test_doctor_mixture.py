"""A planted fault in each operation of mixtures and latent attention: found by its bits, and named."""

import dataclasses

import pytest

from rlloop.models import Model, new_model
from rlloop.rollout import Engine
from rlloop.testing import plant_fault
from tests.support.doctored import MIXTURE, diagnosed


@pytest.fixture(scope="module")
def model() -> Model:
    made = new_model(MIXTURE, seed=0)
    for weight in made.parameters():  # far from uniform, so that a rounding anywhere reaches the logprobs
        weight.data.mul_(4.0 if weight.ndim > 1 else 1.0)
    return made


@pytest.mark.parametrize(
    ("knob", "layer"),
    [
        ("linear", 0), ("rms_norm", 0), ("activation", 0), ("attention", 0), ("indexer", 0), ("token_logprob", None),
        ("router", 1), ("experts", 1), ("combine", 1),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_and_named(model, knob, layer):
    engine = Engine(model)
    plant_fault(engine, knob)
    finding = diagnosed(engine, model)
    assert finding.details["knob"] == knob
    assert finding.details["where"].startswith("lm_head" if layer is None else f"model.layers.{layer}")


def test_a_setting_of_the_combine_is_named(model):
    """Not another implementation: the same one, told to round each expert."""
    half = new_model(MIXTURE, seed=0, dtype="bfloat16")
    for weight in half.parameters():
        weight.data.mul_(4.0 if weight.ndim > 1 else 1.0)
    engine = Engine(half.with_profile(dataclasses.replace(half.profile, expert_combine="bf16_each")))
    details = diagnosed(engine, half).details
    assert (details["op"], details["where"]) == ("combine", "model.layers.1")
