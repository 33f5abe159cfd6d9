"""fleet=regions: the trainer here, engines anywhere over HTTP, versions of the weights between them as deltas.

this process                                   a region
trainer -> publisher -> store (HTTP)  ------>  relay -> engines' replicas
loop -> pool    ---------- prompts, completions ------> engines
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlloop.config.fleet import FleetConfig
from rlloop.config.run import RunConfig
from rlloop.launch.admission import canary_requests, numerics_objection
from rlloop.launch.make import load, make_critic, make_history, make_trainer, sleeps, take_turns, vocabulary_of
from rlloop.launch.prepare import Prepared
from rlloop.launch.publishing import Stored
from rlloop.launch.ray_pool import Handle, RemoteEngine, remote_parts
from rlloop.loop.partial import measured, schedule_of
from rlloop.loop.parts import Parts
from rlloop.models import Model
from rlloop.models.config import read_config
from rlloop.numerics.profile import NumericsProfile
from rlloop.parity.first_difference import diagnose
from rlloop.rollout import Engine
from rlloop.rollout.fleet.membership import Canary, PoolSettings, hardware_class
from rlloop.rollout.fleet.pool import EnginePool, http_pool
from rlloop.rollout.fleet.pool_engine import PoolEngine
from rlloop.runs.folder import RunFolder, write_whole
from rlloop.sync.live import published_weights
from rlloop.sync.manifest import load_or_make_key
from rlloop.sync.publisher import Publisher
from rlloop.sync.store import Store, open_store
from rlloop.trainer import CheckpointStore
from rlloop.types import ModelInput, SamplingParams
from rlloop.web.server import BackgroundServer, Listen, read_token


@contextmanager
def region_parts(config: RunConfig, prepared: Prepared, folder: RunFolder) -> Iterator[Parts]:
    """Trainer, publisher, pool of engines, and the server that engines join by. All of it ends with the context."""
    path = prepared.task.model_folder()
    model = load(config, path, trains=True)
    trainer = make_trainer(model, config, path)
    history, critic = make_history(model, trainer, config), make_critic(config, path)
    schedule = schedule_of(config, history)
    publisher, (prompts, sampling) = open_publisher(config.fleet, folder.path), canary_requests(config, prepared.task)
    with fleet_of(config, folder, publisher, model.config.vocab_size, model.fingerprint()) as (engine, thread):
        room = _tokens(prompts, sampling, page=16)
        own = Engine(model.with_profile(model.profile), max_cache_tokens=room, sleep=sleeps(config.rollout, model))
        take_turns([own], trainer, critic, history)
        reference = Reference(own, hardware_class(model.fingerprint()), prompts, sampling, own.longest - 1)
        engine.prefill_logprobs = reference.prefill_logprobs
        begin = beside_the_trainer(model, publisher, config.trainer.encode_on_device)
        yield Parts(
            task=prepared.task,
            engine=engine,
            trainer=trainer,
            sync=RegionSync(begin, publisher.anchor, engine, reference, thread),
            scorer=prepared.scorer,
            advantages=prepared.advantages,
            loss=prepared.loss,
            critic=critic,
            checkpoints=CheckpointStore(folder.checkpoints, config.checkpoint.keep),
            vocabulary=vocabulary_of(model.config),
            doctor=partial(diagnose, model.with_profile(NumericsProfile(**vars(config.model.profile))), model),
            schedule=schedule,
            measured=partial(measured, engine.pool.take_metrics, schedule),
        )


@contextmanager
def ranked_region_parts(
    config: RunConfig,
    prepared: Prepared,
    folder: RunFolder,
    *,
    start: Callable[..., AbstractContextManager[Handle]],
    apart: bool = False,
) -> Iterator[Parts]:
    """`region_parts` where the trainer has several ranks, which `start(config, prepared, opens)` starts.

    Their own engines, in `rollout.layout`, make canaries alone. The first rank calls `opens` for its publisher;
    `apart`: in a process of its own, which reaches the run's folder.
    """
    fleet, path = _with_whole_paths(config.fleet), folder.path.absolute()
    run_id, own = run_id_of(path), None if apart else open_publisher(fleet, path)
    opens = partial(open_publisher, fleet, path) if own is None else lambda: own
    prompts, sampling = canary_requests(config, prepared.task)
    tokens = max(config.rollout.max_tokens, _tokens(prompts, sampling, config.rollout.page_size))
    small = replace(config, rollout=replace(config.rollout, max_cache_tokens=tokens))
    with start(small, prepared, opens) as ranks:
        publisher = own or RemotePublisher(ranks, _store_of(fleet, path), run_id)
        fingerprint = ranks.call("trainer_fingerprint")()
        vocabulary = read_config(prepared.task.model_folder()).vocab_size
        with fleet_of(config, folder, publisher, vocabulary, fingerprint) as (engine, thread):
            own, holds = RemoteEngine(ranks), tokens - tokens % config.rollout.page_size  # whole pages
            reference = Reference(own, hardware_class(fingerprint), prompts, sampling, holds)
            engine.prefill_logprobs = reference.prefill_logprobs
            begin, anchor = in_turn_with_training(ranks), lambda: ranks.call("publications.anchor")()
            sync = RegionSync(begin, anchor, engine, reference, thread)
            metrics = engine.pool.take_metrics
            yield remote_parts(config, prepared, folder, ranks, engine, sync, metrics, apart=apart)


def open_publisher(fleet: FleetConfig, path: Path) -> Publisher:
    """The publisher of the run in the folder `path`, on the store that `fleet` names or one in that folder."""
    key = load_or_make_key(path / "signing_key" if fleet.signing_key is None else Path(fleet.signing_key))
    return Publisher(_store_of(fleet, path), key, run_id_of(path), anchor_every=fleet.anchor_every)


def _store_of(fleet: FleetConfig, path: Path) -> Store:
    return open_store(str(path / "weights") if fleet.store is None else fleet.store)


def _with_whole_paths(fleet: FleetConfig) -> FleetConfig:
    """With paths of the publisher that do not depend on a process's working directory."""
    key, store = fleet.signing_key, fleet.store
    return replace(
        fleet,
        signing_key=None if key is None else str(Path(key).absolute()),
        store=store if store is None or "://" in store else str(Path(store).absolute()),
    )


@dataclass
class RemotePublisher:
    """The publisher of the first of `ranks`, in another process. `store`: its store, as this process reads it."""

    ranks: Handle
    store: Store
    run_id: str

    def claim(self) -> int:
        return self.ranks.call("publications.claim")()

    def squash_for(self, sequence: int) -> bool:
        return False  # a replica would wait for the trainer's step; its longer route remains


@contextmanager
def fleet_of(
    config: RunConfig,
    folder: RunFolder,
    publisher: Publisher | RemotePublisher,
    vocabulary: int,
    fingerprint: dict[str, Any],
) -> Iterator[tuple[PoolEngine, Executor]]:
    """The pool of engines as one engine, and a thread to publish in; beside them the server that engines join by.

    `fingerprint`: the trainer's.
    """
    from rlloop.rollout.fleet.trainer_server import trainer_app  # after `rlloop.web.server`, which names the extra

    fleet = config.fleet
    token = read_token(fleet.token_file)
    listen = Listen(fleet.host, fleet.port, token, _path(fleet.certificate), _path(fleet.key))
    with ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1, "publisher"))  # ends after the pool, which it may wait for
        pool = open_pool(
            fleet,
            folder.fleet.append,
            token=token,
            holder=publisher.run_id,
            term=publisher.claim(),
            vocabulary=vocabulary,
            objection=partial(numerics_objection, fingerprint, config.parity.mode),
        )
        stack.callback(pool.close)
        server = BackgroundServer(trainer_app(publisher.store, pool, publisher.squash_for), listen)
        stack.callback(server.close)
        note_address(folder, server.url)
        yield PoolEngine(pool, fingerprint), thread


def open_pool(fleet: FleetConfig, record: Callable[[Mapping[str, Any]], object], **options: Any) -> EnginePool:
    """The pool that `fleet` describes, with the engines that it names. `options`: see `http_pool`."""
    settings = PoolSettings(
        heartbeat=fleet.heartbeat,
        timeout=fleet.timeout,
        patience=fleet.patience,
        settle=fleet.settle,
        calls=fleet.calls,
        chunk=fleet.chunk,
        hedge=fleet.hedge,
    )
    pool = http_pool(settings, record, ca_file=fleet.ca_file, **options)
    for region, urls in fleet.engines.items():
        for url in urls:
            pool.join(url, region)
    return pool


@dataclass
class Reference:
    """Makes the canary's expected completions, by an engine on the trainer's weights and hardware class."""

    engine: Engine | RemoteEngine
    hardware: str
    prompts: Sequence[ModelInput | list[int]]
    sampling: list[SamplingParams]
    longest: int  # tokens of a prompt that its cache holds

    def prefill_logprobs(self, prompts: Sequence[ModelInput | list[int]]) -> list[np.ndarray] | None:
        """By this engine, whose bits the canary asks of all; None for prompts that are too long for it."""
        fit = max(map(len, prompts)) <= self.longest
        return self.engine.prefill_logprobs(prompts) if fit else None

    def canary(self, version: int) -> Canary | None:
        self.engine.set_version(version)
        if not self.prompts:
            return None
        completions = self.engine.generate(self.prompts, self.sampling)
        return Canary(self.prompts, self.sampling, self.hardware, completions)


def _tokens(prompts: Sequence[ModelInput | list[int]], sampling: list[SamplingParams], page: int) -> int:
    """Of a cache that holds the canary, in pages of `page` tokens."""
    sizes = (len(prompt) + each.max_tokens + page for prompt, each in zip(prompts, sampling, strict=True))
    return max(256, page, sum(sizes))


Begin = Callable[[int], Callable[[], Stored]]


@dataclass
class RegionSync:
    """Publishes each version and waits until engines serve it, in a thread of its own: a schedule may go on meanwhile.

    `begin(version)` does what the trainer's thread must do of a publication; its result, called in the other thread,
    does the rest. `anchor` stores the newest version whole.
    """

    begin: Begin
    anchor: Callable[[], object]
    engine: PoolEngine
    reference: Reference
    thread: Executor  # a single one
    _anchoring: Future[object] | None = None

    def publish(self, version: int) -> Future[Mapping[str, Any]]:
        canary = self.reference.canary(version)  # by an engine on the trainer's weights, so in the trainer's thread
        return self.thread.submit(self._publish, self.begin(version), version, canary)

    def _publish(self, rest: Callable[[], Stored], version: int, canary: Canary | None) -> dict[str, Any]:
        if self._anchoring is not None:
            self._anchoring.result()  # has ended, perhaps by an error
        stored = rest()
        # A whole version takes long, so engines sample meanwhile.
        self._anchoring = self.thread.submit(self.anchor) if stored.anchor_due else None
        return {**stored.metrics, **self.engine.serve_version(version, canary)}


def beside_the_trainer(model: Model, publisher: Publisher, on_device: bool) -> Begin:
    """Encodes in the other thread; weights on a GPU there (`on_device`, see `published_weights`), on a stream of its
    own."""
    device = model.context.device
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def begin(version: int) -> Callable[[], Stored]:
        tensors, aliases = published_weights(model, on_device=on_device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))

        def publish() -> Stored:
            with torch.cuda.stream(stream):
                published = publisher.publish(tensors, version, aliases=aliases)
                if stream is not None:
                    stream.synchronize()
            return Stored(published.metrics, publisher.anchor_due())

        return publish

    return begin


def in_turn_with_training(ranks: Handle) -> Begin:
    """All ranks encode, each its share, before they go on training."""

    def begin(version: int) -> Callable[[], Stored]:
        stored = ranks.call("publications.to_store", version)()
        return lambda: stored

    return begin


def run_id_of(path: Path) -> str:
    """The run's unique name in its versions; it stays the same when the folder is moved."""
    file = path / "fleet.json"
    if not file.exists():
        write_whole(file, json.dumps({"run_id": f"{path.absolute().name}-{secrets.token_hex(4)}"}).encode())
    return json.loads(file.read_text())["run_id"]


def note_address(folder: RunFolder, url: str) -> None:
    """Writes the address by which engines and relays find this run, for people and for `--join`."""
    folder.log(f"the fleet's address is {url}")
    write_whole(folder.path / "fleet_address", f"{url}\n".encode(), durable=False)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
