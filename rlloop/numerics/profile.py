"""Which implementation of each operation a model runs: the declared half of its numerical definition."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

IMPLEMENTATIONS = ("rlloop", "stock", "huggingface", "reference")

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

# Of a `Drift`; `rlloop.numerics.quantize` says what they mean.
WEIGHT_TYPES = ("bf16", "fp8", "int8", "int6", "int5", "int4", "fp4")
GRANULARITIES = ("tensor", "channel", "block")
ACTIVATION_TYPES = ("bf16", "fp8", "fp4")
PRODUCT_TYPES = ("fp8",)
CACHE_TYPES = ("fp8",)
LOGIT_TYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Drift:
    """How an engine departs from the trainer on purpose, for experiments: other arithmetic, or other weights.

    Operations follow `activations` and `logits`. The weights are the business of whoever brings them to the engine
    (`rlloop.study.drifted`); they are declared here so that a fingerprint says everything.
    """

    weights: str = "none"  # what the linear weights (bf16: all weights) are stored as
    granularity: str = "channel"  # of the weights' scales
    activations: str = "none"  # bf16: every result is stored so; fp8, fp4: what enters a linear
    products: str = "none"  # fp8: kernels that multiply fp8 numbers, on a GPU; none: the profile's, of what was rounded
    cache: str = "none"  # fp8: keys, values or latents are kept in e4m3, without scales
    logits: str = "float32"
    stale_steps: int = 0  # how many steps old the engine's weights are
    lossy_sync: bool = False  # the engine holds bf16 weights and adds bf16 differences to them
    from_step: int = 1  # the first step that is sampled so; before it, there is no drift

    def __post_init__(self) -> None:
        for name, allowed in (
            ("weights", ("none", *WEIGHT_TYPES)),
            ("granularity", GRANULARITIES),
            ("activations", ("none", *ACTIVATION_TYPES)),
            ("products", ("none", *PRODUCT_TYPES)),
            ("cache", ("none", *CACHE_TYPES)),
            ("logits", LOGIT_TYPES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Drift.{name} is {getattr(self, name)!r}; allowed are {', '.join(allowed)}")
        if self.products == "fp8" and (self.weights, self.granularity, self.activations) != ("fp8", "channel", "fp8"):
            raise ValueError("Drift.products=fp8 needs weights=fp8, granularity=channel and activations=fp8")


@dataclass(frozen=True)
class NumericsProfile:
    """One knob an operation. Engine and trainer agree bit for bit when they run the same profile on the same backend.

    - `rlloop` keeps the contract: the bits of a row depend on nothing but that row.
    - `stock` is what PyTorch does by default: as fast as the library gets, and it varies with batch size and phase.
    - `huggingface` rounds and sums as transformers' eager forward does.
    - `reference` is slow and obvious, in any float type, float64 included: the oracle of the tests.
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
    expert_combine: str = "fp32_once"  # rounded once; or bf16_each: each product and each sum, as transformers
    router_logits: str = "float32"  # or compute: of softmax routers, logits and weights rounded to the compute type
    latent: str = "absorbed"  # latent attention reads latents; or expanded: the keys and values of every head
    residual_norm: str = "rounded"  # a norm reads the residual sum as it is stored; or float32: before it is rounded
    attention_splits: str = "default"  # keys of a part of the softmax; default: one part (on a GPU, parts of 1024)
    tp_segments: str = "1"  # ranks among which a tensor-parallel engine shares the terms of o_proj and down_proj
    all_reduce: str = "fp32_tree"  # of their sums; or rounded_chain: each rounded, then added in order of rank
    drift: Drift | None = None  # of an engine from its trainer; None: there is none

    def __post_init__(self) -> None:
        for name, allowed in SETTINGS.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"NumericsProfile.{name} is {getattr(self, name)!r}; allowed are {', '.join(allowed)}")
        for op in self.operations():
            value = getattr(self, op)
            if value not in IMPLEMENTATIONS:
                raise ValueError(f"NumericsProfile.{op} is {value!r}; allowed are {', '.join(IMPLEMENTATIONS)}")

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
    def holds_contract(self) -> bool:
        """Whether every operation is the invariant one, so that `parity.mode=require` can hold."""
        return self.drift is None and all(getattr(self, op) == "rlloop" for op in self.operations())

    @property
    def for_cpus(self) -> list[str]:
        """The settings that only kernels for CPUs follow, as `knob=value`."""
        return [f"{name}={getattr(self, name)}" for name in CPU_SETTINGS if getattr(self, name) != SETTINGS[name][0]]

    def as_dict(self) -> dict[str, Any]:
        """JSON values. `drift` stands there only where there is one."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
