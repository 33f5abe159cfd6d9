"""A run's actors: engines as the pool's clients, weights as deltas through shared memory, the trainer behind a handle.

Uses handles, not Ray itself: a `Handle` calls a worker's method and returns something to wait for. The pool
(`rlloop.rollout.fleet.pool`) decides the response to an engine's death.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlloop.config.fleet import FleetConfig
from rlloop.config.run import RunConfig
from rlloop.errors import RlloopError, SyncError
from rlloop.launch.make import vocabulary_of
from rlloop.launch.prepare import Prepared
from rlloop.loop.partial import measured, schedule_of
from rlloop.loop.parts import Parts
from rlloop.models.config import read_config
from rlloop.protocols import Engine, WeightSync
from rlloop.rollout.engine.validation import one_for_each
from rlloop.rollout.errors import EngineLost
from rlloop.rollout.fleet.membership import Canary, PoolSettings, Record, hardware_class
from rlloop.rollout.fleet.pool import EnginePool
from rlloop.rollout.fleet.pool_engine import PoolEngine
from rlloop.rollout.fleet.wire import EngineState, Progress
from rlloop.runs.folder import RunFolder
from rlloop.trainer import CheckpointStore
from rlloop.types import Completion, ModelInput, Recomputed, Sample, SamplingParams

log = logging.getLogger(__name__)

REGION = "node"  # of all engines in actors, in events and metrics


class EngineDied(RlloopError):
    """A worker failed. `died`: its process is gone; False: it could not start, raised, or made no progress."""

    def __init__(self, *args: object, died: bool = True) -> None:
        super().__init__(*args)
        self.died = died


class Handle(Protocol):
    name: str

    def call(self, method: str, *args: Any) -> Callable[[], Any]:
        """Start the call (`Rank.call`); the result waits for it, and raises `EngineDied` if the process is gone."""
        ...

    def revive(self) -> None:
        """Starts a new process in place of a dead one."""
        ...


class Bundles:
    """The newest version of the weights, as bundles for replicas; the launcher's object store holds them."""

    def __init__(self, start: Callable[..., Any]) -> None:
        """`start` calls a method of the trainer's worker, and returns the bundle that it gives without waiting."""
        self._start = start
        self.newest: tuple[int, Any] = (-1, None)  # version, and the way to it from the version before

    def publish(self, version: int) -> None:
        self.newest = version, self._start("publish", version)

    def joining(self) -> Any:
        return self._start("publications.joining")


class ActorClient:
    """An engine in an actor, as a client of the pool.

    An actor runs one call at a time, so its state is cached here, to avoid waiting behind a long generation. A replica
    that died is restarted once and brought to the newest version; if it dies again before it has served, it is given
    up. The trainer's own engine is never restarted, since its state would be lost.
    """

    def __init__(self, handle: Handle, fingerprint: dict[str, Any], bundles: Bundles | None) -> None:
        """`bundles`: None for the trainer's own engine, which has the weights."""
        self._handle, self._fingerprint, self._bundles = handle, fingerprint, bundles
        self.version = -1
        self.metrics: Mapping[str, float] = {}  # sync/* of its last change of weights
        self._boot = 0
        self._served = True  # since this process began; the first one may die like any later
        self._death: EngineDied | None = None
        self._reported = False
        self._threads = ThreadPoolExecutor(thread_name_prefix=handle.name)

    async def state(self, timeout: float | None = None) -> EngineState:
        await self._revive()
        weights = Progress.of(self.version, self.metrics)
        name = self._handle.name
        return EngineState(f"{self._boot}", name, REGION, "ready", self.version, 0, self._fingerprint, weights)

    async def lease(self, timeout: float | None = None) -> None:
        """Nothing to do: the actor belongs to this process alone."""

    async def wake(self, version: int, wait: float) -> EngineState:
        await self._revive()
        if self._bundles is None:
            self.version = version
        elif self.version != self._bundles.newest[0]:
            version, bundle = self._bundles.newest
            try:
                self.metrics = await self._call("apply", bundle)
            except SyncError as lost:
                log.warning("%s could not take version %d (%s); it gets all of it", self._handle.name, version, lost)
                self.metrics = await self._call("apply", self._bundles.joining())
            self.version = version
        return await self.state()

    async def generate(
        self,
        prompts: Sequence[ModelInput | list[int]],
        sampling: Sequence[SamplingParams],
        *,
        lowest: int | None = None,
        highest: int | None = None,
        boot: str | None = None,
    ) -> list[Completion]:
        """Raises `EngineLost` where the process is gone; for the trainer's, `EngineDied`."""
        if boot not in (None, f"{self._boot}"):
            raise EngineLost(f"{self._handle.name} was restarted")
        completions = await self._call("generate", self.version if lowest is None else lowest, prompts, sampling)
        self._served = True
        return completions

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, method: str, *args: Any) -> Any:
        boot, wait = self._boot, self._handle.call(method, *args)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, wait)
        except EngineDied as death:
            if boot == self._boot:
                self._death, self._reported = death, False
            if self._bundles is None:
                raise
            raise EngineLost(f"{self._handle.name} died: {death}") from None

    async def _revive(self) -> None:
        """Raises the death once, so that it is recorded, and each time for an engine that is given up."""
        if self._death is None:
            return
        if not self._reported or not self._served or self._bundles is None:
            if not self._reported and not self._served:
                log.warning("%s died again (%s) before it had served: it is given up", self._handle.name, self._death)
            self._reported = True
            raise EngineLost(f"{self._handle.name} died: {self._death}")
        log.warning("%s died (%s); it is restarted", self._handle.name, self._death)
        self._handle.revive()
        self._death, self._served, self.version = None, False, -1
        self._boot += 1
        self._fingerprint = await self._call("fingerprint")


Objection = Callable[[Mapping[str, Any], EngineState], str | None]


class ActorPool:
    """A run's engines in actors: as one engine of the loop (`engine`), and as its `WeightSync`.

    Each version reaches the replicas as a delta from the one before, encoded once and put into shared memory; each
    applies it by its own state machine (`rlloop.sync.replica`). A replica that is new, or that the delta does not fit,
    gets the whole version.
    """

    def __init__(
        self,
        trainer: Handle,
        replicas: Sequence[Handle],
        start: Callable[..., Any],
        settings: PoolSettings,
        record: Record,
        *,
        canary: tuple[Sequence[ModelInput | list[int]], list[SamplingParams]] = ([], []),
        objection: Objection = lambda trainer, state: None,
    ) -> None:
        """Waits until all workers have started; raises `EngineDied` where one cannot.

        `start`: see `Bundles`. `canary`: its prompts and their sampling. `objection`: given the trainer's fingerprint,
        why an engine must not serve.
        """
        handles = [trainer, *replicas]
        waits = [handle.call("fingerprint") for handle in handles]
        first, *others = prints = [wait() for wait in waits]
        self._trainer, self._requests, self._hardware = trainer, canary, hardware_class(first)
        self._bundles = Bundles(start)
        self._client = ActorClient(trainer, first, None)
        self._replicas = [ActorClient(*each, self._bundles) for each in zip(replicas, others, strict=True)]
        clients = dict(zip([handle.name for handle in handles], [self._client, *self._replicas], strict=True))
        pool = EnginePool(settings, record, clients.__getitem__, objection=partial(objection, first))
        for name in clients:
            pool.join(name, REGION)
        # Engines that differ among themselves cannot all agree with the trainer.
        differing = {name: each for name, each in zip(clients, prints, strict=True) if each != first}
        self.engine = PoolEngine(pool, {**first, "differing_engines": differing} if differing else first)
        self.engine.prefill_logprobs = RemoteEngine(trainer).prefill_logprobs

    def publish(self, version: int) -> dict[str, float]:
        began = time.perf_counter()
        if not self._replicas:
            self._trainer.call("set_version", version)()
            self.engine.serve_version(version, None)
            return {}
        self._bundles.publish(version)
        metrics = dict(self._trainer.call("published")())
        self.engine.serve_version(version, self._canary(version))
        for replica in self._replicas:
            for name, seconds in replica.metrics.items() if replica.version == version else ():
                if name.endswith("_seconds"):
                    metrics[name] = max(metrics.get(name, 0.0), seconds)
        return {**metrics, "sync/seconds": time.perf_counter() - began}

    def close(self) -> None:
        self.engine.pool.close()

    def _canary(self, version: int) -> Canary | None:
        """The completions of the trainer's own engine, computed only when a replica joins or is back."""
        prompts, sampling = self._requests
        if not prompts:
            return None
        return Canary(
            prompts,
            sampling,
            self._hardware,
            reference=partial(self._client.generate, prompts, sampling, lowest=version),
        )


def pool_settings(fleet: FleetConfig) -> PoolSettings:
    """Pool settings for actors: one call at a time, with an even share of the prompts. Deaths are detected reliably, so
    every live replica is waited for."""
    return PoolSettings(
        heartbeat=fleet.heartbeat,
        timeout=0.0,
        patience=fleet.patience,
        settle=math.inf,
        calls=1,
        chunk=1 << 30,
        hedge=fleet.hedge,
        affinity=0,
        together=1,
        canary_every_version=False,
        canary_seconds=None,
        origins=False,
    )


class RemoteEngine:
    """The engine of the loop, behind the co-located worker's handle, without a pool."""

    policy_version = -1

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def set_version(self, version: int) -> None:
        self._handle.call("set_version", version)()
        self.policy_version = version

    def generate(
        self, prompts: Sequence[ModelInput | list[int]], sampling: SamplingParams | list[SamplingParams]
    ) -> list[Completion]:
        each = list(one_for_each(prompts, sampling))
        return self._handle.call("generate", self.policy_version, prompts, each)()

    def prefill_logprobs(self, prompts: Sequence[ModelInput | list[int]]) -> list[np.ndarray] | None:
        return self._handle.call("prefill_logprobs", prompts)()

    def fingerprint(self) -> dict[str, Any]:
        return self._handle.call("fingerprint")()


class RemoteHistory:
    """The weights of past versions that the co-located worker keeps: a `rlloop.loop.schedule.History`."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def remember(self, version: int) -> None:
        self._handle.call("history.remember", version)()

    def recompute(self, samples: Sequence[Sample]) -> Recomputed:
        return self._handle.call("history.recompute", samples)()

    def save(self, folder: Path) -> None:
        self._handle.call("history.save", folder)()

    def restore(self, folder: Path) -> None:
        self._handle.call("history.restore", folder)()


class RemoteTrainer:
    """The Trainer of the loop, behind the co-located worker's handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def forward_backward(
        self, batch: Sequence[Sample], loss: Callable[..., Any], *, old_logprobs: Sequence[np.ndarray] | None = None
    ) -> Any:
        return self._handle.call("forward_backward", batch, loss, old_logprobs)()

    def optim_step(self) -> Mapping[str, float]:
        return self._handle.call("trainer.optim_step")()

    def recompute(self, batch: Sequence[Sample]) -> Recomputed:
        return self._handle.call("trainer.recompute", batch)()

    def prompt_logprobs(self, prompt: ModelInput) -> np.ndarray:
        return self._handle.call("trainer.prompt_logprobs", prompt)()

    def reference_kl(self, batch: Sequence[Sample], kind: str) -> Sequence[float]:
        return self._handle.call("trainer.reference_kl", batch, kind)()

    def routing(self) -> Mapping[str, float]:
        return self._handle.call("trainer.routing")()

    def replay_experts(self, on: bool) -> None:
        self._handle.call("trainer.replay_experts", on)()

    def save(self, folder: Path) -> None:
        self._handle.call("trainer.save", folder)()

    def restore(self, folder: Path) -> None:
        self._handle.call("trainer.restore", folder)()

    def fingerprint(self) -> dict[str, Any]:
        return self._handle.call("trainer_fingerprint")()


class RemoteCritic:
    """The Critic of the loop, behind the co-located worker's handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def advantages(self, samples: Sequence[Sample]) -> list[Sample]:
        return self._handle.call("critic.advantages", samples)()

    def update(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        return self._handle.call("critic.update", samples)()

    def save(self, folder: Path) -> None:
        self._handle.call("critic.save", folder)()

    def restore(self, folder: Path) -> None:
        self._handle.call("critic.restore", folder)()


def remote_parts(
    config: RunConfig,
    prepared: Prepared,
    folder: RunFolder,
    trainer: Handle,
    engine: Engine,
    sync: WeightSync,
    metrics: Callable[[], Mapping[str, float]] = dict,
    *,
    apart: bool = False,
) -> Parts:
    """Parts of a run whose trainer is a `Colocated` worker behind a handle. `metrics`: of engines, since the last
    step. `apart`: rank 0 has a process of its own."""
    schedule = schedule_of(config, RemoteHistory(trainer))
    return Parts(
        task=prepared.task,
        engine=engine,
        trainer=RemoteTrainer(trainer),
        sync=sync,
        scorer=prepared.scorer,
        advantages=prepared.advantages,
        loss=prepared.loss,
        critic=RemoteCritic(trainer) if config.algorithm.critic.lr else None,
        checkpoints=CheckpointStore(folder.checkpoints, config.checkpoint.keep),
        vocabulary=vocabulary_of(read_config(prepared.task.model_folder())),
        doctor=lambda sample, difference: trainer.call("diagnose", sample, difference)(),
        schedule=schedule,
        measured=partial(measured, metrics, schedule),
        ranks=trainer.call if apart else None,
    )
