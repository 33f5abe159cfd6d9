"""Plain classes that a launcher places in separate processes: the co-located worker and the engine replica.

Each is one rank of a group, the same program on every rank: a method is called on all of them with the same arguments,
does its share, meets the others in copies (`rlloop.parallel.collectives`), and rank 0's result is the result.

They do not use Ray. Processes exchange completions, samples, logprobs and, once per version, the changes of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from rlloop.config.run import RunConfig
from rlloop.errors import SyncError
from rlloop.launch.garbage import collect_rarely
from rlloop.launch.make import (
    doctor_for,
    load,
    load_unchecked,
    make_critic,
    make_engine,
    make_history,
    make_trainer,
    take_turns,
)
from rlloop.launch.publishing import Publications
from rlloop.launch.timeline import FILE, Phase, Tracer
from rlloop.models import Model
from rlloop.models.parameters import ParameterStore
from rlloop.models.weights import usable_device
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.cut import share
from rlloop.parallel.layout import Layout
from rlloop.parallel.progress import doing, reported, rest
from rlloop.parallel.start import Place, meet, process_group
from rlloop.parity.across_ranks import different_weights, of_ranks, of_weights
from rlloop.parity.monitor import Finding, TokenDifference
from rlloop.rollout.engine.leader import hand_out
from rlloop.sync.bundle import Bundle, BundleReplica
from rlloop.sync.live import LiveTarget, named_weights
from rlloop.sync.publisher import Publisher
from rlloop.sync.target import TORN
from rlloop.trainer.update_result import UpdateResult
from rlloop.types import Completion, ModelInput, Sample, SamplingParams

ALONE = Place()


class Rank:
    """One rank of a group of processes that run the same program."""

    def __init__(self, config: RunConfig, threads: int, place: Place, layout: Layout, engine: Layout) -> None:
        """Meets the others at `place`. `layout` fills the group, `engine` once or several times over."""
        torch.set_num_threads(threads)
        self.process = ExitStack()
        device = usable_device(config.device)
        if place.size > 1:
            collect_rarely(self.process)
            device = place.device(device.type)
            self.process.enter_context(reported(meet(place.address), place.rank))  # also while others are waited for
            self.process.enter_context(process_group(device, place.address, place.rank, place.size))
        self.context = join(device, layout)
        self.engine_context = join(device, engine)
        self.world = self.context.ranks("world")

    def call(self, method: str, *args: Any) -> Any:
        """A method's result on rank 0, None on others. `method` may be a part's, such as trainer.recompute."""
        rest()
        with doing("computes"):
            result = attrgetter(method)(self)(*args)
        return result if self.world.rank == 0 else None

    def close(self) -> None:
        self.process.close()

    def compared(self, fingerprint: dict[str, Any]) -> dict[str, Any]:
        """The fingerprint, with differing ones of other ranks."""
        prints = self.world.gather_objects(fingerprint)
        differing = {f"rank {rank}": each for rank, each in enumerate(prints) if each != prints[0]}
        return {**fingerprint, "differing_ranks": differing} if differing else fingerprint


class Replica(Rank):
    """One engine with its own weights, rewritten in place at each version.

    Of several ranks the first has a whole copy of the weights in the host's memory, which follows the versions; the
    others get their parts from it.
    """

    def __init__(self, config: RunConfig, path: str, threads: int, place: Place = ALONE) -> None:
        super().__init__(config, threads, place, config.world.engine, config.world.engine)
        self._open(config, path)
        self._followed = self.model
        if self.world.size > 1 and self.world.rank == 0:
            self._followed = load_unchecked(config, path, ParallelContext(torch.device("cpu")))
        self._versions = [TORN]  # of the whole copy
        took = self.engine.set_version if self.world.size == 1 else self._versions.append  # called between batches
        target = LiveTarget(named_weights(self._followed).items(), took)
        self._sync = BundleReplica(target, threads)

    def _open(self, config: RunConfig, path: str, *, apart: bool = False, beside: bool = False) -> None:
        """Loads the weights of `context`, and makes the engine, over those of `engine_context`; `apart`: its own."""
        self.model = self.sampled = load(config, path, self.context, trains=beside)
        if apart:
            self.sampled = load(config, path, self.engine_context)
        elif self.engine_context.layout != self.context.layout:
            self.sampled = Model(self.model.config, self.model.profile, self.engine_context, weights_of=self.model)
        profile = config.rollout.profile.over(config.model.profile)
        self.engine = make_engine(self.sampled, profile, config.rollout, beside=beside)
        if close := getattr(self.engine, "close", None):
            self.process.callback(close)

    def generate(
        self, version: int, prompts: Sequence[ModelInput | list[int]], sampling: list[SamplingParams]
    ) -> list[Completion]:
        """Completions by the weights of `version`, which must be those that the engines have.

        Each engine of the world makes those of its share of the prompts, in order.
        """
        assert self.engine.policy_version == version, f"has version {self.engine.policy_version}, not {version}"
        layout, at = self.engine_context.layout, self.engine_context.coordinates
        slot = self.world.rank // layout.world_size * layout.dp_shard + at["dp_shard"]
        begin, end = share(len(prompts), self.world.size // layout.world_size * layout.dp_shard, slot)
        completions = self.engine.generate(prompts[begin:end], sampling[begin:end])
        first = not (at["pp"] or at["cp"] or at["tp"])  # of the ranks that make the same completions
        shares = self.world.gather_objects((slot, completions if first else []))
        return [completion for _, each in sorted(shares, key=lambda pair: pair[0]) for completion in each]

    def prefill_logprobs(self, prompts: Sequence[ModelInput | list[int]]) -> list[np.ndarray] | None:
        """[P - 1] float32 a prompt; None where the engine cannot be asked."""
        prefill = getattr(self.engine, "prefill_logprobs", None)
        return None if prefill is None else prefill(prompts)

    def apply(self, bundle: Bundle) -> dict[str, float]:
        """Brings the live parameters to the bundle's version. Raises `SyncError`, and then keeps the previous one."""
        if self.world.size == 1:
            return self._sync.apply(bundle)
        metrics, refused = dict[str, float](), None
        if self.world.rank == 0:
            try:
                metrics = self._sync.apply(bundle)
            except SyncError as error:
                refused = error
        version, refused = self.world.broadcast_object((self._versions[-1], refused))
        if refused is not None:  # on all ranks, which then go on
            raise refused
        hand_out(self.model, self._followed if self.world.rank == 0 else None)
        self.engine.set_version(version)
        return metrics

    def fingerprint(self) -> dict[str, Any]:
        return self.compared(self.engine.fingerprint())


class Colocated(Replica):
    """Trainer and engine over one set of parameters, which need no sync, and the publisher for other engines."""

    def __init__(
        self, config: RunConfig, path: str, threads: int, place: Place = ALONE,
        opens: Callable[[], Publisher] | None = None,
    ) -> None:  # fmt: skip
        """`opens`: the publisher of the first rank, for `publications.to_store`."""
        Rank.__init__(self, config, threads, place, config.world.trainer, config.world.engine)
        # Sharded parameters are whole only while the trainer computes with them; other stages' are on other ranks.
        lora = config.model.lora.rank > 0
        sharded = config.trainer.shard == "parameters" and self.context.layout.dp_shard > 1 and not lora
        self._apart = sharded or not config.world.stages_agree
        self._open(config, path, apart=self._apart, beside=True)
        self.trainer = make_trainer(self.model, config, path)
        self.critic = make_critic(config, path, self.context)
        self.history = make_history(self.model, self.trainer, config)
        take_turns([self.engine], self.trainer, self.critic, self.history)
        self.publications = Publications(
            self.sampled if self._apart else self.model,
            self.world,
            opens() if opens is not None and self.world.rank == 0 else None,
            on_device=config.trainer.encode_on_device,
            threads=threads,
        )
        self._published: dict[str, float] = {}
        self._tracer = Tracer()

    def set_version(self, version: int) -> None:
        """The engine has the trainer's weights, now `version`; parts of another layout are copied from rank to rank."""
        if self._apart:
            ParameterStore(self.sampled).copy_wholes(self.trainer.compute_copy())
        self.engine.set_version(version)

    def publish(self, version: int) -> Bundle | None:
        """The bundle that brings a replica of the previous version to the trainer's weights, now `version`; rank 0 has
        it. Each rank encodes its share."""
        self.set_version(version)
        bundle = self.publications.bundle(version)
        self._published = {} if bundle is None else bundle.metrics
        return bundle

    def published(self) -> dict[str, float]:
        """sync/* metrics of the last publication."""
        return self._published

    def forward_backward(
        self, batch: Sequence[Sample], loss: Callable[..., Any], old_logprobs: Sequence[np.ndarray] | None
    ) -> UpdateResult:
        return self.trainer.forward_backward(batch, loss, old_logprobs=old_logprobs)

    def trace(self) -> None:
        """Begins to trace rank 0."""
        if self.world.rank == 0:
            self._tracer.start()

    def traced(self, phases: Sequence[Phase]) -> tuple[bytes, bool] | None:
        """Rank 0's trace with the loop's phases, compressed, and `Tracer.stop`'s result."""
        if self.world.rank > 0:
            return None
        with TemporaryDirectory() as folder:
            whole = self._tracer.stop(file := Path(folder, FILE), phases)
            return file.read_bytes(), whole

    def trainer_fingerprint(self) -> dict[str, Any]:
        return self.compared(self.trainer.fingerprint())

    def diagnose(self, sample: Sample, difference: TokenDifference) -> Finding | None:
        """The diagnosis, which names the ranks on which an operation or a weight differs."""
        doctor = doctor_for(self.engine, self.model)
        if doctor is None or self.world.size == 1:
            return None if doctor is None else doctor(sample, difference)
        wholes = self.trainer.compute_copy() if self._apart else None
        weights = self.world.gather_objects(different_weights(self.model, self.sampled, wholes))
        if any(weights):  # which explains it
            return of_weights(weights)
        return of_ranks(self.world.gather_objects(doctor(sample, difference)))
