"""Plain classes that a launcher places in processes of their own: the co-located worker and the engine replica.

They know nothing of ray. What crosses between processes is completions, samples, logprobs and, once a version, what
changed in the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlloop.config.instantiate import bind, lacking
from rlloop.config.numerics import ProfileConfig
from rlloop.config.rollout import EngineKind, RolloutConfig
from rlloop.config.run import ParityMode, RunConfig
from rlloop.errors import ConfigError
from rlloop.models import Model, load_model
from rlloop.models.architecture import ModelConfig
from rlloop.numerics.probe import probe
from rlloop.numerics.profile import Drift, NumericsProfile
from rlloop.parity.asked import Vocabulary
from rlloop.parity.first_difference import diagnose
from rlloop.parity.monitor import Finding, TokenDifference
from rlloop.protocols import InProcessEngine
from rlloop.rollout import Engine, vllm
from rlloop.study.drifted_ops import drifted_ops
from rlloop.sync.bundle import Bundle, BundlePublisher, BundleReplica
from rlloop.sync.live import LiveTarget, named_weights, tensors_of
from rlloop.trainer import Trainer
from rlloop.trainer.trainer import UpdateResult
from rlloop.types import Completion, Recomputed, Sample, SamplingParams

ENGINE_SETTINGS = ("page_size", "max_batch_tokens", "max_cache_tokens", "prefix_caching")  # of `rlloop.Engine`


def load(config: RunConfig, source: str | Path) -> Model:
    """The model of a folder, under the run's type, device and profile.

    Raises ConfigError where `parity.mode=require` meets a machine that fails the start-up probe.
    """
    profile = NumericsProfile(**vars(config.model.profile))
    model = load_model(source, dtype=config.model.dtype, device=config.device, profile=profile)
    if config.parity.mode is ParityMode.require:
        broken = probe(model.ops, model.dtype, model.device)
        if broken:
            reasons = "; ".join(f"{operation}: {why}" for operation, why in broken.items())
            raise ConfigError(
                f"this machine does not keep the numerical contract in {config.model.dtype} ({reasons}), so "
                "parity.mode=require cannot hold; `rlloop doctor` says more, and parity.mode=observe measures it"
            )
    return model


def vocabulary_of(config: ModelConfig) -> Vocabulary:
    return Vocabulary(config.vocab_size, config.eos_token_ids)


def make_engine(
    model: Model, profile: ProfileConfig, rollout: RolloutConfig, drift: Drift | None = None
) -> InProcessEngine:
    """The engine that `rollout` names, over `model`'s own parameters, under `profile` and with the declared `drift`."""
    sampled = model.with_profile(NumericsProfile(**vars(profile), drift=drift), drifted_ops)
    settings = {name: getattr(rollout, name) for name in ENGINE_SETTINGS}
    if isinstance(rollout.engine, Mapping):
        engine = engine_factory(rollout.engine)(sampled, **settings)
        if missing := lacking(InProcessEngine, engine):
            raise ConfigError(
                f"rollout.engine._target_ {rollout.engine['_target_']!r} made a {type(engine).__name__}, which is no "
                f"engine: it lacks {', '.join(missing)} (rlloop.protocols.InProcessEngine)"
            )
        return engine
    if rollout.engine is EngineKind.embedded:
        return Engine(sampled, **settings)
    return vllm.build(rollout.engine, sampled, **settings, sleep=rollout.sleep)


def engine_factory(config: Mapping[str, Any]) -> Callable[..., Any]:
    """The function or class of `rollout.engine._target_`, bound to its own arguments.

    It is called as `rlloop.Engine` is, `make(model, page_size=..., max_batch_tokens=..., max_cache_tokens=...,
    prefix_caching=...)`, and returns an `rlloop.protocols.InProcessEngine`. Raises `ConfigError` where that cannot be.
    """
    return bind(config, "rollout.engine", ("model",), ENGINE_SETTINGS)


def doctor_for(engine: Any, model: Model) -> Callable[[Sample, TokenDifference], Finding | None] | None:
    """Names the first operation in which `engine`'s model and the trainer's `model` differ; None without a model."""
    sampled = getattr(engine, "model", None)
    return partial(diagnose, sampled, model) if isinstance(sampled, Model) else None


def make_trainer(model: Model, config: RunConfig, path: str | Path) -> Trainer:
    """The trainer of `model`, with a frozen reference where loss or reward has a KL term to one."""
    reference = None
    if config.algorithm.loss_kl_coef or config.algorithm.reward_kl_coef:
        settings, source = config.model, config.model.reference_path or path
        home = "cpu" if settings.reference_swapped else config.device
        reference = load_model(source, dtype=settings.dtype, device=home, profile=model.profile)
    return Trainer(model, config.trainer, reference=reference, redraws=config.redraws)


class Replica:
    """One engine with weights of its own, rewritten in place at each version."""

    def __init__(self, config: RunConfig, path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = load(config, path)
        self.engine = make_engine(self.model, config.rollout.profile.over(config.model.profile), config.rollout)
        target = LiveTarget(named_weights(self.model).items(), self.engine.set_version)  # it is called between batches
        self._sync = BundleReplica(target, threads)

    def generate(self, version: int, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[Completion]:
        """Completions by the weights of `version`, which must be those that the engine has."""
        assert self.engine.policy_version == version, f"has version {self.engine.policy_version}, not {version}"
        return self.engine.generate(prompts, sampling)

    def apply(self, bundle: Bundle) -> dict[str, float]:
        """Brings the live parameters to the bundle's version. Raises `SyncError`, and then keeps the previous one."""
        return self._sync.apply(bundle)

    def fingerprint(self) -> dict[str, Any]:
        return self.engine.fingerprint()


class Colocated(Replica):
    """Trainer and engine over one set of parameters: its sync costs nothing, the replicas' starts here."""

    def __init__(self, config: RunConfig, path: str, threads: int) -> None:
        super().__init__(config, path, threads)
        self.trainer = make_trainer(self.model, config, path)
        self._publisher = BundlePublisher("node", threads)
        self._published: dict[str, float] = {}

    def set_version(self, version: int) -> None:
        self.engine.set_version(version)

    def publish(self, version: int) -> Bundle:
        """The bundle that brings a replica of the previous version to the trainer's weights, now `version`."""
        self.engine.set_version(version)
        tensors, aliases = tensors_of(named_weights(self.model).items())
        bundle = self._publisher.publish(tensors, version, aliases)
        self._published = bundle.metrics
        return bundle

    def published(self) -> dict[str, float]:
        """sync/* metrics of the last publication."""
        return self._published

    def joining(self) -> Bundle:
        """The bundle that brings any replica, of whatever version, to the last published one."""
        return self._publisher.joining()

    def forward_backward(
        self, batch: Sequence[Sample], loss: Callable[..., Any], old_logprobs: Sequence[np.ndarray] | None
    ) -> UpdateResult:
        return self.trainer.forward_backward(batch, loss, old_logprobs=old_logprobs)

    def optim_step(self) -> dict[str, float]:
        return self.trainer.optim_step()

    def recompute(self, batch: Sequence[Sample]) -> Recomputed:
        return self.trainer.recompute(batch)

    def reference_kl(self, batch: Sequence[Sample], kind: str) -> list[float]:
        return self.trainer.reference_kl(batch, kind)

    def routing(self) -> dict[str, float]:
        return self.trainer.routing()

    def replay_experts(self, on: bool) -> None:
        self.trainer.replay_experts(on)

    def save(self, folder: Path) -> None:
        self.trainer.save(folder)

    def restore(self, folder: Path) -> None:
        self.trainer.restore(folder)

    def trainer_fingerprint(self) -> dict[str, Any]:
        return self.trainer.fingerprint()

    def diagnose(self, sample: Sample, difference: TokenDifference) -> Finding | None:
        doctor = doctor_for(self.engine, self.model)
        return None if doctor is None else doctor(sample, difference)
