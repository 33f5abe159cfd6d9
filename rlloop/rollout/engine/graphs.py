"""Decode steps on a GPU as CUDA graphs: one launch in place of some hundreds.

A graph is recorded for a (rounded up) number of rows and of pages per row, when a step first needs it. It reads tokens,
indices, positions, slots, seeds, state rows and pages from its own buffers, and the weights in place, so the next
replay sees their update. Unused rows decode token 0 at position 0 into a spare slot.

If no row's distribution is warped (truncated, scaled or banned), the graph draws the tokens as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlloop.models.routing_record import RoutingRecord
from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.rollout.engine.adapters import single
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.kv_cache import PagedCache

if TYPE_CHECKING:
    from rlloop.models import Model

LEAST_TOKENS = 1024  # smallest number of tokens in a row's pages
ADAPTER, SLOT = 1, 4  # columns of `_Recorded.inputs`
ROW = 6  # of the recurrent states
PAGES = 7  # the column of `_Recorded.inputs` where they begin


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [R, 7 + B] int64: token, adapter's slot, index, position, slot, seed, row, first slots of pages
    layout: AttentionLayout  # filled from them
    outputs: tuple[Tensor, ...]  # logits; or ids [R] int64 and, packed, [3, R] int32


class DecodeGraphs:
    """Steps in which every request has one token to compute."""

    def __init__(self, model: Model, cache: PagedCache, page_size: int, choices: ChoiceStore | None) -> None:
        self._model, self._cache, self._page_size, self._choices = model, cache, page_size, choices
        self._recorded: dict[tuple[int, int, bool, str], _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._made_of, self._adapters_at = (model.ops, self._addresses()), 0
        self.least = (1, 1)  # rows and pages of the graphs that are replayed

    def check_weights(self) -> None:
        """Drop the graphs if parameters were moved, or operations replaced."""
        if self._made_of != (now := (self._model.ops, self._addresses())):
            self.drop()
            self._made_of = now

    def drop(self) -> None:
        """Drop the graphs; they are recorded anew when they are needed."""
        self._recorded.clear()

    def logits(
        self, tokens: Tensor, adapters: np.ndarray | None, index: np.ndarray, positions: np.ndarray, slots: np.ndarray,
        pages: np.ndarray, rows: np.ndarray,
    ) -> Tensor:  # fmt: skip
        """Logits of one token a row, as `Model.logits` has them. The host need not know the tokens.

        tokens, adapters' slots (−1: none; None: all rows have the model's own), index in the sequence, position for the
        rope, slots [S]; pages [S, B]: the first slots of each row's; rows [S] of the states.

        The result is valid until the next call.
        """
        seeds = np.zeros_like(rows)
        (logits,) = self._replay(False, tokens, adapters, pages, index, positions, slots, seeds, rows)
        return logits[: len(tokens)]

    def draw(
        self,
        tokens: Tensor,
        adapters: np.ndarray | None,
        index: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        pages: np.ndarray,
        rows: np.ndarray,
        seeds: np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        """The next tokens, drawn from unwarped distributions: ids [S], and [3, S] as returned by `packed`."""
        ids, drawn = self._replay(True, tokens, adapters, pages, index, positions, slots, seeds, rows)
        return ids[: len(tokens)], drawn[:, : len(tokens)]

    def shape(self, rows: int, pages: int, *, draws: bool = False) -> tuple[int, int]:
        """Rows and pages of the smallest graph for this many. Graphs that draw keep no logits, so many may exist."""
        return rounded(rows, finely=draws), at_least(
            pages, min(LEAST_TOKENS, self._model.max_positions) // self._page_size
        )

    def idle(self, draws: bool) -> None:
        """Replay a graph with nothing to decode, since other ranks need this rank's experts."""
        nothing = np.zeros(0, np.int64)
        self._replay(
            draws, torch.empty(0, dtype=torch.int64, device=self._model.device), None, nothing[:, None], nothing
        )

    def _replay(
        self, draws: bool, tokens: Tensor, adapters: np.ndarray | None, pages: np.ndarray, *columns: np.ndarray
    ) -> tuple[Tensor, ...]:
        adapted = "none" if adapters is None else "one" if single(adapters) else "many"
        if adapters is not None and self._adapters_at != (now := self._model.adapters.moves):
            self._recorded = {key: step for key, step in self._recorded.items() if key[3] == "none"}
            self._adapters_at = now
        (rows, width), count = self.shape(len(tokens), pages.shape[1], draws=draws), len(tokens)
        rows, width = max(rows, self.least[0]), max(width, self.least[1])
        step = self._recorded.get((rows, width, draws, adapted)) or self._record(rows, width, draws, adapted)
        staging = torch.empty(rows, PAGES + width, dtype=torch.int64, pin_memory=True)
        host = staging.numpy()
        host[:, :PAGES], host[:, PAGES:], host[:, SLOT] = 0, self._cache.spare, self._cache.spare
        host[:, ROW] = self._cache.spare_row
        if adapters is not None:
            host[:, ADAPTER], host[:count, ADAPTER] = -1, adapters
        for column, values in enumerate(columns, ADAPTER + 1):
            host[:count, column] = values
        host[:count, PAGES : PAGES + pages.shape[1]] = pages
        step.inputs.copy_(staging, non_blocking=True)
        step.inputs[:count, 0] = tokens
        step.graph.replay()
        return step.outputs

    def _record(self, rows: int, width: int, draws: bool, adapted: str) -> _Recorded:
        device, output = self._model.device, self._model.output
        inputs = torch.zeros(rows, PAGES + width, dtype=torch.int64, device=device)
        inputs[:, SLOT], inputs[:, PAGES:], inputs[:, ROW] = self._cache.spare, self._cache.spare, self._cache.spare_row
        layout = AttentionLayout(
            query_start=torch.arange(rows + 1, device=device),
            context=torch.zeros(rows, dtype=torch.int64, device=device),
            block_start=torch.empty(rows, width, dtype=torch.int64, device=device),
            block_size=self._page_size,
            contiguous=False,
        )

        def work() -> tuple[Tensor, ...]:
            tokens, adapter, index, positions, slots, seeds, state_rows = (
                inputs[:, i].contiguous() for i in range(PAGES)
            )
            layout.context.copy_(index)
            layout.block_start.copy_(inputs[:, PAGES:])
            self._cache.slots, self._cache.rows = slots, state_rows
            adapters = None if adapted == "none" else self._model.adapters.rows(adapter, adapted == "one")
            routes = None if self._choices is None else RoutingRecord()
            tokens = tokens.clamp(min=0)  # -1: no token could be drawn; the host checks later
            hidden = self._model.hidden(
                tokens, positions, layout, self._cache, routes=routes, even=True, adapters=adapters
            )
            if self._choices is not None and routes is not None:
                self._choices.write(slots, routes)
            logits = self._model.logits(hidden, adapters)
            if not draws:
                return (logits,)
            drawn = output.sample(logits, LogitsProcessing(), seeds, index + 1)
            return drawn[0], packed(*drawn)

        work()  # compiles kernels first
        if not self._recorded:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile, such as one that stages new weights.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = work()
        step = self._recorded[rows, width, draws, adapted] = _Recorded(graph, inputs, layout, outputs)
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
