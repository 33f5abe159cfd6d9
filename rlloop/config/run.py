"""The configuration of a run, as structured dataclasses. Imports neither torch, ray nor vllm.

Hydra composes a recipe's YAML over these (`rlloop.launch.compose`); building them then refuses what cannot work, by
name, before anything starts. Each `__post_init__` checks its own section, `RunConfig`'s checks across sections.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from rlloop.config.algorithm import AlgorithmConfig, Anchor
from rlloop.config.fleet import FleetConfig, FleetKind
from rlloop.config.layout import World
from rlloop.config.limits import Limit, check_limits, limited, require
from rlloop.config.model import ModelSection
from rlloop.config.numerics import RolloutProfile
from rlloop.config.rollout import EngineKind, RolloutConfig
from rlloop.config.sections import (
    CertificateConfig,
    CheckpointConfig,
    EvalConfig,
    Launch,
    ParityConfig,
    ParityMode,
    RayConfig,
    RunSection,
    ScoringConfig,
)
from rlloop.config.trainer import MASTERS_STAY, TrainerConfig
from rlloop.errors import ConfigError
from rlloop.numerics.implementations import is_outside
from rlloop.numerics.profile import SETTINGS
from rlloop.parallel.layout import Layout, misfit, refuse_misfits, without_stages


@dataclass
class RunConfig:
    seed: int = limited(
        0, Limit(lambda x: 0 <= x < 2**63, "from 0 to 2**63 - 1")
    )  # seed of data and sampling; of sampling alone where the task has one of its own (+task.seed)
    device: str = "cpu"  # cpu or cuda; CUDA_VISIBLE_DEVICES chooses among GPUs
    launch: Launch = Launch.local  # local: one process; ray: actors on one or more machines
    ray: RayConfig = field(default_factory=RayConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    task: dict[str, Any] = field(default_factory=dict)  # `_target_` and arguments of the task
    data: dict[str, Any] = field(default_factory=dict)  # free form, for recipes whose task reads files
    reward: dict[str, Any] = field(default_factory=dict)  # `_target_` and arguments of the reward
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = MISSING
    parity: ParityConfig = field(default_factory=ParityConfig)
    certificate: CertificateConfig = field(default_factory=CertificateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    profile: bool = False  # trace steps 2 to 4 of rank 0, GPU kernels included: RUN/timeline.json.gz, for Perfetto
    sinks: dict[str, Any] = field(default_factory=dict)  # sink name -> options; see rlloop.runs.sinks

    def __post_init__(self) -> None:
        check_limits("", self)
        require(
            "trainer.max_batch_tokens", self.trainer.max_batch_tokens,
            self.trainer.max_batch_tokens > self.rollout.max_tokens,
            f"above rollout.max_tokens ({self.rollout.max_tokens}): a sequence with its prompt must fit a micro-batch",
        )  # fmt: skip
        require(
            "trainer.num_minibatches", self.trainer.num_minibatches,
            self.trainer.num_minibatches <= self.rollout.num_prompts,
            f"at most rollout.num_prompts ({self.rollout.num_prompts}): groups stay whole",
        )  # fmt: skip
        if self.rollout.drift.products == "fp8" and self.device == "cpu":
            raise ConfigError(
                "rollout.drift.products=fp8 calls kernels of a GPU; set device=cuda, or rollout.drift.products=none, "
                "which rounds alike on a CPU"
            )
        if self.trainer.offload == "masters" and self.model.dtype == "float32":
            raise ConfigError(MASTERS_STAY.format(self.model.dtype))
        self._check_start()
        self._check_tower()
        self._check_reference()
        self._check_critic()
        self._check_lora()
        self._check_quantize()
        self._check_parity()
        self._check_fleet()
        self._check_partial()
        self._check_engine()
        self._check_ranks()

    @property
    def world(self) -> World:
        """The ranks of `trainer.layout` and `rollout.layout`."""
        return World.of(*self.layouts)

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """`trainer.layout` and `rollout.layout`."""
        return self.trainer.layout.checked("trainer"), self.rollout.layout.checked("rollout")

    @property
    def replicas(self) -> int:
        """`ray.replicas`, where it is null: 1 beside a trainer of one rank, else 0; 0 where engines are elsewhere."""
        if self.ray.replicas is not None:
            return self.ray.replicas
        return int(self.world.size == 1 and self.fleet.kind is not FleetKind.regions)

    @property
    def max_prompts(self) -> int:
        """Prompts that one step may sample."""
        return self.rollout.num_prompts * (1 + self.algorithm.max_refills)

    @property
    def redraws(self) -> bool:
        """True where the trainer draws tokens again: `parity.redraw`, and the engine draws by the same operation."""
        samplers = {self.rollout.profile.over(self.model.profile).token_logprob, self.model.profile.token_logprob}
        ours = samplers == {"rlloop"} and self.rollout.engine is not EngineKind.vllm_stock
        return self.parity.redraw and ours

    def _check_start(self) -> None:
        given = self.task.get("model_path", self.model.path)
        if self.model.path not in (None, given):
            raise ConfigError(
                f"model.path is {self.model.path!r} and task.model_path {given!r}: a run starts from one model; leave "
                "task.model_path out"
            )

    def _check_reference(self) -> None:
        sampled, algorithm = self.rollout, self.algorithm
        if not (algorithm.reward_kl_coef or algorithm.loss_kl_coef):
            return
        if sampled.top_p < 1 or sampled.top_k or sampled.min_p:
            raise ConfigError(
                "KL to the reference (the loss's kl_coef, algorithm.reward_kl_coef) is infinite under rollout.top_p, "
                "top_k or min_p, once the policy samples what the reference would leave out; drop either"
            )

    def _check_tower(self) -> None:
        if self.trainer.freeze_vision_tower and self.rollout.drift.both_sides:
            raise ConfigError(
                "rollout.drift.both_sides rounds the weights that train, and the engine's tower too, which "
                "trainer.freeze_vision_tower keeps as it is in the trainer; set one of them to false"
            )

    def _check_critic(self) -> None:
        if self.algorithm.critic.lr and (stages := self.world.trainer.pp) > 1:
            raise ConfigError(
                f"algorithm.critic is not for a pipeline, and trainer.layout.pp is {stages}; set "
                f"{without_stages(self.world.trainer)}, or algorithm.critic.lr=0, with another advantage"
            )

    def _check_lora(self) -> None:
        """Raises `ConfigError` for what cannot train an adapter or engines that cannot compute one."""
        if self.model.lora.rank == 0:
            return
        with_rank = f"with model.lora.rank={self.model.lora.rank}"
        require(
            "rollout.engine", self.rollout.engine, self.rollout.engine in (EngineKind.embedded, EngineKind.vllm),
            f"embedded or vllm {with_rank}",
        )  # fmt: skip
        if self.rollout.drift.declared:
            raise ConfigError(f"rollout.drift rounds all weights, most of them frozen {with_rank}; leave it out")
        require(
            "trainer.expert_bias_rate", self.trainer.expert_bias_rate, self.trainer.expert_bias_rate == 0,
            f"0 {with_rank}: the base is frozen",
        )  # fmt: skip

    def _check_quantize(self) -> None:
        """Raises `ConfigError` for what cannot go with weights in 8 bits that train."""
        if self.model.quantize == "none":
            return
        with_quantize = f"with model.quantize={self.model.quantize}"
        require("model.lora.rank", self.model.lora.rank, self.model.lora.rank == 0, f"0 {with_quantize}")
        require("model.dtype", self.model.dtype, self.model.dtype != "float16", f"bfloat16 or float32 {with_quantize}")
        require(
            "rollout.engine", self.rollout.engine_name, self.rollout.engine is EngineKind.embedded,
            f"embedded {with_quantize}",
        )  # fmt: skip
        require("trainer.shard", self.trainer.shard, self.trainer.shard == "optimizer", f"optimizer {with_quantize}")
        if self.rollout.drift.declared:
            raise ConfigError(
                f"rollout.drift changes weights or products, which {with_quantize} have one rule; drop it"
            )
        for key, profile in (
            ("model.profile", self.model.profile),
            ("rollout.profile", self.rollout.profile.over(self.model.profile)),
        ):
            for knob, needed in (("linear", "rlloop"), ("experts", "rlloop"), ("tp_segments", "1")):
                require(
                    f"{key}.{knob}",
                    getattr(profile, knob),
                    getattr(profile, knob) == needed,
                    f"{needed} {with_quantize}",
                )
        for key, layout in zip(("trainer.layout", "rollout.layout"), self.layouts, strict=True):
            for axis in ("tp", "pp", "ep", "cp"):
                degree = getattr(layout, axis)
                require(f"{key}.{axis}", degree, degree == 1, f"1 {with_quantize}; set {key}.dp_shard instead")

    def _check_fleet(self) -> None:
        if self.fleet.kind is not FleetKind.regions:
            return
        if self.launch is Launch.ray and self.replicas:
            raise ConfigError(
                f"fleet=regions has its engines elsewhere, and ray.replicas={self.replicas} starts some here; set it "
                "to 0 or leave it out"
            )
        if self.rollout.drift.declared or self.rollout.profile != RolloutProfile():
            raise ConfigError("rollout.drift and rollout.profile compare numerics in one process; use fleet=node")
        if self.fleet.max_version_lag == 0:
            return
        if self.algorithm.max_refills:
            raise ConfigError(
                "algorithm.max_refills asks for prompts in turn; set it to 0, or fleet.max_version_lag to 0"
            )
        self._check_corrected(f"fleet.max_version_lag={self.fleet.max_version_lag}")

    def _check_partial(self) -> None:
        """Raises `ConfigError` for what cannot carry conversations from step to step."""
        prompts = f"rollout.partial.prompts={self.rollout.partial.prompts}"
        if not self.rollout.partial.prompts:
            return
        if self.fleet.max_version_lag:
            raise ConfigError(
                f"fleet.max_version_lag={self.fleet.max_version_lag} samples whole batches ahead, and {prompts} "
                "carries single conversations; set one of them to 0"
            )
        if self.rollout.drift.declared or self.rollout.profile != RolloutProfile():
            raise ConfigError(f"rollout.drift and rollout.profile compare one version at a time; {prompts} mixes them")
        if self.algorithm.max_refills:
            raise ConfigError("algorithm.max_refills asks for prompts in turn; set it or rollout.partial.prompts to 0")
        self._check_corrected(prompts)

    def _check_corrected(self, setting: str) -> None:
        if self.algorithm.anchor is not Anchor.rollout and not self.algorithm.correction:
            raise ConfigError(
                f"{setting} trains samples of older weights: set algorithm.anchor=rollout, or a correction such as "
                "algorithm.correction={tis: {}}"
            )

    def _check_parity(self) -> None:
        if self.parity.mode is not ParityMode.require:
            return
        if self.rollout.drift.declared and not self.rollout.drift.both_sides:
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
            if op not in SETTINGS and trained != "rlloop" and not is_outside(trained):  # these are imported later
                raise ConfigError(
                    f"model.profile.{op} is {trained}, so bits vary with the batch: parity.mode=require cannot hold; "
                    "leave it at rlloop, or set parity.mode=observe"
                )

    def _check_engine(self) -> None:
        """Refuses what would make an engine's logprobs incomparable with the trainer's."""
        rollout, engine, name = self.rollout, self.rollout.engine, self.rollout.engine_name
        vllm = engine in (EngineKind.vllm, EngineKind.vllm_stock)
        if rollout.sleep and not isinstance(engine, EngineKind):
            raise ConfigError("rollout.sleep is for rollout.engine=embedded, vllm or vllm_stock; leave it off")
        if engine is EngineKind.embedded:
            return
        if self.fleet.kind is FleetKind.regions:
            elsewhere = f": start those with `rlloop serve engine --engine {name}`," if vllm else ";"
            raise ConfigError(
                f"rollout.engine={name} is an engine of this process, and fleet=regions has its engines "
                f"elsewhere{elsewhere} and leave rollout.engine at embedded"
            )
        if rollout.drift.declared:
            raise ConfigError(f"rollout.drift is for the embedded engine; rollout.engine is {name}")
        if engine is EngineKind.vllm_stock:
            self._check_stock_engine()

    def _check_stock_engine(self) -> None:
        rollout = self.rollout
        if self.parity.mode is ParityMode.require:
            raise ConfigError(
                "rollout.engine=vllm_stock samples with vLLM's own numerics, which parity.mode=require refuses; set "
                "parity.mode=observe or fallback, or rollout.engine=vllm for the trainer's bits"
            )
        if rollout.profile != RolloutProfile():
            raise ConfigError(
                "rollout.profile chooses among rlloop's operations; rollout.engine=vllm_stock runs vLLM's"
            )
        if rollout.top_k or rollout.top_p < 1 or rollout.min_p:
            raise ConfigError(
                "rollout.top_k, top_p and min_p with rollout.engine=vllm_stock: which tokens are left is decided by "
                "vLLM's logits, and one at the edge is impossible for the trainer; leave them off, or set "
                "rollout.engine=vllm"
            )

    def _check_ranks(self) -> None:
        """Refuses layouts that no model can have, and what runs on one rank alone beside a layout of several."""
        if self.world.size == 1:
            return
        refuse_misfits(
            self.world.layouts, lambda key, layout: misfit(layout, trains=key == "trainer.layout"), "any model"
        )
        if self.trainer.shard == "parameters" and self.world.trainer.pp > 1:
            raise ConfigError(
                "trainer.shard=parameters is not for a pipeline, and trainer.layout.pp is "
                f"{self.world.trainer.pp}; set {without_stages(self.world.trainer)}, or trainer.shard=optimizer"
            )
        self._check_vllm_ranks()
        for key, alone, instead in (
            (
                "rollout.drift or rollout.profile",
                bool(self.rollout.drift.declared) or self.rollout.profile != RolloutProfile(),
                "leave both off",
            ),
            (f"device={self.device}", ":" in self.device, "set device=cuda: each rank takes a GPU of its own"),
            (
                f"ray.gpus_per_worker={self.ray.gpus_per_worker:g}",
                self.device != "cpu" and self.launch is Launch.ray and self.ray.gpus_per_worker != 1,
                "ranks do not share a GPU: set it to 1",
            ),
        ):
            if alone:
                raise ConfigError(
                    f"{key} is for one rank, and trainer.layout with rollout.layout has {self.world.size}; {instead}, "
                    "or all degrees of both layouts at 1"
                )

    def _check_vllm_ranks(self) -> None:
        """Refuses layouts of vLLM as engine: its ranks have every layer, and each engine its requests and experts."""
        engine, layout = self.rollout.engine, self.world.engine
        if engine not in (EngineKind.vllm, EngineKind.vllm_stock):
            return
        if layout.pp > 1:
            raise ConfigError(
                f"rollout.engine={engine} has every layer on every rank, and rollout.layout.pp is {layout.pp}; set it "
                "to 1, whatever trainer.layout.pp is, or rollout.engine=embedded"
            )
        if layout.expert_leaves > 1:
            raise ConfigError(
                f"rollout.engine={engine} takes steps of its own, and with rollout.layout.ep={layout.ep} and "
                f"tp={layout.tp} {layout.expert_leaves} of them share experts; set ep to at most tp, or "
                "rollout.engine=embedded"
            )
        if engine is EngineKind.vllm_stock and layout.ep not in (1, layout.tp):
            raise ConfigError(
                f"rollout.engine=vllm_stock divides experts by all tp={layout.tp} ranks or by none, and "
                f"rollout.layout.ep is {layout.ep}; set it to {layout.tp} or 1"
            )
        if engine is EngineKind.vllm_stock and layout.ep > 1 and self.device == "cpu":
            raise ConfigError(
                f"rollout.layout.ep is {layout.ep}, and vLLM's kernel for experts on a CPU knows no expert "
                "parallelism; set it to 1: tp then divides each expert"
            )
