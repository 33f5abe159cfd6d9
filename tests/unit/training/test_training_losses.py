"""Built-in losses against formulas written again in numpy, float64; gradients against differences."""

import numpy as np
import pytest
import torch

from rlloop.errors import ConfigError
from rlloop.training.losses import LOSSES, evaluate, settings_of

RNG = np.random.default_rng(0)
LOGPROBS = -RNG.random(7) * 4
INPUTS = {
    "weights": RNG.random(7),
    "logprobs": LOGPROBS + RNG.normal(size=7) * 0.5,
    "advantages": np.array([1.0, -2.0, 0.5, 0.0, -1.0, 3.0, -0.2]),
    "sequence_ratio_mask": np.array([0, 0, 1, 1, 1, 1, 1.0]),
}


def expected(name, lp, settings):
    q, a, w = INPUTS["logprobs"], INPUTS["advantages"], INPUTS["weights"]
    ratio = np.exp(lp - q)
    low, high = settings.get("clip_low_threshold"), settings.get("clip_high_threshold")
    if name == "cross_entropy":
        return -(lp * w).sum()
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "ppo":
        return -np.minimum(ratio * a, np.clip(ratio, low, high) * a).sum()
    if name == "dro":
        return -(lp * a - 0.5 * settings["beta"] * (lp - q) ** 2).sum()
    assert name == "cispo"
    return -(np.clip(np.exp(LOGPROBS - q), low, high) * lp * a).sum()  # the weight has no gradient


def run(name, settings):
    inputs = {key: torch.from_numpy(INPUTS[key]) for key in LOSSES[name].inputs}
    return evaluate(name, torch.from_numpy(LOGPROBS), inputs, settings)


@pytest.mark.parametrize("given", [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}, {"beta": 0.3}])
@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_values_and_gradients(name, given):
    settings = settings_of(name, {key: value for key, value in given.items() if key in LOSSES[name].defaults})
    loss, gradient = run(name, settings)
    assert loss == pytest.approx(expected(name, LOGPROBS, settings), rel=1e-12)
    step = 1e-6
    for index in range(len(LOGPROBS)):
        up, down = LOGPROBS.copy(), LOGPROBS.copy()
        up[index] += step
        down[index] -= step
        slope = (expected(name, up, settings) - expected(name, down, settings)) / (2 * step)
        assert gradient[index] == pytest.approx(slope, abs=1e-5)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("bounds", [(1 - 3e-4, 1 + 4e-4), (0.0, 10.0)])
def test_gspo_has_one_ratio_a_sequence(bounds):
    settings: dict[str, float | str] = {"clip_low_threshold": bounds[0], "clip_high_threshold": bounds[1]}
    loss, gradient = run("gspo", settings_of("gspo", settings))
    mask, a = INPUTS["sequence_ratio_mask"], INPUTS["advantages"]
    ratio = np.exp(((LOGPROBS - INPUTS["logprobs"]) * mask).sum() / mask.sum())
    clipped = np.clip(ratio, *bounds)
    assert loss == pytest.approx(-np.minimum(ratio * a, clipped * a).sum(), rel=1e-12)
    kept = ratio * a <= clipped * a  # by the minimum: others have no gradient
    np.testing.assert_allclose(gradient, np.where(kept, -ratio * a, 0), rtol=1e-6)


def test_thresholds_of_each_token_come_before_those_of_the_call():
    inputs = {key: torch.from_numpy(INPUTS[key]) for key in ("logprobs", "advantages")}
    low, high = torch.full((7,), 0.9), torch.full((7,), 1.1)
    thresholds = {"clip_low_threshold": low, "clip_high_threshold": high}
    by_token = evaluate("ppo", torch.from_numpy(LOGPROBS), {**inputs, **thresholds}, settings_of("ppo", None))
    of_call = settings_of("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})
    by_call = evaluate("ppo", torch.from_numpy(LOGPROBS), inputs, of_call)
    assert by_token[0] == pytest.approx(by_call[0], rel=1e-6)
    assert torch.allclose(by_token[1], by_call[1])


def test_defaults_are_those_of_the_published_pages():
    assert settings_of("ppo", None) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert settings_of("cispo", None) == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert settings_of("dro", {}) == {"beta": 0.05}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("ppo", {"beta": 1.0}, "the settings of ppo are: clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"x": 1.0}, "the settings of cross_entropy are: none"),
        ("dro", {"beta": float("nan")}, "must be a finite number"),
        ("dro", {"beta": "much"}, "must be a finite number"),
        ("cispo", {"clip_low_threshold": 5.0}, "clip_low_threshold 5 above clip_high_threshold 4"),
    ],
)
def test_settings_that_cannot_be(name, given, message):
    with pytest.raises(ConfigError, match=message):
        settings_of(name, given)
