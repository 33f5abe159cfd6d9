"""Publications of a worker's weights: as bundles for replicas, and to a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from rlloop.models import Model
from rlloop.parallel.collectives import Ranks
from rlloop.sync.bits import Tensors
from rlloop.sync.bundle import Bundle, BundlePublisher
from rlloop.sync.live import published_weights
from rlloop.sync.publisher import Publisher
from rlloop.sync.sharded_weights import ShardedWeights
from rlloop.sync.shares import Shares

T = TypeVar("T")


class Stored(NamedTuple):
    """The result of a publication to a store."""

    metrics: Mapping[str, float]  # sync/*
    anchor_due: bool  # a whole version should be stored: `Publisher.anchor_due`


class Publications:
    """Publishes `model`'s weights from one rank, or from several that encode a share each; the first has the results.

    Methods are collective.
    """

    def __init__(self, model: Model, ranks: Ranks, store: Publisher | None, *, on_device: bool, threads: int) -> None:
        """`ranks`: all processes. `store`: the first rank's, for `to_store`. `on_device`: see `published_weights`."""
        self._model, self._ranks, self._store = model, ranks, store
        self._on_device, self._threads = on_device, threads
        self._bundles = BundlePublisher("node", threads)
        self._sharded: ShardedWeights | None = None  # once something is published

    def bundle(self, version: int) -> Bundle | None:
        """The weights, now `version`, for replicas of the version before."""
        tensors, aliases, shares = self._weights()
        return self._lead(tensors, lambda: self._bundles.publish(tensors, version, aliases, shares))

    def joining(self) -> Bundle | None:
        """The last bundle's version, for replicas of any or none."""
        return self._lead({}, self._bundles.joining)

    def claim(self) -> int:
        """The publisher's term, above those of earlier ones, which are fenced off; 0 on all ranks but the first."""
        return 0 if self._store is None else self._store.claim()

    def to_store(self, version: int) -> Stored | None:
        """Publish the weights, now `version`, to the store."""
        tensors, aliases, shares = self._weights()

        def publish() -> Stored:
            published = self._publisher.publish(tensors, version, aliases=aliases, shares=shares)
            return Stored(published.metrics, self._publisher.anchor_due())

        return self._lead(tensors, publish)

    def anchor(self) -> None:
        """Store the store's newest version whole."""
        self._lead({}, lambda: self._publisher.anchor())

    @property
    def _publisher(self) -> Publisher:
        assert self._store is not None, "the first rank has it"
        return self._store

    def _weights(self) -> tuple[Tensors, Mapping[str, str], Shares | None]:
        """A publisher's arguments: this rank's tensors, their aliases, and the ranks' shares."""
        if self._ranks.size == 1:
            return *published_weights(self._model, on_device=self._on_device), None
        if self._sharded is None:
            self._sharded = ShardedWeights(self._model, self._ranks, on_device=self._on_device, threads=self._threads)
        return self._sharded.tensors(), {}, self._sharded.shares

    def _lead(self, tensors: Tensors, work: Callable[[], T]) -> T | None:
        """`work`'s result on the first rank; the others encode their shares (`Shares.lead`), and get None."""
        return work() if self._sharded is None else self._sharded.lead(tensors, work)
