"""Publishing for other frameworks' trainers: turns safetensors into a published version."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlloop.errors import UNREADABLE, ConfigError
from rlloop.rollout.fleet.pool import EnginePool
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits, digests, processors
from rlloop.sync.manifest import root_hash
from rlloop.sync.packing import listing_of
from rlloop.sync.publisher import Publisher
from rlloop.sync.store import Store


class Publishing:
    """A publisher of whole states. One call at a time."""

    def __init__(self, store: Store, key: Ed25519PrivateKey, run_id: str, anchor_every: int) -> None:
        self._publisher = Publisher(store, key, run_id, anchor_every=anchor_every)
        self.term = self._publisher.claim()  # later processes of a run fence off earlier ones

    def squash(self, sequence: int) -> bool:
        return self._publisher.squash_for(sequence)

    def bound_to(self, pool: EnginePool) -> Callable[[bytes, int], Mapping[str, float]]:
        def publish(content: bytes, step: int) -> Mapping[str, float]:
            weights = read_safetensors(content)
            last = self._publisher.last
            if last is not None and last.step == step and last.root != _root(weights):
                raise ConfigError(
                    f"step {step} was published with other weights, and engines tell versions by the step: publish "
                    "these under a larger one"
                )
            published = self._publisher.publish(weights, step)
            if self._publisher.anchor_due():
                self._publisher.anchor()
            return {**published.metrics, **pool.serve_version(step, None), **pool.take_metrics()}

        return publish


def _root(weights: Mapping[str, Bits]) -> bytes:
    return root_hash(listing_of(weights, {}).tensors, digests(weights, weights.__getitem__, processors()))


Place = Annotated[int, msgspec.Meta(ge=0)]


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=1)]]  # a tensor without elements is not a weight
    data_offsets: tuple[Place, Place]


def read_safetensors(content: bytes) -> dict[str, Bits]:
    """The tensors of a safetensors file, as bits. Raises `ConfigError` for other content and for empty tensors."""
    length = int.from_bytes(content[:8], "little")
    try:
        header = msgspec.json.decode(content[8 : 8 + length], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        data = memoryview(content)[8 + length :]
        return {name: _bits(name, entry, data) for name, entry in sorted(header.items())}
    except UNREADABLE as error:
        raise ConfigError(f"the body is not a safetensors file of weights: {error}") from None


def _bits(name: str, entry: msgspec.Raw, data: memoryview) -> Bits:
    try:
        tensor = msgspec.json.decode(entry, type=_Tensor)
    except UNREADABLE as error:
        raise ValueError(f"{name!r:.200}: {error}") from None
    kind, shape, (start, end) = tensor.dtype, tensor.shape, tensor.data_offsets
    if kind not in WIDTH or end - start != WIDTH[kind] * math.prod(shape) or end > len(data):
        raise ValueError(f"{name!r:.200} has type {kind}, shape {shape} and bytes {start} to {end}")
    return Bits(kind, np.frombuffer(data[start:end], UNSIGNED[WIDTH[kind]]).reshape(shape))
