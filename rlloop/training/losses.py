"""Built-in losses of the training API, with Tinker's definitions: sums over tokens, nothing divided.

A loss is a function of one datum: logprobs [N] of its target tokens, float64, and its inputs, float64 likewise. Names
of inputs and settings, thresholds (of the ratio itself, not of its distance from 1) and defaults are Tinker's
(https://tinker-docs.thinkingmachines.ai/tinker/losses, tutorial 202 of its cookbook).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlloop.errors import ConfigError

RL = ("logprobs", "advantages")
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
Inputs = Mapping[str, Tensor]
Settings = Mapping[str, Any]  # numbers, or one a token


@dataclass(frozen=True)
class BuiltinLoss:
    """`of(logprobs, inputs, settings)` is the loss of a datum. Settings that a caller leaves out have `defaults`; those
    of `THRESHOLDS` may also be inputs, one number a token."""

    of: Callable[[Tensor, Inputs, Settings], Tensor]
    inputs: tuple[str, ...]  # beside target_tokens
    defaults: Mapping[str, float] = field(default_factory=dict)
    wide: bool = False  # takes target_tokens [N, K]


def _cross_entropy(logprobs: Tensor, inputs: Inputs, _: Settings) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


def _importance_sampling(logprobs: Tensor, inputs: Inputs, _: Settings) -> Tensor:
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def _ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return _surrogate((logprobs - inputs["logprobs"]).exp(), inputs["advantages"], settings)


def _surrogate(ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages).sum()


def _clipped(ratio: Tensor, settings: Settings) -> Tensor:
    low, high = (torch.as_tensor(settings[name], dtype=ratio.dtype) for name in THRESHOLDS)
    return torch.clamp(ratio, low, high)


def _cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    weight = _clipped((logprobs.detach() - inputs["logprobs"]).exp(), settings)
    return -(weight * logprobs * inputs["advantages"]).sum()


def _dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    quadratic = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * quadratic).sum()


def _gspo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    counted, here = inputs["sequence_ratio_mask"] != 0, logprobs.detach()
    mean = (here - inputs["logprobs"])[counted].mean() if bool(counted.any()) else here.new_zeros(())
    return _surrogate((mean + logprobs - here).exp(), inputs["advantages"], settings)


LOSSES = {
    "cross_entropy": BuiltinLoss(_cross_entropy, ("weights",), wide=True),
    "importance_sampling": BuiltinLoss(_importance_sampling, RL),
    "ppo": BuiltinLoss(_ppo, RL, dict(zip(THRESHOLDS, (0.8, 1.2), strict=True))),
    "cispo": BuiltinLoss(_cispo, RL, dict(zip(THRESHOLDS, (0.0, 4.0), strict=True))),
    "dro": BuiltinLoss(_dro, RL, {"beta": 0.05}),
    # The paper's thresholds (arXiv:2507.18071, section 5.1); Tinker's own defaults are not published.
    "gspo": BuiltinLoss(_gspo, (*RL, "sequence_ratio_mask"), dict(zip(THRESHOLDS, (1 - 3e-4, 1 + 4e-4), strict=True))),
}
UNPUBLISHED = "stable_reinforce"  # in alpha: Tinker's pages do not give its formula


def settings_of(name: str, overrides: Mapping[str, float | str] | None) -> dict[str, float]:
    """All settings of a built-in loss. Raises `ConfigError` for an unknown loss or setting, and values out of range."""
    if name == UNPUBLISHED:
        raise ConfigError(
            f"loss_fn is {UNPUBLISHED!r}, whose definition its authors have not published; use importance_sampling, or "
            "for data of an older policy cispo or dro; a formula of your own can be a custom loss"
        )
    if name not in LOSSES:
        raise ConfigError(f"loss_fn is {name!r}; it must be one of {', '.join(LOSSES)}, or custom")
    settings = dict(LOSSES[name].defaults)
    for key, value in (overrides or {}).items():
        if key not in settings:
            known = ", ".join(settings) or "none"
            raise ConfigError(f"loss_fn_config has {key!r}; the settings of {name} are: {known}")
        if isinstance(value, (str, bool)) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"loss_fn_config[{key!r}] is {value!r}; it must be a finite number, 0 or more")
        settings[key] = float(value)
    low, high = (settings.get(key, 1.0) for key in THRESHOLDS)
    if low > high:
        raise ConfigError(f"loss_fn_config has clip_low_threshold {low:g} above clip_high_threshold {high:g}")
    return settings


@torch.enable_grad()
def evaluate(name: str, logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> tuple[float, Tensor]:
    """The loss of a datum, and its gradient by logprobs, float32 in their shape. `logprobs` and `inputs` are [N] or
    [N, K], of any type; sums are in float64."""
    wide = logprobs.detach().double().requires_grad_()
    numbers = {key: value.double() for key, value in inputs.items()}
    thresholds = {key: numbers[key] for key in THRESHOLDS if key in numbers}
    loss = LOSSES[name].of(wide, numbers, {**settings, **thresholds})
    (gradient,) = torch.autograd.grad(loss, wide)
    return float(loss.detach()), gradient.float()
