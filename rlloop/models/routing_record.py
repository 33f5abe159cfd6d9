"""A forward's discrete choices by token: experts, and the past tokens that sparse attention reads.

They are recorded, compared between engine and trainer, and expert choices can be replayed (router replay).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlloop.parallel.collectives import Ranks
from rlloop.parallel.differentiable import gathered


class RoutingRecord:
    """The choices of one forward.

    Example: `routes = RoutingRecord(); model.hidden(..., routes=routes); routes.chosen()` is [T, layers, top_k].

    Layers are counted among those that have experts.
    """

    def __init__(self, replayed: Tensor | None = None) -> None:
        """`replayed` [T, layers, top_k]: the experts to use instead of the router's own choice."""
        self._replayed, self._range = replayed, slice(None)
        self._chosen: dict[int, Tensor] = {}
        self._selected: dict[int, Tensor] = {}
        self.scores: dict[int, Tensor] = {}  # by layer: of all experts [T, E] float32, differentiable

    def replayed(self, layer: int) -> Tensor | None:
        """[T, top_k]: the experts to replay in a layer; None: the layer's own choice."""
        return None if self._replayed is None else self._replayed[self._range, layer]

    @property
    def replays(self) -> bool:
        return self._replayed is not None

    def spread(self, indices: Tensor) -> None:
        """Make this a record of the tokens that stand at `indices` [N] int64 of the forward, some of them
        repeatedly."""
        for layer, scores in self.scores.items():
            self._chosen[layer], self.scores[layer] = self._chosen[layer][indices], _Repeated.apply(scores, indices)
        self._selected = {layer: selected[indices] for layer, selected in self._selected.items()}

    def own(self, begin: int, end: int) -> RoutingRecord:
        """A part of this record for one rank's range of tokens; `gather` makes it whole."""
        self._range = slice(begin, end)
        return self

    def gather(self, cp: Ranks, rows: Sequence[int]) -> None:
        """Gather the records of context-parallel ranks, of `rows[r]` tokens each. Collective."""
        for layer, scores in self.scores.items():
            self._chosen[layer] = cp.gather(self._chosen[layer], 0, rows)
            self.scores[layer] = gathered(scores, cp, rows)
        self._selected = {layer: cp.gather(selected, 0, rows) for layer, selected in self._selected.items()}

    def record(self, layer: int, chosen: Tensor, scores: Tensor) -> None:
        """A layer recomputed in a backward pass records nothing: these scores are the same, and their graph would
        keep activations of every such layer until the pass ends."""
        if layer not in self.scores:
            self._chosen[layer], self.scores[layer] = chosen, scores

    def record_selected(self, layer: int, selected: Tensor) -> None:
        self._selected[layer] = _digest(selected)

    @property
    def places(self) -> list[int]:
        """The layers recorded, counted among those that have experts."""
        return sorted(self._chosen)

    @property
    def selections(self) -> list[int]:
        """The layers recorded, counted among those that have an indexer."""
        return sorted(self._selected)

    def chosen(self) -> Tensor | None:
        """[T, layers, top_k] int64, the order of the top_k as routed."""
        return torch.stack([self._chosen[at] for at in sorted(self._chosen)], dim=1) if self._chosen else None

    def selected(self) -> Tensor | None:
        """[T, indexed layers] int64: a digest of each token's selection."""
        return torch.stack([self._selected[at] for at in sorted(self._selected)], dim=1) if self._selected else None


class _Repeated(torch.autograd.Function):
    """Rows of x [T, E] at `indices` [N], each row once or more. The gradients of its copies are added in order; on a
    GPU `index_select` adds them in any."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        copies = grads[0].index_select(0, indices.argsort(stable=True))
        return torch.segment_reduce(copies, "sum", lengths=indices.bincount(), axis=0), None


def _digest(selected: Tensor) -> Tensor:
    """[T] int64, of each row's set of indices [T, S]: the sum of their hashes modulo 2 ** 64."""
    x = selected + 1  # the padding, −1, becomes 0, which hashes to 0
    for factor, shift in ((-7046029254386353131, 31), (-4658895280553007687, 29), (-7723592293110705685, 32)):
        x = x * factor
        x = x ^ (x >> shift)
    return x.sum(-1)


@dataclass
class ChoiceCounts:
    """Counts of (token, layer) pairs whose choices by engine and trainer were compared, and of differences."""

    experts: int = 0
    experts_different: int = 0  # as sets: the order within top_k may differ
    selections: int = 0
    selections_different: int = 0

    def add(
        self,
        routes: RoutingRecord,
        experts: Sequence[np.ndarray | None],
        selected: Sequence[np.ndarray | None],
        lengths: Sequence[int],
    ) -> None:
        """Compare a forward over the first `lengths` tokens of each sequence with an engine's records.

        Nothing is compared where one of the sequences has no record.
        """
        for mine, theirs, name, at in (
            (routes.chosen(), experts, "experts", routes.places),
            (routes.selected(), selected, "selections", routes.selections),
        ):
            recorded = [array[:length] for array, length in zip(theirs, lengths, strict=True) if array is not None]
            if mine is None or len(recorded) != len(theirs) or not recorded:
                continue
            ours, engines = mine.cpu().numpy(), np.concatenate(recorded)[:, at]
            if name == "experts":
                ours, engines = np.sort(ours, -1), np.sort(engines, -1)
            different = (ours != engines).any(-1) if name == "experts" else ours != engines
            setattr(self, name, getattr(self, name) + different.size)
            setattr(self, f"{name}_different", getattr(self, f"{name}_different") + int(different.sum()))

    @classmethod
    def sum(cls, counts: Sequence[ChoiceCounts]) -> ChoiceCounts:
        return cls(*(sum(numbers) for numbers in zip(*(astuple(each) for each in counts), strict=True)))

    def metrics(self) -> dict[str, float]:
        """`parity/router_different` and `parity/indexer_different`; absent where nothing was compared."""
        metrics = {}
        if self.experts:
            metrics["parity/router_different"] = self.experts_different / self.experts
        if self.selections:
            metrics["parity/indexer_different"] = self.selections_different / self.selections
        return metrics
