"""The configuration of a run, as structured dataclasses. Imports neither torch, ray nor vllm.

Hydra composes a recipe's YAML over these (`rlloop.launch.compose`); building them then refuses what cannot work, by
name, before anything starts. Each `__post_init__` checks its own section, `RunConfig`'s what concerns several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from rlloop.config.engine import EngineKind, check_engine
from rlloop.config.fleet import FleetConfig, FleetKind
from rlloop.config.numerics import DriftConfig, ProfileConfig, RolloutProfile
from rlloop.errors import ConfigError
from rlloop.numerics.profile import SETTINGS


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


class Anchor(StrEnum):
    """Whose logprobs the policy ratio of a clipped loss divides by; see `rlloop.algorithms.LossBatch`."""

    trainer = "trainer"
    rollout = "rollout"


@dataclass
class RunSection:
    dir: str | None = None  # None: runs/<recipe>/<time>. In a multirun: the folder of the jobs' folders


@dataclass
class ModelSection:
    path: str | None = None  # a Hugging Face folder; None: the recipe makes its own
    reference_path: str | None = None  # for losses with kl_coef > 0; None: the weights that the run starts from
    reference_swapped: bool = False  # on a GPU: keep the reference in host memory between its uses
    dtype: str = "float32"  # compute dtype; masters are float32
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        allowed = ("float32", "bfloat16", "float16")
        _check("model.dtype", self.dtype, self.dtype in allowed, ", ".join(allowed))


@dataclass
class TrainerConfig:
    num_steps: int = 100
    lr: float = 1e-5
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0  # optimizer steps
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0  # global norm; 0 switches it off
    max_batch_tokens: int = 16384  # tokens of one micro-batch (one forward and backward)
    num_minibatches: int = 1  # optimizer steps a rollout batch is split into, whole groups in each
    balance_coef: float = 0.0  # of the experts' balance loss; 0 switches it off
    expert_bias_rate: float = 0.0  # what experts' biases move by in a step, towards even loads; 0: not at all
    checkpoint_layers: str = "none"  # layers recomputed in the backward pass: less memory, one more forward of them

    def __post_init__(self) -> None:
        _check("trainer.betas", self.betas, len(self.betas) == 2, "two numbers")
        self.betas = (self.betas[0], self.betas[1])  # OmegaConf hands over a list
        _check("trainer.num_steps", self.num_steps, self.num_steps >= 1, "at least 1")
        _check("trainer.lr", self.lr, 0 <= self.lr < math.inf, "0 or a positive number")
        _check("trainer.warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "0 (off) or a positive number")
        _check("trainer.betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers, from 0 to below 1")
        _check("trainer.eps", self.eps, 0 < self.eps < math.inf, "a positive number")
        _check("trainer.weight_decay", self.weight_decay, 0 <= self.weight_decay < math.inf, "0 or a positive number")
        _check("trainer.grad_clip", self.grad_clip, 0 <= self.grad_clip < math.inf, "0 (off) or a positive number")
        _check("trainer.max_batch_tokens", self.max_batch_tokens, self.max_batch_tokens >= 2, "at least 2")
        _check("trainer.num_minibatches", self.num_minibatches, self.num_minibatches >= 1, "at least 1")
        _check("trainer.balance_coef", self.balance_coef, 0 <= self.balance_coef < math.inf, "0 (off) or more")
        _check("trainer.expert_bias_rate", self.expert_bias_rate, 0 <= self.expert_bias_rate < 1, "from 0 to below 1")
        self.checkpoint_layers = str(self.checkpoint_layers)
        good = self.checkpoint_layers in ("none", "all") or self.checkpoint_every > 0
        _check("trainer.checkpoint_layers", self.checkpoint_layers, good, "none, all, or n (at least 1) for every n-th")

    @property
    def checkpoint_every(self) -> int:
        """`checkpoint_layers` as a number: every n-th layer; 0: none."""
        text = {"none": "0", "all": "1"}.get(self.checkpoint_layers, self.checkpoint_layers)
        return int(text) if text.isdecimal() else 0


@dataclass
class RolloutConfig:
    num_prompts: int = 32
    group_size: int = 16  # completions of each prompt
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    engine: EngineKind = EngineKind.embedded  # or vllm, vllm_stock: docs/vllm.md
    page_size: int = 16
    max_batch_tokens: int = 8192  # tokens of one engine step
    max_cache_tokens: int | None = None  # None: what fits the batch and the model's context
    prefix_caching: bool = True
    sleep: bool = False  # of a vLLM engine: give its cache's memory back while the trainer works
    profile: RolloutProfile = field(default_factory=RolloutProfile)
    drift: DriftConfig = field(default_factory=DriftConfig)

    def __post_init__(self) -> None:
        for name in ("num_prompts", "group_size", "max_tokens", "page_size", "max_batch_tokens"):
            value = getattr(self, name)
            _check(f"rollout.{name}", value, value >= 1, "at least 1")
        _check(
            "rollout.min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens,
            f"from 0 to rollout.max_tokens ({self.max_tokens})",
        )  # fmt: skip
        _check(
            "rollout.temperature", self.temperature, 0 < self.temperature < math.inf,
            "a positive number (what is drawn greedily teaches nothing; eval.temperature may be 0)",
        )  # fmt: skip
        _check("rollout.top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("rollout.top_k", self.top_k, self.top_k >= 0, "0 (off) or a positive number")
        _check("rollout.min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        if self.max_cache_tokens is not None:
            _check(
                "rollout.max_cache_tokens", self.max_cache_tokens, self.max_cache_tokens >= self.max_tokens,
                f"at least rollout.max_tokens ({self.max_tokens}), or null for as many as fit",
            )  # fmt: skip


@dataclass
class AlgorithmConfig:
    """Base of the `algorithm` group: a loss and an advantage estimator, each by its name in `rlloop.algorithms`."""

    loss: str = MISSING
    advantage: str = MISSING
    loss_args: dict[str, Any] = field(default_factory=dict)
    advantage_args: dict[str, Any] = field(default_factory=dict)
    anchor: Anchor = Anchor.trainer
    correction: dict[str, Any] = field(default_factory=dict)  # name -> its arguments; several multiply
    dynamic_sampling: bool = False  # do not train on groups whose rewards are all equal
    max_refills: int = 0  # with it: how often a step may sample rollout.num_prompts more, until as many groups teach
    reward_kl_coef: float = 0.0  # of KL(policy ‖ reference), summed over a completion, taken from its reward
    reward_kl: str = "k1"  # its estimate: k1, k2 or k3
    overlong_buffer: int = 0  # the last tokens of rollout.max_tokens, over which a penalty grows to its full. 0: none
    overlong_penalty: float = 1.0  # taken from the reward where a turn (mostly there is one) fills its budget

    def __post_init__(self) -> None:
        _check("algorithm.overlong_buffer", self.overlong_buffer, self.overlong_buffer >= 0, "0 (off) or more tokens")
        _check("algorithm.overlong_penalty", self.overlong_penalty, 0 <= self.overlong_penalty < math.inf, "0 or more")
        _check("algorithm.max_refills", self.max_refills, self.max_refills >= 0, "0 (none) or more")
        _check(
            "algorithm.max_refills", self.max_refills, self.dynamic_sampling or not self.max_refills,
            "0 unless algorithm.dynamic_sampling is true",
        )  # fmt: skip
        _check(
            "algorithm.reward_kl_coef", self.reward_kl_coef, 0 <= self.reward_kl_coef < math.inf, "0 (off) or positive"
        )
        _check("algorithm.reward_kl", self.reward_kl, self.reward_kl in ("k1", "k2", "k3"), "k1, k2 or k3")


@dataclass
class ScoringConfig:
    """How a reward is run; its own arguments stand in `reward`."""

    timeout: float = 60.0  # seconds a sample; a sample that takes longer is rejected, with that reason
    concurrency: int = 64  # samples at a time, for an async reward

    def __post_init__(self) -> None:
        _check("scoring.timeout", self.timeout, 0 < self.timeout < math.inf, "a positive number of seconds")
        _check("scoring.concurrency", self.concurrency, self.concurrency >= 1, "at least 1")


@dataclass
class ParityConfig:
    mode: ParityMode = ParityMode.require
    max_k3: float = 0.1  # fallback: the train-inference KL above which no correction is trusted and the run stops
    replay: bool = False  # observe: the trainer takes the engine's experts in every step, not its own
    redraw: bool = True  # the trainer draws every trained token again, by its seed: is it what the engine drew?

    def __post_init__(self) -> None:
        _check(
            "parity.replay", self.replay, not self.replay or self.mode is ParityMode.observe,
            f"false under parity.mode={self.mode}: require would not see choices that differ, and fallback replays by "
            "itself once they do",
        )  # fmt: skip
        _check("parity.max_k3", self.max_k3, self.max_k3 > 0, "a positive number")


@dataclass
class CertificateConfig:
    """The certificate's head, at each checkpoint, signed or told to somebody else: docs/runs.md."""

    key: str | None = None  # PEM of an Ed25519 private key, which signs it
    witness: str | None = None  # an http(s) address that it is posted to, or a file that it is appended to


@dataclass
class CheckpointConfig:
    every: int = 50  # steps; the last step is always saved. 0: only the last
    keep: int = 2

    def __post_init__(self) -> None:
        _check("checkpoint.every", self.every, self.every >= 0, "0 (only the last step) or a positive number")
        _check("checkpoint.keep", self.keep, self.keep >= 1, "at least 1")


@dataclass
class EvalConfig:
    every: int = 50  # steps; before the first update and after the last always. 0: only those two
    num_draws: int = 1000  # held-out completions
    temperature: float = 1.0
    # What counts as a collapse, declared before the run: held-out reward at or below `collapse_fraction` of its running
    # best in `collapse_evals` evaluations in a row, or a gradient that is not finite. `rlloop compare` judges by it.
    collapse_fraction: float = 0.5
    collapse_evals: int = 3

    def __post_init__(self) -> None:
        _check("eval.collapse_fraction", self.collapse_fraction, 0 <= self.collapse_fraction < 1, "from 0 to below 1")
        _check("eval.collapse_evals", self.collapse_evals, self.collapse_evals >= 1, "at least 1")
        _check("eval.every", self.every, self.every >= 0, "0 (only first and last) or a positive number")
        _check("eval.num_draws", self.num_draws, self.num_draws >= 1, "at least 1")
        _check(
            "eval.temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or a positive number"
        )


@dataclass
class RayConfig:
    """For launch=ray."""

    address: str | None = None  # a running cluster's; null: Ray is started on this machine, for this run
    replicas: int = 1  # engines besides the one that shares the trainer's process
    cpus_per_worker: float = 1.0  # what each worker reserves
    gpus_per_worker: float = 1.0  # on a GPU: at 0.5, two workers share one
    timeout: float = 60.0  # seconds to wait for room

    def __post_init__(self) -> None:
        _check("ray.replicas", self.replicas, self.replicas >= 0, "0 or more")
        _check("ray.cpus_per_worker", self.cpus_per_worker, self.cpus_per_worker > 0, "a positive number")
        share = self.gpus_per_worker
        _check("ray.gpus_per_worker", share, 0 < share <= 1, "above 0 and at most 1: a model lies on one GPU")
        _check("ray.timeout", self.timeout, self.timeout > 0, "a positive number of seconds")


@dataclass
class RunConfig:
    seed: int = 0
    device: str = "cpu"
    launch: Launch = Launch.local
    ray: RayConfig = field(default_factory=RayConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    task: dict[str, Any] = field(default_factory=dict)  # `_target_` and its arguments
    data: dict[str, Any] = field(default_factory=dict)  # free: for recipes whose task reads files
    reward: dict[str, Any] = field(default_factory=dict)  # `_target_` and its arguments
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = MISSING
    parity: ParityConfig = field(default_factory=ParityConfig)
    certificate: CertificateConfig = field(default_factory=CertificateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sinks: dict[str, Any] = field(default_factory=dict)  # name -> options; see rlloop.runs.sinks

    def __post_init__(self) -> None:
        _check("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2**63 - 1")
        _check(
            "trainer.max_batch_tokens", self.trainer.max_batch_tokens,
            self.trainer.max_batch_tokens > self.rollout.max_tokens,
            f"above rollout.max_tokens ({self.rollout.max_tokens}): a sequence with its prompt must fit a micro-batch",
        )  # fmt: skip
        _check(
            "trainer.num_minibatches", self.trainer.num_minibatches,
            self.trainer.num_minibatches <= self.rollout.num_prompts,
            f"at most rollout.num_prompts ({self.rollout.num_prompts}): groups stay whole",
        )  # fmt: skip
        if self.rollout.drift.products == "fp8" and self.device == "cpu":
            raise ConfigError(
                "rollout.drift.products=fp8 calls kernels of a GPU; set device=cuda, or rollout.drift.products=none, "
                "which rounds alike on a CPU"
            )
        self._check_reference()
        self._check_parity()
        self._check_fleet()
        check_engine(self)

    @property
    def max_prompts(self) -> int:
        """Prompts that one step may sample."""
        return self.rollout.num_prompts * (1 + self.algorithm.max_refills)

    @property
    def redraws(self) -> bool:
        """Whether tokens are drawn again: as asked for, where the engine draws by the trainer's operation at all."""
        samplers = {self.rollout.profile.over(self.model.profile).token_logprob, self.model.profile.token_logprob}
        ours = samplers == {"rlloop"} and self.rollout.engine is not EngineKind.vllm_stock
        return self.parity.redraw and ours

    def _check_reference(self) -> None:
        sampled, algorithm = self.rollout, self.algorithm
        if not (algorithm.reward_kl_coef or algorithm.loss_args.get("kl_coef")):
            return
        if sampled.top_p < 1 or sampled.top_k or sampled.min_p:
            raise ConfigError(
                "KL to the reference (algorithm.loss_args.kl_coef, algorithm.reward_kl_coef) is infinite under rollout."
                "top_p, top_k or min_p, once the policy samples what the reference would leave out; drop either"
            )

    def _check_fleet(self) -> None:
        if self.fleet.kind is not FleetKind.regions:
            return
        if self.launch is not Launch.local:
            raise ConfigError(f"fleet=regions has its engines elsewhere: set launch=local, not launch={self.launch}")
        if self.rollout.drift.declared or self.rollout.profile != RolloutProfile():
            raise ConfigError("rollout.drift and rollout.profile compare numerics in one process; use fleet=node")
        if self.fleet.max_version_lag == 0:
            return
        if self.algorithm.max_refills:
            raise ConfigError(
                "algorithm.max_refills asks for prompts in turn; set it to 0, or fleet.max_version_lag to 0"
            )
        if self.algorithm.anchor is not Anchor.rollout and not self.algorithm.correction:
            raise ConfigError(
                f"fleet.max_version_lag={self.fleet.max_version_lag} trains samples of older weights: set "
                "algorithm.anchor=rollout, or a correction such as algorithm.correction={tis: {}}"
            )

    def _check_parity(self) -> None:
        if self.parity.mode is not ParityMode.require:
            return
        if self.rollout.drift.declared:
            raise ConfigError(
                f"rollout.drift has {', '.join(self.rollout.drift.declared)}: the engine would sample from another "
                "policy than the trainer's, which parity.mode=require refuses; set parity.mode=observe to measure what "
                "that does"
            )
        for op, sampled in vars(self.rollout.profile.over(self.model.profile)).items():
            trained = getattr(self.model.profile, op)
            if sampled != trained:
                raise ConfigError(
                    f"rollout.profile.{op} is {sampled} and model.profile.{op} is {trained}: engine and trainer would "
                    "differ, which parity.mode=require refuses; set parity.mode=observe to measure the difference"
                )
            if op not in SETTINGS and trained != "rlloop":
                raise ConfigError(
                    f"model.profile.{op} is {trained}, so bits vary with the batch: parity.mode=require cannot hold; "
                    "leave it at rlloop, or set parity.mode=observe"
                )


def _check(key: str, given: object, good: bool, allowed: str) -> None:
    if not good:
        raise ConfigError(f"{key} is {given!r}; it must be {allowed}")
