"""A model's weights over ranks, for a publisher: each large tensor whole on the one rank that encodes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlloop.models import Model
from rlloop.models.checkpoint_names import stored_name, stored_slices
from rlloop.models.parameters import ParameterStore
from rlloop.models.stored_parameter import StoredParameter
from rlloop.parallel.collectives import Ranks
from rlloop.sync.bits import Tensors
from rlloop.sync.live import NAMES, device_tensors_of, tensors_of
from rlloop.sync.packing import is_joined, listing_from
from rlloop.sync.published import PublishedState
from rlloop.sync.shares import Shares, spread

T = TypeVar("T")
ABSENT, PART, WHOLE = range(3)  # what a rank holds of a tensor


class ShardedWeights:
    """The weights of `model` as `shares` of all ranks, and the `tensors` of this one.

    A tensor is encoded by a rank that holds it: any of those with its layer (`pp`) or expert (`ep`), all ranks of
    dp_replicate, dp_shard and cp among them. Only one that `tp` divides is gathered, by the ranks that share it.
    """

    def __init__(self, model: Model, ranks: Ranks, *, on_device: bool, threads: int) -> None:
        """`ranks`: all processes of the default group. `on_device`: weights on a GPU are encoded there. `threads`: that
        encode on ranks other than the first, whose publisher has its own. Collective."""
        self._state = PublishedState(threads)  # of other ranks
        self._store, self._stage = ParameterStore(model), model.stage
        self._architecture = model.config.architecture
        self._split = model.adapter is None  # into experts
        self._on_device = on_device and model.context.device.type == "cuda"
        aliases = {alias: stored_name(name, self._architecture) for alias, name in self._store.aliases.items()}
        mine = {name: list(self._described(name, entry)) for name, entry in self._store.entries.items()}
        self._small = {name for name, each in mine.items() if all(is_joined(shape) for _, _, shape, _ in each)}
        kinds, holders = dict[str, tuple[str, tuple[int, ...]]](), dict[str, dict[int, list[int]]]()
        every = ranks.gather_objects((aliases, [one for each in mine.values() for one in each]))
        for rank, (_, theirs) in enumerate(every):  # stages in order
            for name, dtype, shape, held in theirs:
                kinds.setdefault(name, (dtype, shape))
                holders.setdefault(name, {}).setdefault(held, []).append(rank)
        listing = listing_from(((name, *kind) for name, kind in kinds.items()), every[0][0])
        able = {name: held.get(WHOLE) or held[PART] for name, held in holders.items()}
        self.shares = Shares(ranks, listing, spread(listing, able, ranks.size))

    def tensors(self) -> dict[str, Any]:
        """This rank's, for `lead` and `Publisher.publish`: small ones, and those that it encodes. Collective."""
        entries, owners, rank = self._store.entries, self.shares.owners, self.shares.ranks.rank
        named = dict[str, Tensor]()
        small = [name for name in entries if name in self._small]
        for name, whole in self._stage.all(small, lambda name: entries[name].whole()):
            named |= self._store.stored({name: whole})
        for name, entry in entries.items():
            if name not in self._small:
                held = self._held(name, entry).items()
                named |= {stored: tensor for stored, tensor in held if owners.get(stored, rank) == rank}
        tensors, _ = device_tensors_of(named.items()) if self._on_device else tensors_of(named.items())
        return tensors

    def lead(self, tensors: Tensors, work: Callable[[], T]) -> T | None:
        """`work` on the first rank, which calls its publisher; other ranks encode their shares. Collective.

        `tensors`: those of this rank, if a version is published, else empty.
        """
        return self.shares.lead(self._state, tensors, work)

    def _described(self, name: str, entry: StoredParameter) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """Name, dtype and shape of each tensor that checkpoints have of a parameter, and what this rank holds of it."""
        if entry.division is None:
            for stored, tensor in self._store.stored({name: entry.live.detach()}).items():
                yield stored, NAMES[tensor.dtype], tuple(tensor.shape), WHOLE
            return
        own = self._own_experts(name, entry)
        for stored, x in self._store.stored({name: torch.empty(entry.shape, device="meta")}).items():
            held = PART if own is None else WHOLE if stored in own else ABSENT
            yield stored, NAMES[entry.live.dtype], tuple(x.shape), held

    def _held(self, name: str, entry: StoredParameter) -> dict[str, Tensor]:
        """The whole tensors of a parameter that this rank has. Collective, if it is divided."""
        live, division = entry.live.detach(), entry.division
        if division is None:
            return self._store.stored({name: live})
        if (own := self._own_experts(name, entry)) is not None:
            return own
        [stored] = self._store.stored({name: torch.empty(entry.shape, device="meta")})
        return {stored: entry.whole()} if self.shares.owners[stored] in division.ranks.members else {}

    def _own_experts(self, name: str, entry: StoredParameter) -> dict[str, Tensor] | None:
        """This rank's experts of a divided parameter; None where checkpoints have it in one."""
        assert entry.division is not None
        if not self._split:
            return None
        places = [index for begin, end in entry.division.own for index in range(begin, end)]
        own = {}
        for stored, slice_, _ in stored_slices({name: entry.shape}, self._architecture):
            if slice_.expert is None:
                return None
            if slice_.expert in places:
                own[stored] = replace(slice_, expert=places.index(slice_.expert)).of(entry.live.detach())
        return own
