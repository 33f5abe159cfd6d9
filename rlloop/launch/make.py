"""Models, engines, trainers and critics, as a run's configuration describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlloop.config.instantiate import bind, lacking
from rlloop.config.model import LoraSection
from rlloop.config.numerics import ProfileConfig
from rlloop.config.rollout import EngineKind, RolloutConfig
from rlloop.config.run import ParityMode, RunConfig
from rlloop.errors import ConfigError
from rlloop.launch.room import check_room
from rlloop.models import Model, load_model
from rlloop.models.adapter_files import read_adapter
from rlloop.models.adapter_weights import Adapter, choose_targets, fresh_weights
from rlloop.models.architecture import ModelConfig
from rlloop.models.config import read_config
from rlloop.models.weights import usable_device
from rlloop.numerics.probe import probe
from rlloop.numerics.profile import Drift, NumericsProfile
from rlloop.parallel.context import ParallelContext
from rlloop.parity.asked import Vocabulary
from rlloop.parity.first_difference import diagnose
from rlloop.parity.monitor import Finding, TokenDifference
from rlloop.protocols import InProcessEngine
from rlloop.rollout import Engine, vllm
from rlloop.study.drifted_ops import drifted_ops
from rlloop.trainer import Trainer
from rlloop.trainer.critic import Critic
from rlloop.trainer.history import Sharded, WeightHistory
from rlloop.trainer.neighbours import BesideEngines
from rlloop.types import Sample

ENGINE_SETTINGS = ("page_size", "max_batch_tokens", "max_cache_tokens", "prefix_caching")  # of `rlloop.Engine`


def load(
    config: RunConfig, source: str | Path, context: ParallelContext | None = None, *, trains: bool = False
) -> Model:
    """The model of a folder, under the run's type, device and profile; `context`: of one rank of many.

    Raises ConfigError for packed weights without an adapter to train, for one that `trains` and that a GPU has no room
    for, and where `parity.mode=require` meets a machine that fails the start-up probe.
    """
    stored = read_config(source)
    if config.model.lora.rank == 0 and stored.quantization is not None:
        raise ConfigError(
            f"{source} has packed weights (its quantization_config or hf_quant_config.json), which are frozen: "
            "set model.lora.rank to train an adapter over them, or model.path to a folder of plain weights"
        )
    if trains:
        check_room(config, stored, source, usable_device(config.device) if context is None else context.device)
    model = load_unchecked(config, source, context)
    if config.parity.mode is ParityMode.require:
        broken = probe(model.ops, model.dtype, model.device)
        if broken:
            reasons = "; ".join(f"{operation}: {why}" for operation, why in broken.items())
            raise ConfigError(
                f"this machine does not keep the numerical contract in {config.model.dtype} ({reasons}), so "
                "parity.mode=require cannot hold; `rlloop doctor` says more, and parity.mode=observe measures it"
            )
    return model


def load_unchecked(config: RunConfig, source: str | Path, context: ParallelContext | None = None) -> Model:
    """`load` without its checks."""
    profile = NumericsProfile(**vars(config.model.profile))
    model = load_model(
        source, dtype=config.model.dtype, device=config.device, profile=profile, context=context,
        quantize=config.model.quantize,
    )  # fmt: skip
    return model if config.model.lora.rank == 0 else with_lora(model, config.model.lora, config.seed)


def with_lora(model: Model, lora: LoraSection, seed: int) -> Model:
    """A view of the model, frozen, with the adapter that trains. Raises `ConfigError` for one that does not fit."""
    targets = choose_targets(model.adapter_targets(), lora.targets)
    if lora.path is None:
        weights = fresh_weights(targets, lora.rank, lora.alpha, seed)
    else:
        weights = read_adapter(model, lora.path)
        if (weights.rank, weights.alpha, weights.factors.keys()) != (lora.rank, lora.alpha, targets.keys()):
            raise ConfigError(
                f"model.lora.path has rank {weights.rank}, alpha {weights.alpha:g} and {len(weights.factors)} targets; "
                f"model.lora says rank {lora.rank}, alpha {lora.alpha:g} and targets of which there are {len(targets)}"
            )
    return model.requires_grad_(False).with_adapter(Adapter(weights, targets))


def vocabulary_of(config: ModelConfig) -> Vocabulary:
    placeholders = () if config.vision is None else tuple(config.vision.placeholders.values())
    return Vocabulary(config.vocab_size, config.eos_token_ids, placeholders)


def make_engine(
    model: Model, profile: ProfileConfig, rollout: RolloutConfig, drift: Drift | None = None, *, beside: bool = False
) -> InProcessEngine:
    """The engine that `rollout` names, over `model`'s own parameters, under `profile` and with the declared `drift`.
    `beside`: a trainer on the same device takes turns with it, so that it may sleep (`rollout.sleep`)."""
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
        return Engine(sampled, **settings, sleep=beside and sleeps(rollout, sampled))
    return vllm.build(rollout.engine, sampled, **settings, sleep=bool(rollout.sleep))


def sleeps(rollout: RolloutConfig, model: Model) -> bool:
    """True if an embedded engine beside the trainer of `model` gives its cache back while that works."""
    return model.device.type == "cuda" if rollout.sleep is None else rollout.sleep


def take_turns(engines: Iterable[InProcessEngine], *users: BesideEngines | None) -> None:
    """Have those of the engines that can sleep do so while one of `users` works: a trainer, its critic, its history."""
    asleep = [engine for engine in engines if isinstance(engine, Engine) and engine.sleeps]
    for user in users:
        if user is not None:
            user.neighbours = asleep


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
        lora = settings.lora
        if lora.rank and settings.reference_path is None:  # the frozen base, which takes no memory
            start = (
                None if lora.path is None or model.adapter is None else model.adapter.attached(model.adapter.targets)
            )
            return Trainer(model, config.trainer, reference=model.with_adapter(start), redraws=config.redraws)
        home = replace(model.context, device=torch.device("cpu")) if settings.reference_swapped else model.context
        reference = load_model(
            source, dtype=settings.dtype, profile=model.profile, context=home, quantize=settings.quantize
        )
    apart = config.rollout.drift.both_sides
    return Trainer(model, config.trainer, reference=reference, redraws=config.redraws, apart=apart)


def make_history(model: Model, trainer: Trainer, config: RunConfig) -> WeightHistory | None:
    """The last versions of the trainer's weights; None where all samples are of the newest."""
    partial = config.rollout.partial
    lag = partial.max_version_lag if partial.prompts else config.fleet.max_version_lag
    if lag == 0:
        return None
    past = None if trainer.sharded is None else Sharded(model, trainer.sharded)
    return WeightHistory(model, lag, config.trainer.max_batch_tokens, trainer.moe, redraws=config.redraws, past=past)


def make_critic(config: RunConfig, path: str | Path, context: ParallelContext | None = None) -> Critic | None:
    """The critic that `algorithm.critic` asks for, over weights of its own that start as the policy's; `context`: of
    one rank of many."""
    settings = config.algorithm.critic
    if not settings.lr:
        return None
    profile = NumericsProfile(**vars(config.model.profile))
    model = load_model(path, dtype=config.model.dtype, device=config.device, profile=profile, context=context)
    return Critic(model, settings, config.trainer)
