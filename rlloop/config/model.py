"""The section `model`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlloop.config.limits import POSITIVE, check_limits, limited, one_of, require, zero_or_more
from rlloop.config.numerics import ProfileConfig


@dataclass
class LoraSection:
    """A low-rank adapter that trains over the frozen model: docs/adapters.md."""

    rank: int = limited(0, zero_or_more("off: all weights train"))  # rank of each weight's A and B
    alpha: float = limited(32.0, POSITIVE)  # scale = alpha / rank
    targets: list[str] = field(default_factory=lambda: ["all-linear"])  # all-linear, experts, lm_head, names of modules
    path: str | None = None  # a PEFT folder of this rank to start from; None: a new adapter, without effect yet

    def __post_init__(self) -> None:
        check_limits("model.lora", self)
        self.targets = list(self.targets)
        require("model.lora.targets", self.targets, len(self.targets) > 0, "a list of one name or more")


@dataclass
class ModelSection:
    path: str | None = None  # a Hugging Face folder; None: the recipe makes its own
    reference_path: str | None = None  # for losses with kl_coef > 0; None: the weights that the run starts from
    reference_swapped: bool = False  # on a GPU: keep the reference in host memory between its uses
    dtype: str = limited("float32", one_of("float32", "bfloat16", "float16"))  # compute type; masters are float32
    quantize: str = limited("none", one_of("none", "fp8"))  # fp8: linear weights train and serve in 8 bits, by one rule
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    lora: LoraSection = field(default_factory=LoraSection)

    def __post_init__(self) -> None:
        check_limits("model", self)
