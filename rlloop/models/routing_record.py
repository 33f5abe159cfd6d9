"""What a model chooses on its way, by token: experts, and the past tokens that sparse attention reads.

Recorded as it is chosen, compared between engine and trainer, or given, to be chosen again (router replay).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


class RoutingRecord:
    """The choices of one forward.

    Example: `routes = RoutingRecord(); model.hidden(..., routes=routes); routes.chosen()` is [T, layers, top_k].

    Layers are counted among those that have experts. A layer that is computed again, in a backward pass that keeps no
    activations, records the same again.
    """

    def __init__(self, replayed: Tensor | None = None) -> None:
        """`replayed` [T, layers, top_k]: the experts that every layer has to take."""
        self._replayed = replayed
        self._chosen: dict[int, Tensor] = {}
        self._selected: dict[int, Tensor] = {}
        self.scores: dict[int, Tensor] = {}  # by layer: of all experts [T, E] float32, differentiable

    def given(self, layer: int) -> Tensor | None:
        return None if self._replayed is None else self._replayed[:, layer]

    def record(self, layer: int, chosen: Tensor, scores: Tensor) -> None:
        self._chosen[layer], self.scores[layer] = chosen, scores

    def record_selected(self, layer: int, selected: Tensor) -> None:
        self._selected[layer] = _digest(selected)

    def chosen(self) -> Tensor | None:
        """[T, layers, top_k] int64, in the order of the slots."""
        return torch.stack([self._chosen[at] for at in sorted(self._chosen)], dim=1) if self._chosen else None

    def selected(self) -> Tensor | None:
        """[T, indexed layers] int64: a digest of each token's selection."""
        return torch.stack([self._selected[at] for at in sorted(self._selected)], dim=1) if self._selected else None


def _digest(selected: Tensor) -> Tensor:
    """A number for each row's set of positions [T, S]: the sum of a hash of each, modulo 2 ** 64."""
    x = selected + 1  # 0 stands for none, and hashes to 0
    for factor, shift in ((-7046029254386353131, 31), (-4658895280553007687, 29), (-7723592293110705685, 32)):
        x = x * factor
        x = x ^ (x >> shift)
    return x.sum(-1)


@dataclass
class ChoiceCounts:
    """How many (token, layer) pairs of an engine's choices were compared with a trainer's, and how many differ."""

    experts: int = 0
    experts_different: int = 0  # as sets: the order of slots follows the weights
    selections: int = 0
    selections_different: int = 0

    def add(
        self,
        routes: RoutingRecord,
        experts: Sequence[np.ndarray | None],
        selected: Sequence[np.ndarray | None],
        lengths: Sequence[int],
    ) -> None:
        """Compare a forward over so many tokens of each sequence with what an engine recorded there; None: nothing."""
        for mine, theirs, name in ((routes.chosen(), experts, "experts"), (routes.selected(), selected, "selections")):
            known = [array[:length] for array, length in zip(theirs, lengths, strict=True) if array is not None]
            if mine is None or len(known) != len(theirs) or not known:
                continue
            ours, given = mine.cpu().numpy(), np.concatenate(known)
            if name == "experts":
                ours, given = np.sort(ours, -1), np.sort(given, -1)
            different = (ours != given).any(-1) if name == "experts" else ours != given
            setattr(self, name, getattr(self, name) + different.size)
            setattr(self, f"{name}_different", getattr(self, f"{name}_different") + int(different.sum()))

    def metrics(self) -> dict[str, float]:
        """`parity/router_different` and `parity/indexer_different`; absent where nothing was compared."""
        made = {}
        if self.experts:
            made["parity/router_different"] = self.experts_different / self.experts
        if self.selections:
            made["parity/indexer_different"] = self.selections_different / self.selections
        return made
