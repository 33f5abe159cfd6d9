"""The configuration of numerics: which arithmetic the model runs, and how an engine departs from it on purpose."""

from __future__ import annotations

from dataclasses import dataclass

from rlloop.errors import ConfigError
from rlloop.numerics.profile import (
    ACTIVATION_TYPES,
    CACHE_TYPES,
    GRANULARITIES,
    IMPLEMENTATIONS,
    LOGIT_TYPES,
    PRODUCT_TYPES,
    SETTINGS,
    WEIGHT_TYPES,
)


def _allowed(knob: str) -> tuple[str, ...]:
    return SETTINGS.get(knob, IMPLEMENTATIONS)


@dataclass
class ProfileConfig:
    """Mirrors `rlloop.numerics.profile.NumericsProfile`: an implementation for each operation, and its settings."""

    linear: str = "rlloop"
    rms_norm: str = "rlloop"
    activation: str = "rlloop"
    rope: str = "rlloop"
    attention: str = "rlloop"
    token_logprob: str = "rlloop"
    router: str = "rlloop"
    experts: str = "rlloop"
    combine: str = "rlloop"
    indexer: str = "rlloop"
    recurrent: str = "rlloop"
    expert_combine: str = "fp32_once"
    router_logits: str = "float32"
    latent: str = "absorbed"
    residual_norm: str = "rounded"
    attention_splits: str = "default"
    tp_segments: str = "1"
    all_reduce: str = "fp32_tree"

    def __post_init__(self) -> None:
        for knob, given in vars(self).items():
            _check(f"model.profile.{knob}", given, given in _allowed(knob), ", ".join(_allowed(knob)))


@dataclass
class RolloutProfile:
    """Where the engine's arithmetic departs from the model's, on purpose; null: it does not. For experiments."""

    linear: str | None = None
    rms_norm: str | None = None
    activation: str | None = None
    rope: str | None = None
    attention: str | None = None
    token_logprob: str | None = None
    router: str | None = None
    experts: str | None = None
    combine: str | None = None
    indexer: str | None = None
    recurrent: str | None = None
    expert_combine: str | None = None
    router_logits: str | None = None
    latent: str | None = None
    residual_norm: str | None = None
    attention_splits: str | None = None
    tp_segments: str | None = None
    all_reduce: str | None = None

    def __post_init__(self) -> None:
        for knob, given in vars(self).items():
            allowed = f"null (the model's own), {', '.join(_allowed(knob))}"
            _check(f"rollout.profile.{knob}", given, given is None or given in _allowed(knob), allowed)

    def over(self, model: ProfileConfig) -> ProfileConfig:
        """The engine's whole profile, given the model's."""
        return ProfileConfig(**{knob: given or getattr(model, knob) for knob, given in vars(self).items()})


@dataclass
class DriftConfig:
    """Mirrors `rlloop.numerics.profile.Drift`: how the engine departs from the trainer on purpose. For experiments."""

    weights: str = "none"  # none, or what the engine stores linear weights as: bf16 (all weights), fp8, int8, int4, ...
    granularity: str = "channel"  # of the weights' scales: tensor, channel (an output row), block (16 inputs of a row)
    activations: str = (
        "none"  # none, bf16 (every result is stored so); of what enters a linear: fp8 (a scale a token), fp4
    )
    products: str = "none"  # none (the profile's, of rounded numbers), fp8 (kernels that multiply fp8, on a GPU)
    cache: str = "none"  # none, fp8 (keys, values or latents in e4m3, without scales)
    logits: str = "float32"  # or bfloat16
    stale_steps: int = 0  # a control: the engine's weights are this many steps old
    lossy_sync: bool = False  # a sync defect, not numerics: bf16 weights, and bf16 differences added to them
    from_step: int = 1  # the first step that is sampled so; the engine is the trainer's equal before it

    def __post_init__(self) -> None:
        for name, allowed in (
            ("weights", ("none", *WEIGHT_TYPES)),
            ("granularity", GRANULARITIES),
            ("activations", ("none", *ACTIVATION_TYPES)),
            ("products", ("none", *PRODUCT_TYPES)),
            ("cache", ("none", *CACHE_TYPES)),
            ("logits", LOGIT_TYPES),
        ):
            given = getattr(self, name)
            _check(f"rollout.drift.{name}", given, given in allowed, f"one of {', '.join(allowed)}")
        if self.products == "fp8" and (self.weights, self.granularity, self.activations) != ("fp8", "channel", "fp8"):
            raise ConfigError(
                "rollout.drift.products=fp8 multiplies weights by activations; set rollout.drift.weights and "
                "rollout.drift.activations to fp8, and rollout.drift.granularity to channel"
            )
        _check("rollout.drift.stale_steps", self.stale_steps, self.stale_steps >= 0, "0 (off) or a positive number")
        _check("rollout.drift.from_step", self.from_step, self.from_step >= 1, "at least 1, the run's first step")
        if self.lossy_sync and (self.weights != "none" or self.stale_steps):
            raise ConfigError(
                "rollout.drift.lossy_sync=true says what weights the engine has (bf16, with lost updates); leave "
                "rollout.drift.weights at none and rollout.drift.stale_steps at 0"
            )

    @property
    def declared(self) -> list[str]:
        """The keys that make a difference, as `key=value`; empty: the engine computes what the trainer does."""
        plain, scoped = DriftConfig(), ("granularity", "from_step")  # these two say how and when, not what
        return [
            f"{key}={value}" for key, value in vars(self).items() if key not in scoped and value != vars(plain)[key]
        ]


def _check(key: str, given: object, good: bool, allowed: str) -> None:
    if not good:
        raise ConfigError(f"{key} is {given!r}; it must be {allowed}")
