"""Recurrent states of vLLM's requests, which have no place in its pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.layout import RecurrentState
from rlloop.numerics.transfer import on_device


class RequestStates:
    """A row of states for each request, from its first step until it ends or is preempted: vLLM then computes it from
    its first token on, where states begin with zeros (`RecurrentState`). Requests that a step leaves out keep theirs.
    """

    def __init__(self, spec: list[dict[str, tuple[int, ...]]], most: int, device: torch.device) -> None:
        """`spec`: `Model.state_spec()`. `most`: requests that run at a time."""
        self._spec, self._most, self._device = spec, most, device
        self._stores: list[dict[str, Tensor]] = []  # of each layer; taken with the first step
        self._row_of: dict[str, int] = {}  # by vLLM's id
        self._free = list(range(most))[::-1]

    def before(self, step: Any) -> None:
        """`step` (vLLM's SchedulerOutput) is about to be computed: rows of requests that ended or wait are free."""
        for id in (*step.finished_req_ids, *(step.preempted_req_ids or ())):
            if (row := self._row_of.pop(id, None)) is not None:
                self._free.append(row)

    def rows(self, ids: Sequence[str]) -> Tensor:
        """[S] int64: the rows of a step's requests."""
        for id in ids:
            if id not in self._row_of:
                self._row_of[id] = self._free.pop()
        return on_device(np.array([self._row_of[id] for id in ids], np.int64), self._device)

    def carried(self, layer: int, name: str, rows: Tensor) -> RecurrentState:
        """Settled: a layer's projections stand between its states and whatever wrote to them."""
        if not self._stores:
            self._stores = [
                {name: torch.zeros(self._most, *shape, device=self._device) for name, shape in shapes.items()}
                for shapes in self._spec
            ]
        return RecurrentState(self._stores[layer][name], rows, settled=True)

    def release(self) -> None:
        """Free the memory, with no request in flight."""
        self._stores = []
