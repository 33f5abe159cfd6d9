"""Decode steps on a GPU as CUDA graphs: one launch in place of some hundreds.

A graph is recorded for a number of rows and of pages a row, rounded up, when a step first needs it. It reads tokens,
indices, positions, slots, seeds and pages from buffers of its own, and the weights where they lie, so the next replay
sees an update in place. Rows that nobody uses decode token 0 at position 0 of a slot that nobody reads.

Where no row's distribution is warped, the graph draws the tokens, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlloop.models.routing_record import RoutingRecord
from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.kv_cache import PagedCache

if TYPE_CHECKING:
    from rlloop.models import Model

LEAST_TOKENS = 1024  # what the pages of a row hold at least
ADAPTER, SLOT = 1, 4  # columns of `_Recorded.inputs`
PAGES = 6  # the column of `_Recorded.inputs` where they begin


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [R, 6 + B] int64: token, adapter's slot, index, position, slot, seed, first slots of pages
    layout: AttentionLayout  # filled from them
    outputs: tuple[Tensor, ...]  # logits; or ids [R] int64 and, packed, [3, R] int32


class DecodeGraphs:
    """Steps in which every request has one token to compute."""

    def __init__(self, model: Model, cache: PagedCache, page_size: int, choices: ChoiceStore | None) -> None:
        self._model, self._cache, self._page_size, self._choices = model, cache, page_size, choices
        self._recorded: dict[tuple[int, int, bool, bool], _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._made_of, self._adapters_at = (model.ops, self._addresses()), []
        self.least = (1, 1)  # rows and pages of the graphs that are replayed

    def check_weights(self) -> None:
        """Forget the graphs where parameters lie elsewhere by now, or meet other operations."""
        if self._made_of != (now := (self._model.ops, self._addresses())):
            self._recorded.clear()
            self._made_of = now

    def logits(
        self, tokens: Tensor, adapters: np.ndarray | None, index: np.ndarray, positions: np.ndarray, slots: np.ndarray,
        pages: np.ndarray,
    ) -> Tensor:  # fmt: skip
        """Logits of one token a row, as `Model.logits` has them. The host need not know the tokens.

        tokens, adapters' slots (−1: none; None: all rows have the model's own), index in the sequence, position for the
        rope, slots [S]; pages [S, B]: the first slots of each row's.

        What it returns is valid until the next call.
        """
        (logits,) = self._replay(False, tokens, adapters, pages, index, positions, slots)
        return logits[: len(tokens)]

    def draw(
        self,
        tokens: Tensor,
        adapters: np.ndarray | None,
        index: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        pages: np.ndarray,
        seeds: np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        """The next tokens, drawn from unwarped distributions: ids [S] and, as `packed` has them, [3, S]."""
        ids, made = self._replay(True, tokens, adapters, pages, index, positions, slots, seeds)
        return ids[: len(tokens)], made[:, : len(tokens)]

    def shape(self, rows: int, pages: int, *, draws: bool = False) -> tuple[int, int]:
        """The rows and pages of the graph that decodes so many. Those that draw keep no logits: there may be many."""
        return rounded(rows, finely=draws), at_least(
            pages, min(LEAST_TOKENS, self._model.max_positions) // self._page_size
        )

    def idle(self, draws: bool) -> None:
        """Replay the graph of size `least`, with nothing to decode: others of the layout need its experts."""
        nothing = np.zeros(0, np.int64)
        self._replay(
            draws, torch.empty(0, dtype=torch.int64, device=self._model.device), None, nothing[:, None], nothing
        )

    def _replay(
        self, draws: bool, tokens: Tensor, adapters: np.ndarray | None, pages: np.ndarray, *columns: np.ndarray
    ) -> tuple[Tensor, ...]:
        adapted = adapters is not None
        if adapted and self._adapters_at != (now := self._model.adapters.addresses()):
            self._recorded = {key: step for key, step in self._recorded.items() if not key[3]}
            self._adapters_at = now
        (rows, width), count = self.shape(len(tokens), pages.shape[1], draws=draws), len(tokens)
        rows, width = max(rows, self.least[0]), max(width, self.least[1])
        step = self._recorded.get((rows, width, draws, adapted)) or self._record(rows, width, draws, adapted)
        given = torch.empty(rows, PAGES + width, dtype=torch.int64, pin_memory=True)
        host = given.numpy()
        host[:, :PAGES], host[:, PAGES:], host[:, SLOT] = 0, self._cache.spare, self._cache.spare
        if adapters is not None:
            host[:, ADAPTER], host[:count, ADAPTER] = -1, adapters
        for column, values in enumerate(columns, ADAPTER + 1):
            host[:count, column] = values
        host[:count, PAGES : PAGES + pages.shape[1]] = pages
        step.inputs.copy_(given, non_blocking=True)
        step.inputs[:count, 0] = tokens
        step.graph.replay()
        return step.outputs

    def _record(self, rows: int, width: int, draws: bool, adapted: bool) -> _Recorded:
        device, output = self._model.device, self._model.output
        inputs = torch.zeros(rows, PAGES + width, dtype=torch.int64, device=device)
        inputs[:, SLOT], inputs[:, PAGES:] = self._cache.spare, self._cache.spare
        layout = AttentionLayout(
            query_start=torch.arange(rows + 1, device=device),
            context=torch.zeros(rows, dtype=torch.int64, device=device),
            block_start=torch.empty(rows, width, dtype=torch.int64, device=device),
            block_size=self._page_size,
            contiguous=False,
        )

        def work() -> tuple[Tensor, ...]:
            tokens, adapter, index, positions, slots, seeds = (inputs[:, i].contiguous() for i in range(PAGES))
            layout.context.copy_(index)
            layout.block_start.copy_(inputs[:, PAGES:])
            self._cache.slots = slots
            adapters = self._model.adapters.rows(adapter) if adapted else None
            routes = None if self._choices is None else RoutingRecord()
            tokens = tokens.clamp(min=0)  # -1: no token could be drawn, of which the host knows later
            hidden = self._model.hidden(
                tokens, positions, layout, self._cache, routes=routes, even=True, adapters=adapters
            )
            if self._choices is not None and routes is not None:
                self._choices.write(slots, routes)
            logits = self._model.logits(hidden, adapters)
            if not draws:
                return (logits,)
            made = output.sample(logits, LogitsProcessing(), seeds, index + 1)
            return made[0], packed(*made)

        work()  # compiles what has to be
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            made = work()
        step = self._recorded[rows, width, draws, adapted] = _Recorded(graph, inputs, layout, made)
        return step

    def _addresses(self) -> list[int]:
        return [getattr(parameter, "codes", parameter).data_ptr() for parameter in self._model.parameters()]


def packed(ids: Tensor, logprobs: Tensor, raw: Tensor) -> Tensor:
    """Ids, logprobs and raw logprobs of R rows as the bits of [3, R] int32: one copy to the host."""
    return torch.stack([ids.int(), logprobs.view(torch.int32), raw.view(torch.int32)])


def rounded(rows: int, *, finely: bool = False) -> int:
    """Rounds up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: no more than a third of the rows is idle.

    `finely`: beyond 32, where more rows take longer, to 36, 40, 44, ..., 64, 72, ...: no more than a ninth.
    """
    if rows <= 3:
        return rows
    power = 1 << (rows - 1).bit_length()
    if finely and rows > 32:
        return -(-rows // (power // 16)) * (power // 16)
    return power if rows > power * 3 // 4 else power * 3 // 4


def at_least(pages: int, least: int) -> int:
    """`least` doubled until it reaches `pages`."""
    size = max(1, least)
    while size < pages:
        size *= 2
    return size
