"""Decode steps on a GPU as CUDA graphs: one launch in place of some hundreds.

A graph is recorded for a number of rows and of pages a row, rounded up, when a step first needs it. It reads tokens,
positions, slots and pages from buffers of its own and the weights where they lie, so an update in place is seen by the
next replay. Rows that nobody uses decode token 0 at position 0 of a slot that nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlloop.models.routes import Routes
from rlloop.numerics.layout import AttentionLayout
from rlloop.rollout.choices import ChoiceStore
from rlloop.rollout.kv_cache import PagedCache

if TYPE_CHECKING:
    from rlloop.models import Model

LEAST_TOKENS = 1024  # what the pages of a row hold at least


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [R, 3 + B] int64: token, position, slot, first slots of pages
    layout: AttentionLayout  # filled from them
    logits: Tensor  # [R, V] float32


class DecodeGraphs:
    """Steps in which every request has one token to compute."""

    def __init__(self, model: Model, cache: PagedCache, page_size: int, choices: ChoiceStore | None) -> None:
        self._model, self._cache, self._page_size, self._choices = model, cache, page_size, choices
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._made_of = (model.ops, self._addresses())

    def check_weights(self) -> None:
        """Forget the graphs where parameters lie elsewhere by now, or meet other operations."""
        if self._made_of != (now := (self._model.ops, self._addresses())):
            self._recorded.clear()
            self._made_of = now

    def logits(self, tokens: Tensor, positions: np.ndarray, slots: np.ndarray, pages: np.ndarray) -> Tensor:
        """tokens, positions, slots [S], pages [S, B] the first slots of each row's pages -> logits [S, V] float32.
        The host need not know the tokens.

        What it returns is valid until the next call.
        """
        least = min(LEAST_TOKENS, self._model.max_positions) // self._page_size
        rows, columns = rounded(len(tokens)), at_least(pages.shape[1], least)
        step = self._recorded.get((rows, columns)) or self._record(rows, columns)
        given = torch.empty(rows, 3 + columns, dtype=torch.int64, pin_memory=True)
        host, count = given.numpy(), len(tokens)
        host[:count, 1], host[:count, 2] = positions, slots
        host[:count, 3 : 3 + pages.shape[1]] = pages
        host[:count, 3 + pages.shape[1] :] = self._cache.spare
        host[:, 0] = host[count:, 1] = 0
        host[count:, 2:] = self._cache.spare
        step.inputs.copy_(given, non_blocking=True)
        step.inputs[:count, 0] = tokens
        step.graph.replay()
        return step.logits[:count]

    def _record(self, rows: int, columns: int) -> _Recorded:
        device = self._model.device
        inputs = torch.zeros(rows, 3 + columns, dtype=torch.int64, device=device)
        inputs[:, 2:] = self._cache.spare
        layout = AttentionLayout(
            query_start=torch.arange(rows + 1, device=device),
            context=torch.zeros(rows, dtype=torch.int64, device=device),
            block_start=torch.empty(rows, columns, dtype=torch.int64, device=device),
            block_size=self._page_size,
            contiguous=False,
        )

        def work() -> Tensor:
            tokens, positions, slots = (inputs[:, i].contiguous() for i in range(3))
            layout.context.copy_(positions)
            layout.block_start.copy_(inputs[:, 3:])
            self._cache.slots = slots
            routes = None if self._choices is None else Routes()
            tokens = tokens.clamp(min=0)  # -1: no token could be drawn, of which the host knows later
            hidden = self._model.hidden(tokens, positions, layout, self._cache, routes=routes)
            if self._choices is not None and routes is not None:
                self._choices.write(slots, routes)
            return self._model.ops.logits(hidden, self._model.head)

        work()  # compiles what has to be
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = work()
        made = self._recorded[rows, columns] = _Recorded(graph, inputs, layout, logits)
        return made

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._model.parameters()]


def rounded(rows: int) -> int:
    """Up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: no more than a third of the rows is idle."""
    if rows <= 3:
        return rows
    power = 1 << (rows - 1).bit_length()
    return power if rows > power * 3 // 4 else power * 3 // 4


def at_least(pages: int, least: int) -> int:
    """`least` doubled until it reaches `pages`."""
    size = max(1, least)
    while size < pages:
        size *= 2
    return size
