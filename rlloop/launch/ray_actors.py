"""launch=ray: the ranks of trainer and engine in Ray actors, one each; further engines in others."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlloop.config.rollout import EngineKind
from rlloop.config.run import RunConfig
from rlloop.errors import ConfigError
from rlloop.launch.admission import canary_requests, numerics_objection
from rlloop.launch.layouts import check_model
from rlloop.launch.prepare import Prepared
from rlloop.launch.ranks import in_words
from rlloop.launch.ray_pool import ActorPool, EngineDied, pool_settings, remote_parts
from rlloop.launch.ray_session import RayHandle, import_ray, ray_session
from rlloop.launch.workers import Colocated, Rank, Replica
from rlloop.loop.parts import Parts
from rlloop.models.config import read_config
from rlloop.parallel.progress import Watch
from rlloop.parallel.start import Place, PrefixStore, Store, host_store
from rlloop.runs.folder import RunFolder
from rlloop.sync.publisher import Publisher

LOOPBACK = "127.0.0.1"


@contextmanager
def ray_parts(config: RunConfig, prepared: Prepared, folder: RunFolder) -> Iterator[Parts]:
    """One co-located trainer and engine, and `ray.replicas` more engines, each with an actor for each of its ranks.

    Starts Ray on this machine, or attaches to `ray.address`. At the end the actors and their placement group are
    removed, and Ray is shut down where this run started it.
    """
    with ExitStack() as stack:
        actors = stack.enter_context(_actors(config, prepared))
        trainer = actors.start(Colocated, "trainer", config.world.size)
        replicas = [
            actors.start(Replica, f"engine {index}", config.world.engine.world_size)
            for index in range(1, config.replicas + 1)
        ]
        exact = config.rollout.engine in (EngineKind.embedded, EngineKind.vllm)  # other engines' bits may vary
        pool = ActorPool(
            trainer,
            replicas,
            trainer.reference,
            pool_settings(config.fleet),
            folder.fleet.append,
            canary=canary_requests(config, prepared.task) if exact else ([], []),
            objection=lambda trainer, state: numerics_objection(trainer, config.parity.mode, state),
        )
        stack.callback(pool.close)
        metrics = pool.engine.pool.take_metrics
        yield remote_parts(config, prepared, folder, trainer, pool.engine, pool, metrics, apart=True)


@contextmanager
def ray_ranks(config: RunConfig, prepared: Prepared, opens: Callable[[], Publisher]) -> Iterator[RayHandle]:
    """The ranks of the trainer alone, as one worker. `opens`: see `Colocated`."""
    with _actors(config, prepared) as actors:
        yield actors.start(Colocated, "trainer", config.world.size, opens)


@contextmanager
def _actors(config: RunConfig, prepared: Prepared) -> Iterator[_Actors]:
    """`_placed`, with the model, which is not made where there is no room for it."""
    with _placed(import_ray(config.ray.address), config) as actors:
        actors.path = str(Path(prepared.task.model_folder()).absolute())
        check_model(config, read_config(actors.path))
        yield actors


@contextmanager
def _placed(ray: Any, config: RunConfig) -> Iterator[_Actors]:
    """Room for all of a run's actors, which end with the context."""
    world, count = config.world, config.world.size + config.replicas * config.world.engine.world_size
    needs = {"CPU": config.ray.cpus_per_worker}
    if config.device != "cpu":
        needs["GPU"] = config.ray.gpus_per_worker
    meets = world.size > 1 or world.engine.world_size > 1
    with ExitStack() as stack:
        advice = "Give it longer by ray.timeout, or use torchrun"
        stack.enter_context(ray_session(ray, config.ray.address, needs["CPU"] * count, config.ray.timeout, advice))
        group = ray.util.placement_group([needs] * count, strategy="PACK")
        stack.callback(ray.util.remove_placement_group, group)
        try:
            ray.get(group.ready(), timeout=config.ray.timeout)
        except ray.exceptions.GetTimeoutError:
            raise ConfigError(
                f"Ray has no room for {count} workers of {needs} each ({ray.available_resources()} are free); lower "
                "ray.replicas, trainer.layout or rollout.layout, ray.cpus_per_worker or ray.gpus_per_worker, or attach "
                "to a larger cluster by ray.address"
            ) from None
        here = ray.get_runtime_context().get_node_id()
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        bundles = sorted(nodes, key=lambda bundle: (nodes[bundle] != here, nodes[bundle], bundle))
        local = config.ray.address is None
        host = LOOPBACK if local else ray.util.get_node_ip_address()
        threads = torch.get_num_threads() // world.size if local else torch.get_num_threads()
        store = host_store(host) if meets else None
        address = "" if store is None else f"tcp://{host}:{store.port}"
        actors = _Actors(ray, config, group, needs, bundles, max(1, threads), store, address)
        stack.callback(actors.kill)
        yield actors


class _Worker:
    """A worker in its actor. Of what a constructor raises Ray keeps the text alone, so this one raises it from its
    calls: as `EngineDied`, with the error's exit code."""

    def __init__(self, name: str, make: Callable[..., Rank], *args: Any) -> None:
        self._refused: EngineDied | None = None
        try:
            self._worker = make(*args)
        except Exception as error:
            refused = self._refused = EngineDied(f"{name} could not start: {in_words(error)}", died=False)
            refused.exit_code = getattr(error, "exit_code", refused.exit_code)
            refused.add_note(traceback.format_exc())  # for --full-error
            # With its frames the process group stays: a closed one would be an error of the other ranks too.
            refused.__cause__ = error

    def call(self, method: str, *args: Any) -> Any:
        if self._refused is not None:
            raise self._refused
        return self._worker.call(method, *args)


@dataclass
class _Actors:
    """Starts workers in the bundles of a placement group, those of one node after each other."""

    ray: Any
    config: RunConfig
    group: Any
    needs: dict[str, float]
    bundles: list[int]  # that are free
    threads: int
    store: Store | None  # where ranks meet
    address: str
    path: str = ""  # of the model

    def __post_init__(self) -> None:
        self._handles: list[RayHandle] = []

    def start(self, kind: type[Rank], name: str, size: int, *further: Any) -> RayHandle:
        """A worker of `size` ranks; `further`: arguments of its own. Rank 0 of the first is on this machine, if there
        is room, for it writes files."""
        ray = self.ray
        mine, self.bundles = self.bundles[:size], self.bundles[size:]
        variables = {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        boots = itertools.count()

        def actor(bundle: int, place: Place) -> Any:
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, bundle)
            named = type(kind.__name__, (_Worker,), {})  # as its process is in lists of processes
            options = ray.remote(named).options(
                num_cpus=self.needs["CPU"],
                num_gpus=self.needs.get("GPU"),
                scheduling_strategy=strategy,
                runtime_env={"env_vars": variables},
            )
            return options.remote(name, kind, self.config, self.path, self.threads, place, *further)

        def start() -> tuple[list[Any], Watch | None]:
            prefix = f"{name} {next(boots)}".replace(" ", "-")
            places = [Place(rank, size, f"{self.address}/{prefix}") for rank in range(size)]
            watch = None if self.store is None or size == 1 else Watch(PrefixStore(prefix, self.store), size)
            return [actor(*each) for each in zip(mine, places, strict=True)], watch

        handle = RayHandle(ray, name, start, self.config.ray.rank_timeout)
        self._handles.append(handle)
        return handle

    def kill(self) -> None:
        for handle in self._handles:
            handle.kill()
