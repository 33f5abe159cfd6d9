"""The numerics profile: the implementation of each operation, the settings, and a declared drift."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rlloop.numerics.implementations import BUILT_IN, batch_invariant, check_outside, is_outside, source_digest

IMPLEMENTATIONS = tuple(BUILT_IN)  # and the path of a module outside: see `rlloop.numerics.implementations`

# Knobs that are no choice of implementation: every implementation of the operation follows them, but for stock and
# huggingface attention, which split as PyTorch does. docs/numerics.md says what each protects and costs.
SETTINGS = {
    "expert_combine": ("fp32_once", "bf16_each"),
    "router_logits": ("float32", "compute"),
    "latent": ("absorbed", "expanded"),
    "residual_norm": ("rounded", "float32"),
    "attention_splits": ("default", "64", "256", "1024"),
    "tp_segments": ("1", "2", "4", "8"),
    "all_reduce": ("fp32_tree", "rounded_chain"),
}
CPU_SETTINGS = ("residual_norm", "attention_splits", "tp_segments", "all_reduce")  # GPUs have the first value only

# Of a `Drift`; `rlloop.study.quantize` says what they mean.
WEIGHT_TYPES = ("bf16", "fp8", "int8", "int6", "int5", "int4", "fp4")
DRIFTS = {
    "weights": ("none", *WEIGHT_TYPES),
    "granularity": ("tensor", "channel", "block"),
    "activations": ("none", "bf16", "fp8", "fp4"),
    "products": ("none", "fp8"),
    "cache": ("none", "fp8"),
    "logits": ("float32", "bfloat16"),
}
FP8_PRODUCTS = {"weights": "fp8", "granularity": "channel", "activations": "fp8"}  # what products=fp8 multiplies


def allows(knob: str, value: object) -> bool:
    """True if a knob of `NumericsProfile` may have the value. An outside module is not looked for."""
    return value in allowed(knob) or (knob not in SETTINGS and isinstance(value, str) and is_outside(value))


def allowed(knob: str) -> tuple[str, ...]:
    return SETTINGS.get(knob, IMPLEMENTATIONS)


def choices(knob: str) -> str:
    """The values that a knob may have, in words."""
    return ", ".join(allowed(knob)) + ("" if knob in SETTINGS else " or the dotted path of a module")


@dataclass(frozen=True)
class Drift:
    """A deliberate departure of an engine from its trainer, for experiments: other arithmetic, or other weights.

    Operations follow `activations` and `logits`. The weights are changed on their way to the engine
    (`rlloop.study.drifted`); they are declared here so that a fingerprint says everything.
    """

    weights: str = "none"  # storage type of the linear weights (bf16: of all weights)
    granularity: str = "channel"  # granularity of the weights' scales
    activations: str = "none"  # bf16: type of every result; fp8, fp4: type of linears' inputs
    products: str = "none"  # fp8: a GPU's fp8 kernels; none: the profile's products of rounded values
    cache: str = "none"  # fp8: keys, values or latents cached in e4m3, without scales
    logits: str = "float32"  # bfloat16: logits are rounded to it
    stale_steps: int = 0  # age of the engine's weights in steps
    lossy_sync: bool = False  # the engine holds bf16 weights and adds bf16 differences to them
    from_step: int = 1  # first step with drift
    both_sides: bool = False  # the trainer computes with the same rounded weights, so nothing differs: a control

    def __post_init__(self) -> None:
        for name, values in DRIFTS.items():
            if getattr(self, name) not in values:
                raise ValueError(f"Drift.{name} is {getattr(self, name)!r}; allowed are {', '.join(values)}")
        if self.products == "fp8" and any(getattr(self, name) != value for name, value in FP8_PRODUCTS.items()):
            raise ValueError("Drift.products=fp8 needs weights=fp8, granularity=channel and activations=fp8")


@dataclass(frozen=True)
class NumericsProfile:
    """One knob an operation. Engine and trainer agree bit for bit when they run the same profile on the same backend.

    - `rlloop` keeps the contract: the bits of a row depend on nothing but that row.
    - `stock` is PyTorch's default: as fast as the library, but its bits vary with batch size and phase.
    - `huggingface` rounds and sums as transformers' eager forward does.
    - `reference` is slow and simple, in any float type including float64: the reference of the tests.
    """

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
    recurrent: str = "rlloop"  # convolutions and states; stock and huggingface run the reference, token by token
    expert_combine: str = (
        "fp32_once"  # fp32_once: the sum is rounded once; bf16_each: each product and sum, as in transformers
    )
    router_logits: str = "float32"  # compute: softmax routers' logits and weights are rounded to the compute type
    latent: str = "absorbed"  # latent attention reads latents (absorbed), or every head's keys and values (expanded)
    residual_norm: str = "rounded"  # a norm reads the residual sum as stored (rounded), or before rounding (float32)
    attention_splits: str = "default"  # number of keys per partial softmax; default: one part (on a GPU, parts of 1024)
    tp_segments: str = "1"  # ranks over which a tensor-parallel engine splits the sums of o_proj and down_proj
    all_reduce: str = (
        "fp32_tree"  # reduction of these sums; rounded_chain: each is rounded, then added in order of rank
    )
    drift: Drift | None = None  # the engine's deliberate drift from its trainer; None: no drift

    def __post_init__(self) -> None:
        for knob in (*SETTINGS, *self.operations()):
            value = getattr(self, knob)
            if not allows(knob, value):
                raise ValueError(f"NumericsProfile.{knob} is {value!r}; allowed are {choices(knob)}")
        for knob, path in self.outside.items():
            check_outside(knob, path)
        if is_outside(self.linear) and self.tp_segments != "1":
            raise ValueError(f"tp_segments is {self.tp_segments}, and only built-in linears can be summed by rank")

    @classmethod
    def operations(cls) -> list[str]:
        """The names of the knobs that choose an implementation."""
        return [field.name for field in dataclasses.fields(cls) if field.name not in ("drift", *SETTINGS)]

    @classmethod
    def preset(cls, name: str) -> NumericsProfile:
        """The profile that runs every operation by the implementation `name`.

        `huggingface` also rounds where transformers does.
        """
        every: dict[str, Any] = dict.fromkeys(cls.operations(), name)
        if name == "huggingface":
            every |= {"expert_combine": "bf16_each", "router_logits": "compute", "latent": "expanded"}
        return cls(**every)

    @property
    def outside(self) -> dict[str, str]:
        """The paths of outside modules, by knob."""
        return {knob: getattr(self, knob) for knob in self.operations() if is_outside(getattr(self, knob))}

    @property
    def holds_contract(self) -> bool:
        """True if every operation is batch-invariant, or declares it, so that `parity.mode=require` can hold."""
        departs = self.drift is not None and not self.drift.both_sides
        return not departs and all(batch_invariant(getattr(self, op)) for op in self.operations())

    @property
    def for_cpus(self) -> list[str]:
        """The settings that only kernels for CPUs follow, as `knob=value`."""
        return [f"{name}={getattr(self, name)}" for name in CPU_SETTINGS if getattr(self, name) != SETTINGS[name][0]]

    def as_dict(self) -> dict[str, Any]:
        """JSON values. `drift` is present only if there is one, `sources` (digests) only with outside modules."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        sources = {path: source_digest(path) for path in sorted(set(self.outside.values()))}
        return {**values, "sources": sources} if sources else values
