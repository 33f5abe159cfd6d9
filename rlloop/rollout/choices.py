"""What the model chose for every token in the cache, by slot, so that a cached prefix brings its choices along."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlloop.models import Model, Routes

Choices = tuple[np.ndarray | None, np.ndarray | None]  # experts [tokens, layers, top_k], selections [tokens, layers]


class ChoiceStore:
    """Experts as numbers of one or two bytes, digests of what indexers selected as int64; where the model is."""

    def __init__(self, model: Model, num_slots: int) -> None:
        self.experts = self.selected = None
        routers, indexed, device = model.route_shape(), model.indexed_layers(), model.head.device
        if device.type != "cpu":
            num_slots += 1  # the cache's spare one
        if routers is not None:
            layers, top_k, experts = routers
            self._kind = np.min_scalar_type(experts - 1)
            self.experts = _zeros((num_slots, layers, top_k), np.uint8 if experts <= 256 else np.int16, device)
        if indexed:
            self.selected = _zeros((num_slots, indexed), np.int64, device)

    @classmethod
    def of(cls, model: Model, num_slots: int) -> ChoiceStore | None:
        """None for a model that chooses nothing."""
        store = cls(model, num_slots)
        return None if store.experts is None and store.selected is None else store

    def write(self, slots: Tensor, routes: Routes) -> None:
        for store, made in ((self.experts, routes.chosen()), (self.selected, routes.selected())):
            if store is not None and made is not None:
                store.index_copy_(0, slots, made.to(store.dtype))

    def read(self, slots: np.ndarray) -> Choices:
        at = torch.from_numpy(slots)
        experts, selected = (
            None if store is None else store[at.to(store.device)].cpu().numpy()
            for store in (self.experts, self.selected)
        )
        return None if experts is None else experts.astype(self._kind, copy=False), selected


def _zeros(shape: tuple[int, ...], kind: type[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.zeros(shape, kind)).to(device)  # numpy's cost nothing until they are written
