"""The expert choices of one forward: recorded as they are made, or given, to be made again."""

from __future__ import annotations

import torch
from torch import Tensor


class Routes:
    """Example: `routes = Routes(); model.hidden(..., routes=routes); routes.chosen()` is [T, layers, top_k].

    Layers are counted among those that have experts. A layer that is computed again, in a backward pass that keeps no
    activations, records the same again.
    """

    def __init__(self, replayed: Tensor | None = None) -> None:
        """`replayed` [T, layers, top_k]: the choices that every layer has to make."""
        self._replayed = replayed
        self._chosen: dict[int, Tensor] = {}
        self.scores: dict[int, Tensor] = {}  # by layer: of all experts [T, E] float32, differentiable

    def given(self, layer: int) -> Tensor | None:
        return None if self._replayed is None else self._replayed[:, layer]

    def record(self, layer: int, chosen: Tensor, scores: Tensor) -> None:
        self._chosen[layer], self.scores[layer] = chosen, scores

    def chosen(self) -> Tensor:
        """[T, layers, top_k] int64, in the order of the slots."""
        return torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1)
