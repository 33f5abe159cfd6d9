"""Schedules of sampling: the time, the version of the weights, and batches sampled ahead.

`InStep` is the on-policy loop: step k is sampled with version k − 1, while the trainer waits. `Pipelined` overlaps
sampling and learning within a fixed lag; `rlloop.loop.partial` carries conversations over steps. `rlloop.loop.loop`
uses only the protocol, so further schedules are further classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from rlloop.loop.sampler import Sampler
from rlloop.parallel.interrupts import result_of
from rlloop.protocols import Publication, Stateful, WeightSync
from rlloop.types import Recomputed, Sample

FILE = "under_way.msgpack"


class Schedule(Stateful, Protocol):
    """Decides when the prompts of a step are sampled and with which weights.

    In step k, from 1, the loop calls `publish(k − 1)`, `samples`, and `recompute` before the update. `publish` also
    precedes an evaluation, and `settle` a checkpoint, into which `save` then writes. All calls come from one thread.
    """

    def publish(self, sync: WeightSync, version: int) -> Publication:
        """Bring the engines to `version`; called once a version. Returns `sync/*` metrics; if these are a future, the
        loop waits for it before it changes the weights or evaluates."""
        ...

    def samples(self, sampler: Sampler, step: int, version: int, first: int = 0) -> list[Sample]:
        """One batch of the step's samples, without rewards. `version` is the trainer's and the newest published one.

        The first batch of a step numbers its prompts from 0; dynamic sampling may ask for further ones, from `first`.
        """
        ...

    def recompute(self, samples: Sequence[Sample]) -> tuple[int, Recomputed] | None:
        """The sampling version and the trainer's logprobs under it; None if the trainer still has that version."""
        ...

    def settle(self) -> None:
        """Return once nothing is being sampled."""
        ...

    def close(self) -> None: ...


def ended(publication: Publication) -> Mapping[str, Any]:
    """The metrics of a publication, once it has ended."""
    return result_of(publication) if isinstance(publication, Future) else publication


class InStep:
    """On-policy: each step is sampled with the newest weights, while the trainer waits."""

    def publish(self, sync: WeightSync, version: int) -> Mapping[str, Any]:
        return ended(sync.publish(version))

    def samples(self, sampler: Sampler, step: int, version: int, first: int = 0) -> list[Sample]:
        return sampler.batch(step, version, first)

    def recompute(self, samples: Sequence[Sample]) -> None:
        return None

    def settle(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        pass

    def restore(self, folder: Path) -> None:
        pass

    def close(self) -> None:
        pass


class History(Stateful, Protocol):
    """`Trainer.recompute` under past versions; see `rlloop.trainer.history.WeightHistory`."""

    def remember(self, version: int) -> None: ...

    def recompute(self, samples: Sequence[Sample]) -> Recomputed: ...


class Pipelined:
    """`fleet.max_version_lag` L above 0: engines sample step k + L while the trainer learns from step k.

    Deterministic as the strict loop: the batch of step k + L is sampled by the newest version there is when step k
    begins, so every sample is exactly L steps old when it is trained (less at the beginning), a version is published
    when no batch is being sampled, and checkpoints hold the batches that are ahead. One step overlaps everything that
    can overlap; more only makes samples older. The trainer compares and differentiates while a version is published,
    and waits for that only before it changes the weights.

    Engine and trainer are compared under the weights that sampled (`history`); the age itself is for the loss to
    correct, which is why the configuration asks for `algorithm.anchor=rollout` or a correction.
    """

    def __init__(self, lag: int, history: History, last_step: int) -> None:
        """`lag` in steps; nothing is sampled for steps after `last_step`."""
        self.lag, self.last_step = lag, last_step
        self._history = history
        self._batches: dict[int, Future[list[Sample]]] = {}  # by step: being sampled, or ready
        self._newest: Publication = {}
        self._pool = ThreadPoolExecutor(1, "rollouts")  # batches are sampled in the order of their steps

    def publish(self, sync: WeightSync, version: int) -> Publication:
        self.settle()  # an engine serves one version, so requests of the last one are finished first
        self._history.remember(version)
        self._newest = sync.publish(version)
        return self._newest

    def samples(self, sampler: Sampler, step: int, version: int, first: int = 0) -> list[Sample]:
        assert first == 0, "the configuration refuses refills with a lag"
        for ahead in range(step, min(step + self.lag, self.last_step) + 1):
            if ahead not in self._batches:
                self._batches[ahead] = self._pool.submit(self._sampled, sampler, ahead, version, self._newest)
        return [self._admitted(sample, version) for sample in result_of(self._batches.pop(step))]

    def recompute(self, samples: Sequence[Sample]) -> tuple[int, Recomputed]:
        return samples[0].completion.policy_version, self._history.recompute(samples)

    def settle(self) -> None:
        for batch in self._batches.values():
            result_of(batch)

    def save(self, folder: Path) -> None:
        """The weights of past versions, and the batches ahead: they count as taken from the task."""
        self._history.save(folder)
        batches = {str(step): result_of(batch) for step, batch in self._batches.items()}
        (folder / FILE).write_bytes(msgspec.msgpack.encode(batches, enc_hook=encode_array))

    def restore(self, folder: Path) -> None:
        self._history.restore(folder)
        content = (folder / FILE).read_bytes()
        for step, samples in msgspec.msgpack.decode(
            content, type=dict[str, list[Sample]], dec_hook=decode_array
        ).items():
            self._batches[int(step)] = Future()
            self._batches[int(step)].set_result(samples)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _sampled(self, sampler: Sampler, step: int, version: int, publication: Publication) -> list[Sample]:
        ended(publication)
        return sampler.batch(step, version)

    def _admitted(self, sample: Sample, version: int) -> Sample:
        """Reject samples older than the limit, from any engine."""
        age = version - sample.completion.policy_version
        if 0 <= age <= self.lag:
            return sample
        why = f"its weights are {age} steps old, and fleet.max_version_lag is {self.lag}"
        return dataclasses.replace(sample, broken=why)


def encode_array(value: Any) -> Any:
    assert isinstance(value, np.ndarray), type(value)
    return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()


def decode_array(kind: type, value: Any) -> Any:
    assert kind is np.ndarray, kind
    dtype, shape, content = value
    return np.frombuffer(content, dtype).reshape(shape).copy()
