"""Weights of a trainer that is not rlloop's: safetensors in, a published version out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlloop.errors import ConfigError
from rlloop.rollout.router import Router
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits
from rlloop.sync.publisher import Publisher
from rlloop.sync.store import Store


class Publishing:
    """A publisher for who sends whole states. One call at a time."""

    def __init__(self, store: Store, key: Ed25519PrivateKey, run_id: str, anchor_every: int) -> None:
        self._publisher = Publisher(store, key, run_id, anchor_every=anchor_every)
        self.term = self._publisher.claim()  # later processes of a run fence off earlier ones

    def squash(self, sequence: int) -> bool:
        return self._publisher.squash_for(sequence)

    def bound_to(self, router: Router) -> Callable[[bytes, int], Mapping[str, float]]:
        def publish(content: bytes, step: int) -> Mapping[str, float]:
            published = self._publisher.publish(read_safetensors(content), step)
            if self._publisher.anchor_due():
                self._publisher.anchor()
            return {**published.metrics, **router.serve_version(step, None), **router.take_metrics()}

        return publish


def read_safetensors(content: bytes) -> dict[str, Bits]:
    """The tensors of a safetensors file, as bits. Raises `ConfigError` for what is none."""
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
        data = memoryview(content)[8 + length :]
        return {name: _bits(name, entry, data) for name, entry in sorted(header.items()) if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the body is no safetensors file: {error}") from None


def _bits(name: str, entry: Mapping[str, Any], data: memoryview) -> Bits:
    kind, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in WIDTH or end - start != WIDTH[kind] * math.prod(shape) or end > len(data):
        raise ValueError(f"{name} has type {kind}, shape {shape} and bytes {start} to {end}")
    return Bits(kind, np.frombuffer(data[start:end], UNSIGNED[WIDTH[kind]]).reshape(shape))
