"""Loaded adapters of a model: all in host memory, those of the current step in slots on the model's device.

A slot holds one version of one adapter. A step's adapters are copied in before it, over the least recently used slots.
The last slot of each store has rank 0 and stands for rows without an adapter.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.models.adapter_weights import Adapter, AdapterWeights, Target, scaled
from rlloop.numerics.layout import AdapterSlots, Factors

SLOTS, MAX_RANK = 8, 64
STEP = 16  # ranks of a store are multiples of it: a tensor core's terms


@dataclass(eq=False)
class LoadedAdapter:
    """One version of an adapter."""

    name: str
    version: int
    weights: AdapterWeights
    factors: Mapping[str, tuple[Tensor, Tensor]]  # A and B' in the compute type, on the host; pinned for a GPU
    targets: Mapping[str, Target]  # of the factors, and perhaps more

    @property
    def key(self) -> str:
        """Name and version, for caches."""
        return f"{self.name}@{self.version}"

    @classmethod
    def live(cls, adapter: Adapter, version: int) -> LoadedAdapter:
        """An adapter on the device, which may train, at this version of its values."""
        return cls(adapter.name, version, adapter.exact, adapter.live(), adapter.targets)


@dataclass
class AdapterStats:
    """Counts since the model was made."""

    loads: int = 0  # adapters given to the model
    swaps: int = 0  # copies into a slot
    swap_bytes: int = 0
    swap_seconds: float = 0.0  # of the host


@dataclass(eq=False)
class AdapterRegistry:
    """The adapters that a model and its views know, by name; the newest version of each."""

    slots: int = SLOTS
    max_rank: int = MAX_RANK
    stats: AdapterStats = field(default_factory=AdapterStats)
    base_digest: str | None = None  # of the base's stored weights, once computed

    def __post_init__(self) -> None:
        self._configured = False
        self.moves = 0  # times that slots were reallocated; CUDA graphs captured before one read stale addresses
        self._newest: dict[str, LoadedAdapter] = {}
        self._versions: dict[str, int] = {}
        self._resident: OrderedDict[LoadedAdapter, int] = OrderedDict()  # least recently used first
        self._stores: dict[str, _Store] = {}

    # ------------------------------------------------------------------------------------------------ names

    def __contains__(self, name: str) -> bool:
        return name in self._newest

    @property
    def names(self) -> list[str]:
        return sorted(self._newest)

    @property
    def versions(self) -> dict[str, int]:
        """The newest version of each, by name; may be asked from any thread."""
        return {name: each.version for name, each in sorted(self._newest.items())}

    def get(self, name: str) -> LoadedAdapter:
        """The newest version of an adapter. Raises `ConfigError` for an unknown name."""
        if name not in self._newest:
            known = ", ".join(self.names) or "none"
            raise ConfigError(f"no adapter is named {name!r}; loaded are {known} (load_adapter loads one)")
        return self._newest[name]

    def add(self, name: str, weights: AdapterWeights, targets: Mapping[str, Target]) -> LoadedAdapter:
        """Register a checked adapter; it replaces one of that name."""
        if not name or not isinstance(name, str):
            raise ConfigError(f"an adapter's name is {name!r}; it must be a text of one character or more")
        most = max(weights.factors, key=weights.rank_of)
        if weights.rank_of(most) > self.max_rank:
            raise ConfigError(
                f"adapter {name!r} has rank {weights.rank_of(most)} for {most}, and slots have room for "
                f"{self.max_rank}; raise Engine's adapter_rank"
            )
        factors = {}
        for each, pair in weights.factors.items():
            if (weight := targets[each].weight) is None:
                continue
            down, up = targets[each].own(pair)
            pair = down.to(weight.dtype), scaled(up, weights.scales[each], weight.dtype)
            factors[each] = tuple(x.pin_memory() if weight.is_cuda else x.contiguous() for x in pair)
        self._versions[name] = version = self._versions.get(name, 0) + 1
        if name in self._newest:
            self._retire(name)
        self._newest[name] = loaded = LoadedAdapter(name, version, weights, factors, targets)
        self.stats.loads += 1
        return loaded

    def drop(self, name: str) -> None:
        """Forget an adapter; requests that have it are finished with it. Raises `ConfigError` for an unknown name."""
        self.get(name)
        self._retire(name)

    def _retire(self, name: str) -> None:
        # Its slot is freed; requests that still use it copy it back with their next step.
        self._resident.pop(self._newest.pop(name), None)

    # ------------------------------------------------------------------------------------------------ slots

    def configure(self, slots: int, max_rank: int) -> None:
        """Make room for an engine with this many slots of this rank, beside which others may have fewer.

        More slots than before are new ones: adapters are copied into them with the next step.
        """
        if self._configured:
            slots, max_rank = max(slots, self.slots), max(max_rank, self.max_rank)
        if slots != self.slots:
            self.moves += 1
            self._stores.clear()
            self._resident.clear()
        self._configured, self.slots, self.max_rank = True, slots, max_rank

    @torch.no_grad()
    def place(self, adapters: Iterable[LoadedAdapter]) -> dict[LoadedAdapter, int]:
        """The slots of these adapters, of which there are at most `slots`; absent ones are copied in."""
        wanted = list(dict.fromkeys(adapters))
        assert len(wanted) <= self.slots, (len(wanted), self.slots)
        for adapter in wanted:
            if adapter in self._resident:
                self._resident.move_to_end(adapter)
        for adapter in wanted:
            if adapter in self._resident:
                continue
            began, free = time.perf_counter(), set(range(self.slots)) - set(self._resident.values())
            slot = (
                min(free) if free else self._resident.pop(next(each for each in self._resident if each not in wanted))
            )
            for name in adapter.factors:  # an adapter in training is in no registry
                if name not in self._stores:
                    self._stores[name] = _Store(adapter.targets[name], self.slots)
            self.moves += sum(store.write(slot, adapter.factors.get(name)) for name, store in self._stores.items())
            self._resident[adapter] = slot  # a live adapter's last version may be evicted
            self.stats.swaps += 1
            self.stats.swap_bytes += sum(x.nbytes for pair in adapter.factors.values() for x in pair)
            self.stats.swap_seconds += time.perf_counter() - began
        return {adapter: self._resident[adapter] for adapter in wanted}

    def rows(self, slots: Tensor, single: bool = False) -> AdapterSlots:
        """`AdapterSlots` of rows with these slots [T] int64 (−1: none). `single`: they have at most one adapter."""
        factors = {
            id(store.target.weight): store.factors for store in self._stores.values() if store.factors is not None
        }
        return AdapterSlots(factors, slots.remainder(self.slots + 1), single)


class _Store:
    """The slots of one target, sized for the largest rank so far, rounded up to `STEP`."""

    def __init__(self, target: Target, slots: int) -> None:
        self.target, self._slots = target, slots
        self.factors: Factors | None = None

    def write(self, slot: int, pair: tuple[Tensor, Tensor] | None) -> bool:
        """Returns True if all slots had to move."""
        rank = 0 if pair is None else pair[0].shape[-2]
        moves = pair is not None and (self.factors is None or rank > self.factors.down.shape[-2])
        if moves:
            self._widen(-(-rank // STEP) * STEP)
        if self.factors is None:
            return False
        self.factors.ranks[slot] = rank
        if pair is None:  # kernels that ignore a row's rank read zeros
            for each in self._of_slot(self.factors, slot):
                each.zero_()
        if pair is not None:
            down, up = self._of_slot(self.factors, slot)
            down[..., :rank, :].copy_(pair[0], non_blocking=True)
            down[..., rank:, :] = 0
            up[..., :rank].copy_(pair[1], non_blocking=True)
            up[..., rank:] = 0
        return moves

    def _of_slot(self, factors: Factors, slot: int) -> tuple[Tensor, Tensor]:
        by_group = self.target.experts is not None
        down = factors.down[:, slot] if by_group else factors.down[slot]
        return down, factors.up[:, slot] if by_group or self.target.heads is not None else factors.up[slot]

    def _widen(self, rank: int) -> None:
        target, count, like = self.target, self._slots + 1, self.target.weight
        assert like is not None
        a, b = target.own(tuple(torch.empty(shape, device="meta") for shape in target.shapes(rank)))  # type: ignore
        one = target.factors(a, b, torch.zeros(1))
        down, up = (
            torch.zeros(
                [count if at == axis else size for at, size in enumerate(each.shape)],
                dtype=like.dtype,
                device=like.device,
            )
            for each, axis in (
                (one.down, 0 if target.experts is None else 1),
                (one.up, 0 if target.experts is None and target.heads is None else 1),
            )
        )
        wide = Factors(down, up, torch.zeros(count, dtype=torch.int64, device=like.device))
        if self.factors is not None:
            narrow = self.factors.down.shape[-2]
            wide.down[..., :narrow, :] = self.factors.down
            wide.up[..., :narrow] = self.factors.up
            wide = replace(wide, ranks=self.factors.ranks)
        self.factors = wide
