"""launch=ray: the trainer with an engine of its own in one Ray actor, further engines in others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from rlloop.config.rollout import EngineKind
from rlloop.config.run import RunConfig
from rlloop.errors import ConfigError
from rlloop.launch.admission import canary_requests, numerics_objection
from rlloop.launch.prepare import Prepared
from rlloop.launch.ray_pool import ActorPool, RemoteTrainer, pool_settings
from rlloop.launch.ray_session import RayHandle, import_ray, ray_session
from rlloop.launch.workers import Colocated, Replica, vocabulary_of
from rlloop.loop.parts import Parts
from rlloop.models.config import read_config
from rlloop.runs.folder import Journal, RunFolder
from rlloop.trainer import CheckpointStore


@contextmanager
def ray_parts(config: RunConfig, prepared: Prepared, folder: RunFolder) -> Iterator[Parts]:
    """One co-located trainer and engine, and `ray.replicas` more engines, each a Ray actor.

    Starts Ray on this machine, or attaches to `ray.address`. At the end the actors and their placement group are
    removed, and Ray is shut down where this run started it.
    """
    ray = import_ray(config.ray.address)
    if config.rollout.drift.declared or vars(config.rollout.profile.over(config.model.profile)) != vars(
        config.model.profile
    ):
        raise ConfigError(
            "rollout.drift and rollout.profile compare numerics in one process; use launch=local for them"
        )
    path = str(Path(prepared.task.model_folder()).absolute())
    threads = torch.get_num_threads()
    environment = {"env_vars": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}}
    count = 1 + config.ray.replicas
    needs = {"CPU": config.ray.cpus_per_worker}
    if config.device != "cpu":
        needs["GPU"] = config.ray.gpus_per_worker
    with ExitStack() as stack:
        stack.enter_context(ray_session(ray, config.ray.address, needs["CPU"] * count))
        group = ray.util.placement_group([needs] * count, strategy="PACK")
        stack.callback(ray.util.remove_placement_group, group)
        try:
            ray.get(group.ready(), timeout=config.ray.timeout)
        except ray.exceptions.GetTimeoutError:
            raise ConfigError(
                f"Ray has no room for {count} workers of {needs} each ({ray.available_resources()} are free); lower "
                "ray.replicas, ray.cpus_per_worker or ray.gpus_per_worker, or attach to a larger cluster by ray.address"
            ) from None

        def place(kind: type, bundle: int) -> RayHandle:
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)
            actor = ray.remote(kind).options(
                num_cpus=needs["CPU"], num_gpus=needs.get("GPU"), scheduling_strategy=strategy, runtime_env=environment
            )
            name = "trainer" if kind is Colocated else f"engine {bundle}"
            handle = RayHandle(ray, name, lambda: actor.remote(config, path, threads))
            stack.callback(handle.kill)
            return handle

        trainer = place(Colocated, 0)
        exact = config.rollout.engine in (EngineKind.embedded, EngineKind.vllm)  # other engines' bits may vary
        actors = ActorPool(
            trainer,
            [place(Replica, bundle) for bundle in range(1, count)],
            trainer.reference,
            pool_settings(config.fleet),
            Journal(folder.path / "fleet.jsonl").append,
            canary=canary_requests(config, prepared.task) if exact else ([], []),
            objection=lambda trainer, state: numerics_objection(trainer, config.parity.mode, state),
        )
        stack.callback(actors.close)
        yield Parts(
            task=prepared.task,
            engine=actors.engine,
            trainer=RemoteTrainer(trainer),
            sync=actors,
            scorer=prepared.scorer,
            advantages=prepared.advantages,
            loss=prepared.loss,
            checkpoints=CheckpointStore(folder.checkpoints, config.checkpoint.keep),
            vocabulary=vocabulary_of(read_config(path)),
            doctor=lambda sample, difference: trainer.call("diagnose", sample, difference)(),
            measured=actors.engine.pool.take_metrics,
        )
