"""Builds a run's parts, drives the loop, and owns what has to be torn down: locks, signals, the terminal.

The only place that knows where things run. What can be refused is refused before anything slow starts.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from errno import EDQUOT, EFBIG, ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError

from rlloop.algorithms import advantages_for, loss_for
from rlloop.config.fleet import FleetKind
from rlloop.config.instantiate import resolve
from rlloop.config.run import Anchor, Launch, ParityMode, RunConfig
from rlloop.errors import ConfigError, ModelError, ParityError, RlloopError
from rlloop.launch.ray_pool import EngineDied, FleetEngine, FleetSync, RemoteTrainer
from rlloop.launch.signals import Interrupts
from rlloop.launch.workers import Colocated, Replica, load, make_engine, make_trainer, vocabulary_of
from rlloop.loop.loop import Loop
from rlloop.loop.parts import Advantages, Parts
from rlloop.models.config import read_config
from rlloop.numerics.profile import Drift
from rlloop.parity.certificate import Certificate
from rlloop.parity.first_difference import diagnose
from rlloop.parity.monitor import ParityMonitor
from rlloop.parity.witness import Attestor
from rlloop.protocols import Task
from rlloop.rewards import resolve_reward
from rlloop.rewards.digest import note_reward, reward_digest
from rlloop.rewards.runner import RewardRunner
from rlloop.rollout import Engine
from rlloop.runs.console import Progress, print_summary
from rlloop.runs.folder import RunFolder, read_records, summarize
from rlloop.runs.sinks import check_sinks, make_sinks
from rlloop.study.drifted import DriftedSync, drifted_copy
from rlloop.sync.colocated import ColocatedSync
from rlloop.trainer import CheckpointStore
from rlloop.trainer.checkpoint import folder_digest

INTERRUPTED = 130  # exit code
NO_ROOM = ENOSPC, EDQUOT, EFBIG


@dataclass(frozen=True)
class Job:
    """One run as it was asked for."""

    recipe: str
    config: RunConfig
    plain: Mapping[str, Any]  # the configuration as JSON values: what config.yaml holds
    folder: Path
    command: str  # what resumes it


@dataclass(frozen=True)
class Prepared:
    """What a configuration names, found and checked, before a model is loaded."""

    task: Task
    scorer: RewardRunner
    advantages: Advantages
    loss: Callable[..., Any]


Builder = Callable[[RunConfig, Prepared, RunFolder], AbstractContextManager[Parts]]


def train(job: Job, console: Console) -> int:
    """Run or resume to the last step. Returns the exit code: 0, or 130 for a run that was interrupted."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    with ExitStack() as stack:
        prepared = prepare(job.config)
        stack.callback(prepared.scorer.close)
        folder = stack.enter_context(RunFolder(job.folder))
        config_digest = folder.adopt(job.plain)
        attest = Attestor(job.config.certificate, folder.path, folder.log)
        if folder.is_finished(job.config.trainer.num_steps):
            say(f"{job.folder} is finished: nothing to do. Raise trainer.num_steps to go on, or choose another run.dir")
            return 0
        interrupts = stack.enter_context(Interrupts(say))
        try:
            certificate = Certificate(folder.parity, attest)
            certificate.note(config=config_digest)
            finished = _drive(job, prepared, folder, certificate, interrupts, console)
        except KeyboardInterrupt:
            finished = False
        except RlloopError as error:
            folder.log(f"stopped: {error}")
            _conclude(folder, "parity broken" if isinstance(error, ParityError) else "failed")
            raise
        except (OSError, SafetensorError) as error:
            if not _is_full(error):
                raise
            raise RlloopError(f"{job.folder} cannot grow: {error}. Make room; to resume: {job.command}") from error
        if not finished:
            folder.log("interrupted")
            _conclude(folder, "interrupted")
            say(f"Interrupted. To resume: {job.command}")
            return INTERRUPTED
        summary = _conclude(folder, "finished")
        print_summary(console, folder.path, summary)
        return 0


def prepare(config: RunConfig) -> Prepared:
    """Find everything that `config` names. Raises within seconds for what is not there or cannot work."""
    algorithm = config.algorithm
    corrects = algorithm.correction or algorithm.loss == "importance_sampling"
    if config.parity.mode is ParityMode.fallback and not corrects:
        # The rung under bitwise. Its weights are exactly 1 as long as engine and trainer agree, so it may always be on.
        if algorithm.anchor is Anchor.rollout:
            raise ConfigError(
                "parity.mode=fallback corrects by the ratio of the trainer's logprobs to the engine's, and with "
                "algorithm.anchor=rollout the loss sees the engine's alone; set algorithm.anchor=trainer, or "
                "parity.mode=observe"
            )
        algorithm = replace(algorithm, correction={"tis": {}})
    reward = resolve_reward(config.reward)
    advantages = advantages_for(algorithm, config.rollout.max_tokens, config.rollout.group_size)
    loss = loss_for(algorithm)
    check_sinks(config.sinks)
    for key in ("path", "reference_path"):
        path = getattr(config.model, key)
        if path is not None and not (Path(path) / "config.json").is_file():
            raise ModelError(
                f"model.{key} is {path!r}, without a config.json; it must be a Hugging Face checkpoint folder"
            )
    if config.device != "cpu" and not (config.device.startswith("cuda") and torch.cuda.is_available()):
        have = "cpu, cuda" if torch.cuda.is_available() else "cpu (torch sees no CUDA device here)"
        raise ConfigError(f"device is {config.device!r}; it must be one of {have}")
    task = resolve({"seed": config.seed, "model_path": config.model.path, **config.task}, "task")
    missing = [name for name in vars(Task) if not name.startswith("_") and not hasattr(task, name)]
    if missing:
        raise ConfigError(f"task._target_ {config.task['_target_']!r} is no task: it lacks {', '.join(missing)}")
    scorer = RewardRunner(reward, timeout=config.scoring.timeout, concurrency=config.scoring.concurrency)
    return Prepared(task, scorer, advantages, loss)


@contextmanager
def local_parts(config: RunConfig, prepared: Prepared, folder: RunFolder) -> Iterator[Parts]:
    """Trainer and engine in this process, sharing one model's parameters."""
    path = prepared.task.model_folder()
    model = load(config, path)
    trainer = make_trainer(model, config, path)
    sampled = config.rollout.profile.over(config.model.profile)
    drift = Drift(**vars(config.rollout.drift)) if config.rollout.drift.declared else None
    differs = drift is not None or sampled != config.model.profile
    with ExitStack() as stack:
        engine = make_engine(model if drift is None else drifted_copy(model), sampled, config.rollout, drift)
        eval_engine = make_engine(model, config.model.profile, config.rollout) if differs else engine
        engines = dict.fromkeys((engine, eval_engine))
        for each in engines:
            if not isinstance(each, Engine):
                stack.callback(each.close)  # vLLM's sleep mode and process groups are the process's
        sync = ColocatedSync(*engines) if drift is None else DriftedSync(model, engine, eval_engine)
        yield Parts(
            task=prepared.task,
            engine=engine,
            engine_lag=config.rollout.drift.stale_steps,
            eval_engine=eval_engine,
            trainer=trainer,
            sync=sync,
            scorer=prepared.scorer,
            advantages=prepared.advantages,
            loss=prepared.loss,
            checkpoints=CheckpointStore(folder.checkpoints, config.checkpoint.keep),
            vocabulary=vocabulary_of(model.config),
            doctor=partial(diagnose, engine.model, model),
            stateful=(sync,) if isinstance(sync, DriftedSync) else (),
        )


@contextmanager
def ray_parts(config: RunConfig, prepared: Prepared, folder: RunFolder) -> Iterator[Parts]:
    """One co-located trainer and engine, and `ray.replicas` more engines, each a Ray actor.

    Starts Ray on this machine, or attaches to `ray.address`. At the end its actors and its placement group are gone,
    and Ray with them where this run started it.
    """
    ray = _import_ray(config.ray.address)
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
        stack.enter_context(_ray_session(ray, config.ray.address, needs["CPU"] * count))
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
        engine = FleetEngine(trainer, [place(Replica, bundle) for bundle in range(1, count)])
        yield Parts(
            task=prepared.task,
            engine=engine,
            trainer=RemoteTrainer(trainer),
            sync=FleetSync(engine, trainer.reference),
            scorer=prepared.scorer,
            advantages=prepared.advantages,
            loss=prepared.loss,
            checkpoints=CheckpointStore(folder.checkpoints, config.checkpoint.keep),
            vocabulary=vocabulary_of(read_config(path)),
            doctor=lambda sample, difference: trainer.call("diagnose", sample, difference)(),
        )


def _import_ray(address: str | None) -> Any:
    if address is None and "ray" not in sys.modules:
        # A Ray of our own answers only who knows its token, and nobody from outside: its metrics ask for none. Ray
        # reads these as it is imported; without clusters, whatever the system, all of it listens on loopback.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util
    except ImportError:
        raise ConfigError("launch=ray needs Ray: pip install 'rlloop[ray]', or use launch=local") from None
    return ray


@contextmanager
def _ray_session(ray: Any, address: str | None, cpus: float) -> Iterator[None]:
    """A Ray of our own, or the cluster at `address`."""
    if ray.is_initialized():  # a caller's: it is theirs to shut down
        yield
        return
    try:
        _knock(address or "")
        ray.init(
            address=address or "local",  # never one that somebody else happens to have started here
            num_cpus=None if address else max(int(cpus), os.cpu_count() or 1),
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at ray.address={address}: {error}. One that asks for a token needs "
            "RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN in the environment"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises `ConnectionError` where nobody listens at a HOST:PORT: Ray itself would go on trying for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            raise ConnectionError(error) from None


class RayHandle:
    """A worker in an actor, as `rlloop.launch.ray_pool` wants it."""

    def __init__(self, ray: Any, name: str, start: Callable[[], Any]) -> None:
        self.name = name
        self._ray, self._start, self._actor = ray, start, start()

    def reference(self, method: str, *args: Any) -> Any:
        """The result where it lies, in the node's shared memory."""
        return getattr(self._actor, method).remote(*args)

    def call(self, method: str, *args: Any) -> Callable[[], Any]:
        reference = self.reference(method, *args)

        def wait() -> Any:
            try:
                return self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:  # the worker's own error, as if raised here
                raise error.cause from None
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
                lines = str(error).strip().splitlines()
                if getattr(error, "actor_init_failed", False):  # only the text of what it raised is left, at the end
                    raise EngineDied(f"{self.name} could not start: {lines[-1].strip()}") from error
                raise EngineDied(lines[0]) from None

        return wait

    def revive(self) -> bool:
        self.kill()
        self._actor = self._start()
        return True

    def kill(self) -> None:
        self._ray.kill(self._actor)


BUILDERS: dict[Launch, Builder] = {Launch.local: local_parts, Launch.ray: ray_parts}


def _builder(config: RunConfig) -> Builder:
    if config.fleet.kind is FleetKind.regions:
        from rlloop.launch.regions import region_parts  # brings the servers' packages, an extra

        return region_parts
    return BUILDERS[config.launch]


def _drive(
    job: Job,
    prepared: Prepared,
    folder: RunFolder,
    certificate: Certificate,
    interrupts: Interrupts,
    console: Console,
) -> bool:
    """Returns whether the last step was reached."""
    config = job.config
    with ExitStack() as stack:
        parts = stack.enter_context(_builder(config)(config, prepared, folder))
        engine, trainer = parts.engine.fingerprint(), parts.trainer.fingerprint()
        monitor = ParityMonitor(config.parity, certificate, engine, trainer)
        folder.note_fingerprints({monitor.fingerprints["engine"]: engine, monitor.fingerprints["trainer"]: trainer})
        observers: list[Any] = make_sinks(config.sinks, folder.path, job.plain)
        for sink in observers:
            stack.callback(sink.close)
        loop = Loop(config, parts, folder, monitor, observers)
        stack.callback(loop.close)
        start = loop.restore()
        if start == 0:
            certificate.note(model=folder_digest(Path(prepared.task.model_folder())))
        if config.parity.redraw and not config.redraws:
            folder.log("tokens are not drawn again: the engine draws them by another operation than the trainer's")
        changed = note_reward(folder, prepared.scorer.reward, start)
        certificate.note(reward=reward_digest(prepared.scorer.reward))
        folder.log(f"{job.recipe}: starting after step {start} of {config.trainer.num_steps}, process {os.getpid()}")
        progress = stack.enter_context(Progress(console, job.recipe, config.trainer.num_steps, start))
        progress.recall(read_records(folder.metrics.path) if start else ())
        progress.note(f"{folder.path}: " + (f"resuming after step {start}" if start else "a new run"))
        if changed is not None:
            progress.note(changed)
        if config.fleet.kind is FleetKind.regions:
            progress.note(f"engines join at {(folder.path / 'fleet_address').read_text().strip()}")
        observers.append(progress)
        with interrupts.held_back():
            last = loop.run(start, interrupts.asked)
    return last >= config.trainer.num_steps


def _conclude(folder: RunFolder, status: str) -> dict[str, Any]:
    """summary.json and curve.png, from the records."""
    from rlloop.runs.plots import draw  # matplotlib takes a second to import: not at start-up

    metrics = list(read_records(folder.metrics.path))
    summary = summarize(metrics, status)
    if metrics:
        draw({folder.path.name: metrics}, folder.path / "curve.png")
    folder.write_json("summary.json", summary)
    return summary


def _is_full(error: Exception) -> bool:
    """Whether a disk, a quota or a limit on files leaves no room. safetensors says so in its text alone."""
    return any(getattr(error, "errno", None) == code or f"(os error {code})" in str(error) for code in NO_ROOM)
