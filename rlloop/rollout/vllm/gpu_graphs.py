"""Decode steps of vLLM on a GPU as CUDA graphs, from the last tokens to the next ones with their logprobs."""

from __future__ import annotations

import torch
from torch import Tensor

from rlloop.models import Model, RoutingRecord
from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.graph_sizes import at_least, rounded
from rlloop.rollout.engine.graphs import LEAST_TOKENS
from rlloop.rollout.vllm.attention import PagedStore, PagedStores, StepMetadata
from rlloop.rollout.vllm.sampler import Replayed, Rows

SPARE = 0  # a slot of vLLM's null block, which is never read


class StepGraphs:
    """Decode steps of one view of the weights: each is one replay of a graph, drawing of tokens included.

    Unused rows decode token 0 at position 0 into a slot that is never read.
    """

    def __init__(
        self, policy: Model, stores: list[dict[str, PagedStore]], choices: ChoiceStore | None, most: int
    ) -> None:
        """`most`: requests in a step."""
        self._policy, self._stores, self._choices = policy, stores, choices
        self._recorded: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Replayed]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # Inputs of graphs, which must outlive them; each is aligned for vector loads.
        self._most, device = rounded(most + most % 2), policy.device
        self._start = torch.arange(self._most + 1, device=device)
        self._numbers = torch.zeros(5, self._most, dtype=torch.int64, device=device)
        self._fractions = torch.zeros(3, self._most, device=device)
        self._pages: dict[int, Tensor] = {}  # by columns
        self._rows: Rows | None = None  # whose parameters these are

    def replay(self, tokens: Tensor, positions: Tensor, step: StepMetadata, rows: Rows) -> Replayed:
        """tokens, positions [N]. The result is valid until the next call."""
        count, blocks = len(tokens), step.blocks
        columns = at_least(blocks.shape[1], LEAST_TOKENS // step.block_size)
        if columns not in self._pages:
            self._pages[columns] = self._numbers.new_zeros(self._most, columns)
        if rows is not self._rows:
            self._take(rows, count)
        for buffer, values in zip(self._numbers, (tokens, positions, step.slots), strict=False):
            buffer[:count].copy_(values)
        self._pages[columns][:count, : blocks.shape[1]].copy_(blocks)
        key = rounded(count), columns
        graph, outputs = self._recorded.get(key) or self._record(*key, step.block_size)
        graph.replay()
        if outputs.drawn is None or rows.bans:
            return Replayed(outputs.logits[:count], None)
        ids, logprobs, raw = outputs.drawn
        return Replayed(outputs.logits[:count], (ids[:count], logprobs[:count], raw[:count]))

    def _take(self, rows: Rows, count: int) -> None:
        warp, self._rows = rows.warp, rows
        self._numbers[:, count:] = SPARE
        for buffer, values, otherwise in (
            (self._numbers[3], rows.seeds, 0),
            (self._numbers[4], warp.top_k, 0),
            (self._fractions[0], warp.temperature, 1),
            (self._fractions[1], warp.top_p, 1),
            (self._fractions[2], warp.min_p, 0),
        ):
            buffer.fill_(otherwise)
            if values is not None:
                buffer[:count].copy_(values)

    def _record(self, rows: int, columns: int, size: int) -> tuple[torch.cuda.CUDAGraph, Replayed]:
        tokens, positions, slots, seeds, top_k = self._numbers[:, :rows]
        temperature, top_p, min_p = self._fractions[:, :rows]
        start, pages, ops = self._start[: rows + 1], self._pages[columns][:rows], self._policy.ops
        warp = LogitsProcessing(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

        def work() -> Replayed:
            layout = AttentionLayout(start, positions, pages * size, size, contiguous=False)
            routes, stores = None if self._choices is None else RoutingRecord(), PagedStores(self._stores, slots)
            # `even`: ranks of an engine take the same steps.
            hidden = self._policy.hidden(tokens.clamp(min=0), positions, layout, stores, routes=routes, even=True)
            if self._choices is not None and routes is not None:
                self._choices.write(slots, routes)
            logits = self._policy.output.whole(self._policy.logits(hidden))
            if ops.profile.token_logprob != "rlloop":  # it reads numbers on the host
                return Replayed(logits, None)
            return Replayed(logits, ops.sample(logits, warp, seeds, positions + 1))

        work()  # compiles what has to be
        if not self._recorded:  # a pool ends with its last graph, one whose recording failed too
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads use the GPU meanwhile: vLLM's, which waits for tokens, and one that stages new weights.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = work()
        self._recorded[rows, columns] = graph, outputs
        return graph, outputs
