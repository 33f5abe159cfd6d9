"""The published weights, from which the next delta starts."""

from __future__ import annotations

from collections.abc import Mapping

from rlloop.sync.bits import Tensors
from rlloop.sync.manifest import Listing
from rlloop.sync.packing import Packed, Sharing, adopt, beside, copied, pack
from rlloop.sync.store import Store


class PublishedState:
    """The last published version: copies of its tensors, and their digests; over ranks (`shares`) one rank's of them.

    `store`, in its methods: None on ranks that have none. Over ranks they are collective: the first rank, which the
    publisher calls, orders the same of the others (`Shares.lead`).
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.tensors: Tensors = {}
        self.digests: Mapping[str, bytes] = {}
        self.listing: Listing | None = None
        self.shares: Sharing | None = None  # that `tensors` are one of; None: all of them are here
        self.continues = False  # True if what was packed last is a delta

    def pack(self, store: Store | None, listing: Listing, tensors: Tensors, shares: Sharing | None) -> Packed:
        """Encode `tensors` as a delta; whole, where the listing is another than the last version's."""
        if shares is not None:
            shares.order("pack")
            if self.shares is None:
                self.listing, self.tensors, self.digests = shares.hand_out(self.listing, self.tensors, self.digests)
            self.shares = shares
        self.continues = self.listing is not None and listing.tensors == self.listing.tensors
        if self.continues:
            self.tensors = dict(beside(self.tensors, tensors))
        base, digests = (self.tensors, self.digests) if self.continues else ({}, {})
        return pack(store, listing, tensors, base, digests, self.threads, shares)

    def pack_whole(self, store: Store | None) -> Packed:
        """Encode the published version for receivers that have nothing."""
        assert self.listing is not None
        if self.shares is not None:
            self.shares.order("pack_whole")
        return pack(store, self.listing, self.tensors, {}, {}, self.threads, self.shares)

    def adopt(self, listing: Listing, tensors: Tensors, packed: Packed) -> None:
        """`tensors`, which were packed last, are published."""
        if self.shares is not None:
            self.shares.order("adopt")
        self.listing, self.digests = listing, packed.digests
        if self.continues:
            adopt(self.tensors, tensors, packed, self.threads)
        else:
            self.tensors = copied(tensors, self.threads)
