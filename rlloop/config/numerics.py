"""The configuration of numerics: which arithmetic the model runs, and how an engine departs from it on purpose.

Fields and defaults are those of `rlloop.numerics.profile`, which has their meanings. Here they are mutable, as Hydra
needs them, and errors name the key. A module of the reader's own is not imported here: see `rlloop.launch.prepare`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, make_dataclass
from typing import Any, get_type_hints

from rlloop.config.limits import require
from rlloop.errors import ConfigError
from rlloop.numerics.profile import DRIFTS, FP8_PRODUCTS, Drift, NumericsProfile, allows, choices

KNOBS = {field.name: field.default for field in fields(NumericsProfile) if field.name != "drift"}
ENGINES_OWN = ("activations", "products", "cache", "logits", "stale_steps", "lossy_sync")  # of a drift: no trainer's

_Profile: Any = make_dataclass("_Profile", [(knob, str, default) for knob, default in KNOBS.items()])
_Departures: Any = make_dataclass("_Departures", [(knob, str | None, None) for knob in KNOBS])
_Drift: Any = make_dataclass("_Drift", [(f.name, get_type_hints(Drift)[f.name], f.default) for f in fields(Drift)])


@dataclass
class ProfileConfig(_Profile):
    """`rlloop.numerics.profile.NumericsProfile`: an implementation for each operation, and its settings."""

    def __post_init__(self) -> None:
        for knob, value in vars(self).items():
            require(f"model.profile.{knob}", value, allows(knob, value), choices(knob))


@dataclass
class RolloutProfile(_Departures):
    """Deliberate departures of the engine's arithmetic from the model's; null: none. For experiments."""

    def __post_init__(self) -> None:
        for knob, value in vars(self).items():
            key, words = f"rollout.profile.{knob}", f"null (the model's own), {choices(knob)}"
            require(key, value, value is None or allows(knob, value), words)

    def over(self, model: ProfileConfig) -> ProfileConfig:
        """The engine's whole profile, given the model's."""
        return ProfileConfig(**{knob: value or getattr(model, knob) for knob, value in vars(self).items()})


@dataclass
class DriftConfig(_Drift):
    """`rlloop.numerics.profile.Drift`: how the engine departs from the trainer on purpose. For experiments."""

    def __post_init__(self) -> None:
        for name, values in DRIFTS.items():
            value = getattr(self, name)
            require(f"rollout.drift.{name}", value, value in values, f"one of {', '.join(values)}")
        if self.products == "fp8" and any(getattr(self, name) != value for name, value in FP8_PRODUCTS.items()):
            raise ConfigError(
                "rollout.drift.products=fp8 multiplies weights by activations; set rollout.drift.weights and "
                "rollout.drift.activations to fp8, and rollout.drift.granularity to channel"
            )
        require("rollout.drift.stale_steps", self.stale_steps, self.stale_steps >= 0, "0 (off) or a positive number")
        require("rollout.drift.from_step", self.from_step, self.from_step >= 1, "at least 1, the run's first step")
        if self.lossy_sync and (self.weights != "none" or self.stale_steps):
            raise ConfigError(
                "rollout.drift.lossy_sync=true says what weights the engine has (bf16, with lost updates); leave "
                "rollout.drift.weights at none and rollout.drift.stale_steps at 0"
            )
        if self.both_sides and (self.weights == "none" or any(self.departs(name) for name in ENGINES_OWN)):
            raise ConfigError(
                "rollout.drift.both_sides=true rounds the trainer's weights as the engine's; set rollout.drift.weights"
                f" to their type, and leave rollout.drift's {', '.join(ENGINES_OWN)} alone, which only engines have"
            )

    def departs(self, name: str) -> bool:
        """True if a key makes the engine another."""
        return getattr(self, name) != getattr(Drift, name)

    @property
    def declared(self) -> list[str]:
        """The keys that make a difference, as `key=value`; empty: the engine computes what the trainer does."""
        scoped = ("granularity", "from_step", "both_sides")  # these say how, when and where, not what
        return [f"{key}={value}" for key, value in vars(self).items() if key not in scoped and self.departs(key)]
