"""What the model chose for every token in the cache, by slot, so that a cached prefix brings its choices along."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlloop.models import Model, Routes

Choices = tuple[np.ndarray | None, np.ndarray | None]  # experts [tokens, layers, top_k], selections [tokens, layers]


class ChoiceStore:
    """Experts in the smallest unsigned type that holds them; digests of what indexers selected as int64."""

    def __init__(self, model: Model, num_slots: int) -> None:
        self.experts = self.selected = None
        routers, indexed = model.route_shape(), model.indexed_layers()
        if routers is not None:
            layers, top_k, experts = routers
            self.experts = np.zeros((num_slots, layers, top_k), np.min_scalar_type(experts - 1))
        if indexed:
            self.selected = np.zeros((num_slots, indexed), np.int64)

    @classmethod
    def of(cls, model: Model, num_slots: int) -> ChoiceStore | None:
        """None for a model that chooses nothing."""
        store = cls(model, num_slots)
        return None if store.experts is None and store.selected is None else store

    def write(self, slots: Tensor, routes: Routes) -> None:
        at = slots.cpu().numpy()
        for store, made in ((self.experts, routes.chosen()), (self.selected, routes.selected())):
            if store is not None and made is not None:
                store[at] = made.to(torch.int64).cpu().numpy()

    def read(self, slots: np.ndarray) -> Choices:
        experts, selected = self.experts, self.selected
        return None if experts is None else experts[slots], None if selected is None else selected[slots]
