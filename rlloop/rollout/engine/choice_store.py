"""The model's discrete choices (experts, selected past tokens) for every cached token, stored by cache slot.

A cached prefix keeps its choices.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rlloop.models import Model, RoutingRecord
from rlloop.models.stages import Stage
from rlloop.numerics.transfer import on_device

Choices = tuple[np.ndarray | None, np.ndarray | None]  # experts [tokens, layers, top_k], selections [tokens, layers]


class ChoiceStore:
    """Experts as integers of one or two bytes, indexers' selections as int64 digests; on the model's device."""

    def __init__(
        self,
        routers: tuple[int, int, int] | None,
        indexed: int,
        num_slots: int,
        device: torch.device,
        stage: Stage | None = None,
    ) -> None:
        """`routers`: layers with experts, experts a token takes, experts in all; `indexed`: layers with an indexer.

        A `stage` of a pipeline writes the choices of its own layers, and reads those of all.
        """
        self.experts = self.selected = None
        self._stage = None if stage is None or stage.whole else stage
        self._device = device
        if routers is not None:
            layers, top_k, experts = routers
            self._kind = np.min_scalar_type(experts - 1)
            self.experts = _zeros((num_slots, layers, top_k), np.uint8 if experts <= 256 else np.int16, device)
        if indexed:
            self.selected = _zeros((num_slots, indexed), np.int64, device)

    @classmethod
    def of(cls, model: Model, num_slots: int) -> ChoiceStore | None:
        """The store for a model; None for a model without experts and indexers."""
        store = cls(model.route_shape(), model.indexed_layers(), num_slots, model.context.device, model.stage)
        return None if store.experts is None and store.selected is None else store

    def write(self, slots: Tensor, routes: RoutingRecord) -> None:
        for store, choices, layers in (
            (self.experts, routes.chosen(), routes.places),
            (self.selected, routes.selected(), routes.selections),
        ):
            if store is None or choices is None:
                continue
            if self._stage is None:
                store.index_copy_(0, slots, choices.to(store.dtype))
                continue
            for column, layer in enumerate(layers):
                store[:, layer].index_copy_(0, slots, choices[:, column].to(store.dtype))

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copies the choices of slots [N] int64."""
        for store in (self.experts, self.selected):
            if store is not None:
                store.index_copy_(0, target, store.index_select(0, source))

    def read(self, slots: np.ndarray) -> Choices:
        return self.begin_read(slots)()

    def begin_read(self, slots: np.ndarray) -> Callable[[], Choices]:
        """Starts copying the slots' choices to the host, in the current stream's order; call the result to wait."""
        at, event = on_device(slots, self._device), torch.cuda.Event() if self._device.type == "cuda" else None
        experts, selected = (
            None if store is None else store[at].to("cpu", non_blocking=True) for store in (self.experts, self.selected)
        )
        if event is not None:
            event.record()

        def finish() -> Choices:
            if event is not None:
                event.synchronize()
            return (
                None if experts is None else self._of_all_stages(experts.numpy()).astype(self._kind, copy=False),
                None if selected is None else self._of_all_stages(selected.numpy()),
            )

        return finish

    def _of_all_stages(self, own: np.ndarray) -> np.ndarray:
        """Sum over pipeline stages, of which each has zeros at other stages' layers. Collective."""
        return own if self._stage is None else sum(self._stage.gather_objects(own), np.zeros_like(own))


def _zeros(shape: tuple[int, ...], kind: type[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.zeros(shape, kind)).to(device)  # numpy's zeros take no memory until they are written
