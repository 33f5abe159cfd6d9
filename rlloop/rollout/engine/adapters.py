"""An engine's adapters: those of its requests, and the slots of a step's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlloop.errors import ConfigError
from rlloop.models.adapter_files import read_adapter
from rlloop.models.adapter_slots import LoadedAdapter
from rlloop.models.adapter_weights import AdapterWeights
from rlloop.numerics.layout import AdapterSlots
from rlloop.numerics.transfer import on_device
from rlloop.rollout.engine.request import RequestTable
from rlloop.rollout.engine.scheduler import EngineStats

if TYPE_CHECKING:
    from rlloop.models import Model


class EngineAdapters:
    """The adapters of a model as one of its engines uses them."""

    def __init__(self, model: Model, slots: int, max_rank: int) -> None:
        """`slots`: adapters that may run at once, each of `max_rank` at most."""
        self.slots, self._max_rank, self.model = slots, max_rank, model
        self._checked = False
        self.set_version(0)

    def set_version(self, version: int) -> None:
        """Mark the model's own adapter, if it has one, as that of `version`."""
        own = self.model.adapter
        self._own = None if own is None else LoadedAdapter.live(own, version)

    @property
    def own(self) -> bool:
        """True if requests that name no adapter use the model's own."""
        return self._own is not None

    def _check(self) -> None:
        """Raises `ConfigError` where requests cannot name adapters."""
        if self._checked:  # it looks at every parameter, which for each request would take longer than its prompt
            return
        self.model.check_adapts()
        if self.model.context.layout.expert_leaves > 1:
            raise ConfigError(
                "adapters by request need all ranks of an expert group to have the same requests, and along dp_shard "
                "each has its own: set dp_shard=1 in the engine's layout, with ep up to tp"
            )
        self._checked = True

    def read(self, folder: str | Path) -> AdapterWeights:
        """Read a PEFT folder and check it against the model, which does not change."""
        self._check()
        return read_adapter(self.model, folder)

    def add(self, name: str, weights: AdapterWeights) -> int:
        self.model.adapters.configure(self.slots, self._max_rank)
        return self.model.adapters.add(name, weights, self.model.adapter_targets()).version

    @property
    def versions(self) -> dict[str, int]:
        return self.model.adapters.versions

    def drop(self, name: str) -> None:
        self.model.adapters.drop(name)

    def named(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of this name. Raises `ConfigError` for an unknown name, and if requests cannot name adapters."""
        if name is None:
            return None
        self._check()
        return self.model.adapters.get(name)

    def of_rows(self, table: RequestTable, rows: np.ndarray) -> np.ndarray | None:
        """[S] int64: the slot of each request's adapter, −1: none; None if all use the model's own, or none at all.

        Adapters that are in no slot are copied into one.
        """
        if not table.adapted[rows].any():
            return None
        return self.slots_of([table.request(row).adapter for row in rows.tolist()])

    def slots_of(self, adapters: Sequence[LoadedAdapter | None]) -> np.ndarray:
        """`of_rows` of requests with these adapters, at most `slots` different ones; None: the model's own, or none."""
        placed: dict[LoadedAdapter | None, int] = dict.fromkeys(adapters, -1)
        wanted = {each: each or self._own for each in placed}
        self.model.adapters.configure(self.slots, self._max_rank)
        slots = self.model.adapters.place([each for each in wanted.values() if each is not None])
        placed = {each: -1 if own is None else slots[own] for each, own in wanted.items()}
        return np.fromiter((placed[each] for each in adapters), np.int64, len(adapters))

    def on_device(self, slots: np.ndarray | None, device: torch.device) -> AdapterSlots | None:
        return None if slots is None else self.model.adapters.rows(on_device(slots, device), single(slots))

    def counted(self, stats: EngineStats) -> EngineStats:
        """`stats` with the model's counts of adapter swaps."""
        swap_stats = self.model.adapters.stats
        return replace(
            stats,
            adapter_swaps=swap_stats.swaps,
            adapter_swap_bytes=swap_stats.swap_bytes,
            adapter_swap_seconds=swap_stats.swap_seconds,
        )


def single(slots: np.ndarray) -> bool:
    """True if no two rows have different adapters, by their slots; −1: none."""
    return len(np.unique(slots[slots >= 0])) <= 1


class AdapterVerbs:
    """Mixin of engines that load and drop adapters."""

    _adapters: EngineAdapters
    _stats: EngineStats

    def stats(self) -> EngineStats:
        return self._adapters.counted(self._stats)

    def load_adapter(self, name: str, folder: str | Path) -> int:
        """Load a PEFT folder under `name`, between steps, while requests run; returns its version, from 1 on.

        A loaded name gets a new version: current requests keep theirs, later ones use the new one, and cached blocks
        are never shared between versions. The adapter belongs to the model, so its other engines have it, too.

        Raises `ConfigError` or `ModelError` as `rlloop.load_adapter`; then nothing has changed.
        """
        return self.add_adapter(name, self.read_adapter(folder))

    def read_adapter(self, folder: str | Path) -> AdapterWeights:
        """The adapter of a PEFT folder, checked against the model. May be called from any thread.

        Raises as `load_adapter`.
        """
        return self._adapters.read(folder)

    def add_adapter(self, name: str, weights: AdapterWeights) -> int:
        """`load_adapter` for weights in memory that were checked (`AdapterWeights.check`).

        Raises `ConfigError` for a rank above `adapter_rank`.
        """
        return self._adapters.add(name, weights)

    @property
    def adapter_versions(self) -> dict[str, int]:
        """The newest version of each loaded adapter, by name."""
        return self._adapters.versions

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter; requests that have it are finished with it. Raises `ConfigError` for an unknown name."""
        self._adapters.drop(name)

    def _check_adapter(self, adapter: str | None) -> None:
        self._adapters.named(adapter)
