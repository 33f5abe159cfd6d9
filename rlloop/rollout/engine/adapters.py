"""An engine's adapters: which its requests have, and the slots of a step's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlloop.errors import ConfigError
from rlloop.models.adapter_files import read_adapter
from rlloop.models.adapter_slots import LoadedAdapter
from rlloop.models.adapter_weights import AdapterWeights
from rlloop.models.logits_processing import on_device
from rlloop.numerics.layout import AdapterSlots
from rlloop.rollout.engine.request import RequestTable
from rlloop.rollout.engine.scheduler import EngineStats

if TYPE_CHECKING:
    from rlloop.models import Model


class EngineAdapters:
    """The adapters of a model as one of its engines uses them."""

    def __init__(self, model: Model, slots: int, max_rank: int) -> None:
        """`slots`: adapters that may run at once, each of `max_rank` at most."""
        self.slots, self._max_rank, self._model = slots, max_rank, model
        self.set_version(0)

    def set_version(self, version: int) -> None:
        """The model's own adapter, if it has one, is now that of `version`."""
        own = self._model.adapter
        self._own = None if own is None else LoadedAdapter.live(own, version)

    @property
    def own(self) -> bool:
        """True if requests that name no adapter have the model's."""
        return self._own is not None

    def _check(self) -> None:
        """Raises `ConfigError` where requests cannot name adapters."""
        self._model.check_adapts()
        if self._model.context.layout.expert_leaves > 1:
            raise ConfigError(
                "adapters by request need all ranks of an expert group to have the same requests, and along dp_shard "
                "each has its own: set dp_shard=1 in the engine's layout, with ep up to tp"
            )

    def read(self, folder: str | Path) -> AdapterWeights:
        """Checked against the model, which is left as it is."""
        self._check()
        return read_adapter(self._model, folder)

    def add(self, name: str, weights: AdapterWeights) -> int:
        registry = self._model.adapters
        if not registry.names:
            registry.configure(self.slots, self._max_rank)
        return registry.add(name, weights, self._model.adapter_targets()).version

    def named(self, name: str | None) -> LoadedAdapter | None:
        """Raises `ConfigError` for an unknown name, and where no request can name one."""
        if name is None:
            return None
        self._check()
        return self._model.adapters.get(name)

    def of_rows(self, table: RequestTable, rows: np.ndarray) -> np.ndarray | None:
        """[S] int64 the slot of each request's adapter, −1: none; None where all have the model's own, or none.

        Adapters that are in no slot are copied into one.
        """
        if not table.adapted[rows].any():
            return None
        adapters = [table.request(row).adapter or self._own for row in rows.tolist()]
        slots = self._model.adapters.place([each for each in adapters if each is not None])
        return np.array([-1 if each is None else slots[each] for each in adapters])

    def on_device(self, slots: np.ndarray | None, device: torch.device) -> AdapterSlots | None:
        return None if slots is None else self._model.adapters.rows(on_device(slots, device))

    def counted(self, stats: EngineStats) -> EngineStats:
        """With the model's counts of swaps."""
        made = self._model.adapters.stats
        return replace(
            stats,
            adapter_swaps=made.swaps,
            adapter_swap_bytes=made.swap_bytes,
            adapter_swap_seconds=made.swap_seconds,
        )
