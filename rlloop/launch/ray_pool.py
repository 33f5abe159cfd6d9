"""Several engines as one, for the loop: work dealt out, a dead engine's requests made again by the others.

Knows handles, not ray: a `Handle` calls a method of a worker elsewhere and gives back something to wait for. A
request's completion is a function of weights, prompt and seed, so it does not matter which engine makes it, or how
often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlloop.errors import RlloopError, SyncError
from rlloop.types import Completion, Recomputed, Sample, SamplingParams

log = logging.getLogger(__name__)


class EngineDied(RlloopError):
    """A worker's process is gone."""


class Handle(Protocol):
    name: str

    def call(self, method: str, *args: Any) -> Callable[[], Any]:
        """Starts the call; the result waits for it, and raises EngineDied where the process is gone."""
        ...

    def revive(self) -> bool:
        """Starts a new process in place of a dead one; False where that cannot be."""
        ...


# A method of the trainer's worker and its arguments -> the bundle that it gives, wherever the launcher keeps that.
Ways = Callable[..., Any]


class FleetEngine:
    """The Engine of the loop, over the co-located worker and its replicas."""

    def __init__(self, trainer: Handle, replicas: Sequence[Handle]) -> None:
        self.trainer, self.replicas = trainer, list(replicas)
        self.policy_version = -1
        self.ways: Ways | None = None

    def generate(self, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]) -> list[Completion]:
        """Requests are dealt out in turn; completions come back in order."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        done: list[Completion | None] = [None] * len(prompts)
        todo = list(range(len(prompts)))
        while todo:
            handles = [self.trainer, *self.replicas]
            shares = [todo[i :: len(handles)] for i in range(len(handles))]
            waits = [
                (handle, share, handle.call("generate", self.policy_version, *_pick(prompts, params, share)))
                for handle, share in zip(handles, shares, strict=True)
                if share
            ]
            todo = []
            for handle, share, wait in waits:
                try:
                    for index, completion in zip(share, wait(), strict=True):
                        done[index] = completion
                except EngineDied as death:
                    if handle is self.trainer:
                        raise
                    self._bury(handle, death)
                    todo += share
        return [completion for completion in done if completion is not None]

    def _bury(self, handle: Handle, death: EngineDied) -> None:
        """A replica is back in service only with the weights of the version that is served."""
        log.warning("%s died (%s); its requests go to the others", handle.name, death)
        if handle.revive():
            try:
                self.join(handle)
                return
            except EngineDied as again:
                log.warning("%s died again while it loaded weights (%s)", handle.name, again)
        self.replicas.remove(handle)

    def join(self, handle: Handle) -> dict[str, float]:
        """Bring one replica to the newest version, wherever it stands."""
        assert self.ways is not None
        return handle.call("apply", self.ways("joining"))()

    def fingerprint(self) -> dict[str, Any]:
        """The common fingerprint. Engines that differ among themselves cannot all agree with the trainer."""
        prints = {handle.name: handle.call("fingerprint")() for handle in (self.trainer, *self.replicas)}
        first = prints[self.trainer.name]
        if others := {name: each for name, each in prints.items() if each != first}:
            return {**first, "differing_engines": others}
        return first


def _pick(prompts: list[list[int]], params: list[SamplingParams], share: list[int]) -> tuple[list[Any], list[Any]]:
    return [prompts[i] for i in share], [params[i] for i in share]


class FleetSync:
    """Each version as a delta from the one before: made once, put into shared memory, and brought over by every
    replica's state machine (`rlloop.sync.replica`). A replica that is new or has lost its way gets all of it."""

    def __init__(self, engine: FleetEngine, ways: Ways) -> None:
        self.engine, self._ways = engine, ways
        engine.ways = ways

    def publish(self, version: int) -> dict[str, float]:
        began, engine = time.perf_counter(), self.engine
        engine.policy_version = version
        if not engine.replicas:
            engine.trainer.call("set_version", version)()
            return {}
        bundle = self._ways("publish", version)
        applying = [(handle, handle.call("apply", bundle)) for handle in engine.replicas]
        metrics = dict(engine.trainer.call("published")())
        for handle, wait in applying:
            try:
                try:
                    slowest = wait()
                except SyncError as lost:
                    log.warning("%s could not take version %d (%s); it gets all of it", handle.name, version, lost)
                    slowest = engine.join(handle)
            except EngineDied as death:
                engine._bury(handle, death)
                continue
            for name, seconds in slowest.items():
                if name.endswith("_seconds"):
                    metrics[name] = max(metrics.get(name, 0.0), seconds)
        return {**metrics, "sync/seconds": time.perf_counter() - began}


class RemoteTrainer:
    """The Trainer of the loop, behind the co-located worker's handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def forward_backward(
        self, batch: Sequence[Sample], loss: Callable[..., Any], *, old_logprobs: Sequence[np.ndarray] | None = None
    ) -> Any:
        return self._handle.call("forward_backward", batch, loss, old_logprobs)()

    def optim_step(self) -> Mapping[str, float]:
        return self._handle.call("optim_step")()

    def recompute(self, batch: Sequence[Sample]) -> Recomputed:
        return self._handle.call("recompute", batch)()

    def reference_kl(self, batch: Sequence[Sample], kind: str) -> Sequence[float]:
        return self._handle.call("reference_kl", batch, kind)()

    def routing(self) -> Mapping[str, float]:
        return self._handle.call("routing")()

    def replay_experts(self, on: bool) -> None:
        self._handle.call("replay_experts", on)()

    def save(self, folder: Path) -> None:
        self._handle.call("save", folder)()

    def restore(self, folder: Path) -> None:
        self._handle.call("restore", folder)()

    def fingerprint(self) -> dict[str, Any]:
        return self._handle.call("trainer_fingerprint")()
