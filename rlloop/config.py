"""The configuration of a run, as structured dataclasses. Imports neither torch, ray nor vllm.

Hydra composes a recipe's YAML over these; `OmegaConf.to_object` then builds them, and `__post_init__` refuses what
cannot work, by name, before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING


class Launch(StrEnum):
    local = "local"
    ray = "ray"


class ParityMode(StrEnum):
    require = "require"
    fallback = "fallback"
    observe = "observe"


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class RunSection:
    dir: str | None = None  # default: runs/<recipe>/<time>


@dataclass
class ProfileConfig:
    """Mirrors `rlloop.numerics.profile.NumericsProfile`."""

    linear: str = "rlloop"
    rms_norm: str = "rlloop"
    activation: str = "rlloop"
    rope: str = "rlloop"
    attention: str = "rlloop"
    token_logprob: str = "rlloop"


@dataclass
class ModelSection:
    path: str | None = None  # a Hugging Face folder; None: the recipe makes its own
    dtype: str = "float32"  # compute dtype; masters are float32
    profile: ProfileConfig = field(default_factory=ProfileConfig)


@dataclass
class TrainerConfig:
    num_steps: int = 100
    lr: float = 1e-5
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0  # global norm; 0 switches it off
    max_batch_tokens: int = 16384  # tokens of one micro-batch (one forward and backward)
    num_minibatches: int = 1  # optimizer steps a rollout batch is split into


@dataclass
class RolloutConfig:
    num_prompts: int = 32
    group_size: int = 16
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    page_size: int = 16
    max_batch_tokens: int = 8192  # tokens of one engine step
    max_cache_tokens: int | None = None  # None: what fits the batch and the model's context
    prefix_caching: bool = True
    profile: ProfileConfig | None = None  # None: the model's own. Another one is an honest drift, for experiments


@dataclass
class AlgorithmConfig:
    """Base of the `algorithm` group: a loss and an advantage estimator, each by its name in `rlloop.algorithms`."""

    loss: str = MISSING
    advantage: str = MISSING
    loss_args: dict[str, Any] = field(default_factory=dict)
    advantage_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ParityConfig:
    mode: ParityMode = ParityMode.require


@dataclass
class CheckpointConfig:
    every: int = 50  # steps; the last step is always saved. 0: only the last
    keep: int = 2


@dataclass
class EvalConfig:
    every: int = 50  # steps; before the first update and after the last always. 0: only those two
    num_draws: int = 1000  # held-out completions
    temperature: float = 1.0


@dataclass
class RunConfig:
    seed: int = 0
    device: str = "cpu"
    launch: Launch = Launch.local
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    task: dict[str, Any] = field(default_factory=dict)  # `_target_` and its arguments
    reward: dict[str, Any] = field(default_factory=dict)  # `_target_` and its arguments
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = MISSING
    parity: ParityConfig = field(default_factory=ParityConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
