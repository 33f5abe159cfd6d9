"""Encoding by several ranks: each encodes its share of a version, and the first rank writes one stream and manifest.

A large tensor is encoded by one rank, its owner, which alone keeps its published bits. Small tensors, which are encoded
together, are on every rank; their groups go round. So a version's bytes do not depend on the ranks.

    the first rank                             the others
    lead: its publisher's calls   - orders ->  lead: the same, of their shares
    writes all encodings          <- bytes -   encode their own
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import torch

from rlloop.parallel.collectives import Ranks
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits, Tensors
from rlloop.sync.codec import Encoded
from rlloop.sync.manifest import CODECS, Listing
from rlloop.sync.packing import Unit, is_joined
from rlloop.sync.published import PublishedState

T = TypeVar("T")


@dataclass(frozen=True)
class Shares:
    """The ranks that encode a model's versions, and what each of them encodes."""

    ranks: Ranks  # the first has the publisher
    listing: Listing
    owners: Mapping[str, int]  # large tensor -> rank

    def own(self, units: Sequence[list[str]]) -> list[list[str]]:
        """The units that this rank encodes."""
        owners = self._owners(units)
        return [names for names, owner in zip(units, owners, strict=True) if owner == self.ranks.rank]

    def gathered(self, units: Sequence[list[str]], own: Iterator[Unit]) -> Generator[Unit]:
        """On the first rank all units, in order; on others their own, which are sent to the first. Collective."""
        if self.ranks.rank > 0:
            for names, encoded, digests in own:
                head = CODECS.index(encoded.codec), encoded.changed, encoded.diff_seconds, digests
                self.ranks.post_bytes(msgspec.msgpack.encode(head), 0)
                self.ranks.post_bytes(encoded.content, 0)
                yield names, encoded, digests
            return
        first, every = next(own, None), zip(units, self._owners(units), strict=True)  # which begins the encoding
        try:
            for names, owner in every:
                if owner > 0:
                    yield self._received(names, owner)
                else:
                    unit, first = first or next(own), None
                    yield unit
        finally:
            for names, owner in every:  # after a failure: the next version's come behind them
                if owner > 0:
                    self._received(names, owner)

    def _received(self, names: list[str], owner: int) -> Unit:
        codec, changed, seconds, digests = msgspec.msgpack.decode(self.ranks.receive_bytes(owner))
        return names, Encoded(CODECS[codec], self.ranks.receive_bytes(owner), changed, seconds), digests

    def lead(self, state: PublishedState, tensors: Tensors, work: Callable[[], T]) -> T | None:
        """`work` on the first rank, which calls its publisher; on the others what that orders, of their `state`.
        Collective.

        `tensors`: this rank's of the version that is published; empty where none is.
        """
        if self.ranks.rank == 0:
            try:
                return work()
            finally:
                self.order("end")
        packed = None
        while (order := self.ranks.broadcast_object(None)) != "end":
            if order == "pack":
                packed = state.pack(None, self.listing, tensors, self)
            elif order == "pack_whole":
                state.pack_whole(None)
            else:
                assert packed is not None
                state.adopt(self.listing, tensors, packed)
        return None

    def order(self, order: str) -> None:
        """Broadcast the next operation to the other ranks; a no-op on all but the first."""
        if self.ranks.rank == 0:
            self.ranks.broadcast_object(order)

    def hand_out(
        self, listing: Listing | None, state: Tensors, digests: Mapping[str, bytes]
    ) -> tuple[Listing | None, Tensors, Mapping[str, bytes]]:
        """Each rank's share of (listing, state, digests), which the first rank gives whole; the state of another
        listing than the model's is dropped. Collective."""
        ranks, source = self.ranks, 0
        listing, digests = ranks.broadcast_object((listing, digests))
        kept = dict[str, Bits]()
        for name, dtype, shape in () if listing is None or listing.tensors != self.listing.tensors else listing.tensors:
            kind, owner = UNSIGNED[WIDTH[dtype]], self.owners.get(name)
            array = state[name].array if ranks.rank == source else np.empty(shape, kind)
            flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
            if owner is None:
                ranks.broadcast(flat, source)
            elif owner == ranks.rank != source:
                ranks.receive(flat, source)
            elif owner != ranks.rank == source:
                ranks.send(flat, owner)
            if owner in (None, ranks.rank):
                kept[name] = Bits(dtype, array)
        return listing, kept, digests

    def _owners(self, units: Sequence[list[str]]) -> Iterator[int]:
        groups = 0
        for names in units:
            if (owner := self.owners.get(names[0])) is None:
                owner, groups = groups % self.ranks.size, groups + 1
            yield owner


def spread(listing: Listing, holders: Mapping[str, Sequence[int]], size: int) -> dict[str, int]:
    """The owner of each large tensor among the ranks that can encode it, so that each gets about as much."""
    loads, owners = [0] * size, dict[str, int]()
    for name, dtype, shape in listing.tensors:
        if not is_joined(shape):
            owner = min(holders[name], key=lambda rank: (loads[rank], rank))
            owners[name] = owner
            loads[owner] += WIDTH[dtype] * int(np.prod(shape))
    return owners
