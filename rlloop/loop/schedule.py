"""The loop with `fleet.max_version_lag` L above 0: engines sample step k + L while the trainer learns from step k.

What is asked for, of which weights, is as fixed as in the strict loop: the batch of step k + L is sampled by the newest
version there is when step k begins, so every sample is exactly L steps old when it is trained (less at the beginning),
a version is published when no batch is under way, and a resumed run repeats all of it: the batches that a checkpoint
finds under way are in it. One step overlaps everything that can overlap; more only makes samples older.

Engine and trainer are compared under the weights that sampled (`rlloop.trainer.history`); the age itself is for the
loss to correct, which is why the configuration asks for `algorithm.anchor=rollout` or a correction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from rlloop.config.run import RunConfig
from rlloop.loop.loop import Failed, Loop, Parts
from rlloop.parity.monitor import ParityMonitor
from rlloop.protocols import Observer, Stateful
from rlloop.runs.folder import RunFolder
from rlloop.types import Recomputed, Sample

FILE = "under_way.msgpack"


class History(Stateful, Protocol):
    """`Trainer.recompute` under past versions; see `rlloop.trainer.history.WeightHistory`."""

    def recompute(self, samples: Sequence[Sample]) -> Recomputed: ...


class PipelinedLoop(Loop):
    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        folder: RunFolder,
        monitor: ParityMonitor,
        observers: Sequence[Observer] = (),
    ) -> None:
        assert parts.history is not None
        self._history, self._ahead = parts.history, Ahead(config.fleet.max_version_lag)
        super().__init__(
            config,
            dataclasses.replace(parts, stateful=(*parts.stateful, parts.history, self._ahead)),
            folder,
            monitor,
            observers,
        )

    def rollout(self, step: int, version: int, first: int = 0) -> list[Sample]:
        last = min(step + self._ahead.lag, self.config.trainer.num_steps)
        for ahead in range(step, last + 1):
            self._ahead.begin(ahead, lambda ahead=ahead: super(PipelinedLoop, self).rollout(ahead, version))
        return [self._admitted(sample, version) for sample in self._ahead.take(step)]

    def recompute(self, trained: Sequence[Sample]) -> Recomputed | None:
        return self._history.recompute(trained)

    def anchors(self, trained: Sequence[Sample], before: Recomputed | None) -> Sequence[np.ndarray] | None:
        return super().anchors(trained, super().recompute(trained))  # `before` is of older weights

    def _compare(
        self, step: int, version: int, trained: Sequence[Sample], recomputed: Recomputed, rest: Sequence[Failed]
    ) -> dict[str, Any]:
        sampled = trained[0].completion.policy_version if trained else version
        return super()._compare(step, sampled, trained, recomputed, rest)

    def _admitted(self, sample: Sample, version: int) -> Sample:
        """Nothing older than the bound is trained, whatever sampled it."""
        age = version - sample.completion.policy_version
        if 0 <= age <= self._ahead.lag:
            return sample
        why = f"its weights are {age} steps old, and fleet.max_version_lag is {self._ahead.lag}"
        return dataclasses.replace(sample, broken=why)

    def save(self, step: int) -> None:
        self._ahead.wait()  # what has begun counts as taken from the task
        super().save(step)

    def _sync(self, version: int) -> dict[str, Any]:
        self._ahead.wait()  # an engine serves one version: all that was asked of the last one comes first
        return super()._sync(version)


class Ahead:
    """Batches of later steps, being sampled or ready."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._batches: dict[int, Future[list[Sample]]] = {}
        self._pool = ThreadPoolExecutor(1, "rollouts")  # one after the other, in the order of their steps

    def begin(self, step: int, sample: Any) -> None:
        if step not in self._batches:
            self._batches[step] = self._pool.submit(sample)

    def take(self, step: int) -> list[Sample]:
        return self._batches.pop(step).result()

    def wait(self) -> None:
        for batch in self._batches.values():
            batch.result()

    def save(self, folder: Path) -> None:
        """Into a checkpoint, once they are ready."""
        batches = {str(step): batch.result() for step, batch in self._batches.items()}
        (folder / FILE).write_bytes(msgspec.msgpack.encode(batches, enc_hook=_encode))

    def restore(self, folder: Path) -> None:
        content = (folder / FILE).read_bytes()
        for step, samples in msgspec.msgpack.decode(content, type=dict[str, list[Sample]], dec_hook=_decode).items():
            self._batches[int(step)] = Future()
            self._batches[int(step)].set_result(samples)


def _encode(value: Any) -> Any:
    assert isinstance(value, np.ndarray), type(value)
    return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()


def _decode(kind: type, value: Any) -> Any:
    assert kind is np.ndarray, kind
    dtype, shape, content = value
    return np.frombuffer(content, dtype).reshape(shape).copy()
